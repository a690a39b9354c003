"""The newest release of each dependency, whatever the bounds say, and whether the tests that touch it pass with it.

    python -m tests.newest                  # all of them, in one new environment
    python -m tests.newest transformers     # these, beside the others as they are installed here

It prints a table of Markdown: package, the version that is installed here, the newest, and what the tests said.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import attrs

ROOT = Path(__file__).parent.parent
ALL = ("tests",)
TOUCHED: Mapping[str, tuple[str, ...]] = {  # the tests that reach a package
    "attrs": ALL,
    "av": ("tests/data", "tests/models/test_videos.py"),
    "beartype": ALL,
    "bitsandbytes": ("tests/models/test_quantised.py", "tests/steps/test_quantised.py"),
    "cattrs": ("tests/settings", "tests/commands", "tests/runs"),
    "datasets": ("tests/data", "tests/assembly"),
    "dill": ("tests/rewards", "tests/workers", "tests/fleet"),
    "fsspec": ("tests/runtime/test_remote.py", "tests/runs/test_copies.py"),
    "hypothesis": ALL,
    "ipykernel": ("tests/test_notebooks.py",),
    "jaxtyping": ALL,
    "math-verify": ("tests/rewards",),
    "matplotlib": ("tests/report", "tests/studies/ablate", "tests/studies/plan"),
    "nbclient": ("tests/test_notebooks.py",),
    "numpy": ALL,
    "peft": ("tests/models/test_lora.py", "tests/models/test_lora_files.py"),
    "pillow": ("tests/data", "tests/models/test_vision.py", "tests/report"),
    "pytest": ALL,
    "pytest-xdist": ALL,
    "rich": ("tests/commands", "tests/settings"),
    "safetensors": ("tests/models", "tests/runtime", "tests/runs"),
    "tensorboard": ("tests/runs",),
    "torch": ALL,
    "transformers": ALL,
    "triton": ("tests/kernels", "tests/studies/ablate"),
    "tyro": ("tests/commands", "tests/settings"),
    "xxhash": ("tests/runtime", "tests/rollout"),
}
CHECKERS = ("ruff", "pyright")  # they have no tests: the tree is checked with them
ELSEWHERE = "not tried here: it needs a GPU, a server or an environment of its own"


@attrs.frozen
class Row:
    """A line of the table."""

    package: str
    tested: str
    newest: str
    verdict: str

    def __str__(self) -> str:
        return f"| {self.package} | {self.tested} | {self.newest} | {self.verdict} |"


def requirements(project: Mapping[str, object]) -> dict[str, str]:
    """The other packages that pyproject.toml names, each with what it says of it: bounds, extras and markers."""
    table = project["project"]
    lines = [*table["dependencies"], *(x for lines in table["optional-dependencies"].values() for x in lines)]  # type: ignore[index]
    named = {name_of(line): line for line in sorted(lines, key=str.lower)}
    return {name: line for name, line in named.items() if name != table["name"]}  # type: ignore[index]


def name_of(requirement: str) -> str:
    """The package's name in a requirement, in lower case."""
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower()


def unbounded(requirement: str) -> str:
    """A requirement without its bounds, but with its extras and markers."""
    head, *marker = requirement.split(";")
    return ";".join([re.sub(r"[<>=!~].*", "", head).strip(), *marker])


def verdict(results: Mapping[str, bool], touched: Sequence[str]) -> str:
    """What tests said, by name "tests/models/test_load.py::test_x", of those in the files and folders `touched`."""
    chosen = {n: ok for n, ok in results.items() if any(n == x or n.startswith((f"{x}/", f"{x}::")) for x in touched)}
    failed = sorted(name for name, ok in chosen.items() if not ok)
    if not chosen:
        return "no test ran"
    return f"{len(chosen)} passed" if not failed else f"{len(failed)} of {len(chosen)} fail: {', '.join(failed[:3])}"


def outcomes(report: Path) -> dict[str, bool]:
    """Whether each test of a JUnit report passed; those that were skipped are left out."""
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        path = f"{case.get('classname', '').replace('.', '/')}.py"
        wrong = case.find("failure") is not None or case.find("error") is not None
        if case.find("skipped") is None:
            results[f"{path}::{case.get('name')}"] = not wrong
    return results


def version_in(python: Path, package: str) -> str:
    """The version of a package in an interpreter's environment, "-" if it is not there."""
    code = f"from importlib import metadata; print(metadata.version({package!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "-"


def tested_version(package: str) -> str:
    """The version that is installed here, without the name of its build, as "+cpu"; "-" if it is not."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return "-"


def make_environment(directory: Path, wanted: Sequence[str], kept: Sequence[str]) -> Path:
    """The interpreter of a new environment with the newest `wanted` beside `kept`, and fppo without its bounds."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, *wanted, *kept], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    return python


def check(python: Path, package: str) -> str:
    """What a checker says of the tree."""
    words = ["check", "."] if package == "ruff" else ["--pythonpath", str(python)]
    said = subprocess.run([python.parent / package, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return "clean" if said.returncode == 0 else said.stdout.strip().splitlines()[-1]


def rows(python: Path, packages: Sequence[str], results: Mapping[str, bool]) -> list[Row]:
    """The table's lines, one for each package."""
    lines = []
    for package in packages:
        said = ELSEWHERE
        if package in CHECKERS:
            said = check(python, package)
        elif package in TOUCHED:
            said = verdict(results, TOUCHED[package])
        lines.append(Row(package, tested_version(package), version_in(python, package), said))
    return lines


def main(names: Sequence[str]) -> int:
    """Prints the table; 1 if anything failed in it."""
    every = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    tried = {name: line for name, line in every.items() if name in TOUCHED or name in CHECKERS}
    if unknown := sorted({*names} - {*tried}):
        sys.exit(f"no tests are known to touch {unknown}; there are {sorted(tried)}")
    chosen = list(names or tried)
    kept = [f"{name}=={tested_version(name)}" for name in tried if name not in chosen and tested_version(name) != "-"]
    with tempfile.TemporaryDirectory() as place:
        python = make_environment(Path(place) / "venv", [unbounded(tried[name]) for name in chosen], kept)
        paths = sorted({path for name in chosen for path in TOUCHED.get(name, ())})
        report = Path(place) / "report.xml"
        if paths:
            run = [python, "-m", "pytest", f"--junitxml={report}", *(ALL if "tests" in paths else paths)]
            subprocess.run(run, cwd=ROOT, check=False)
        table = rows(python, chosen if names else list(every), outcomes(report) if paths else {})
    print("\n| package | tested | newest | verdict |\n|---|---|---|---|")
    print("\n".join(map(str, table)))
    wrong = [row for row in table if row.verdict not in ("clean", ELSEWHERE) and not row.verdict.endswith("passed")]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
