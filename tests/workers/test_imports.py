"""Worker processes start fast: what they import does not load torch. User functions are imported by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fppo.workers.imports import imported, search


@pytest.mark.parametrize(
    "module", ["fppo.workers.process", "fppo.workers.runner", "fppo.rewards", "fppo.rollout.turns.tools"]
)
def test_what_worker_processes_import_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def write(directory, **modules):
    for name, text in modules.items():
        (directory / f"{name}.py").write_text(text)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Modules of a user's in the working directory, as a console script finds them not."""
    write(
        tmp_path,
        users_own="def score(x): return x\nclass Made:\n    def __call__(self): return 3\n    @staticmethod\n"
        "    def inner(): return 4\nmade = Made()\nnumber = 5\n",
        users_exit="import sys\nsys.exit(3)\n",
        users_broken="raise KeyError('no\\x1bthing')\n",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x])
    yield tmp_path
    for name in ("users_own", "users_exit", "users_broken"):
        sys.modules.pop(name, None)


def test_functions_and_callable_instances_are_imported_by_name(own):
    assert imported("users_own:score", "reward")(2) == 2
    assert imported("users_own:made", "reward")() == 3
    assert imported("users_own:Made.inner", "reward")() == 4
    assert imported("users_own:Made", "environment", also=type).__name__ == "Made"
    assert imported("users_own:number", "number", also=(int, str)) == 5
    assert sys.path[-1] == str(own)
    search([own, "."])
    assert sys.path.count(str(own)) == 1
    search([own / "deeper"])
    assert sys.path[-2:] == [str(own), str(own / "deeper")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("users_own", "is not of the form module:function"),
        (":score", "is not of the form module:function"),
        ("users_own:", "is not of the form module:function"),
        ("users_nowhere:score", "does not import: ModuleNotFoundError"),
        ("users_exit:score", r"does not import: the module's own code, .*users_exit.py:2, called sys.exit\(3\)"),
        ("users_broken:score", r"does not import: KeyError: 'no\\x1bthing'"),
        ("users_own:scores", "'users_own' has no 'scores'; did you mean 'score'?"),
        ("users_own:xyz", "'users_own' has no 'xyz'$"),
        ("users_own:Made.outer", "'users_own' has no 'outer'"),
        ("users_own:Made", "is a class, not a function; name a function"),
        ("users_own:number", "is a int, not a function"),
    ],
)
def test_what_is_no_function_is_named(own, name, text):
    with pytest.raises(ValueError, match=f"^reward '{name}'.*{text}"):
        imported(name, "reward")
