"""Every command that the README and the pages show is one that the command line takes; nothing of it runs."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fppo import quickstart
from fppo.assembly import trials
from fppo.commands import ablate, actions, audit, bias, cli, compare, distributed, env, guide, plan, view
from fppo.commands import check as checking
from fppo.report import timeline, write
from fppo.runs import copies
from fppo.settings import files, machine, modules, places

from .pages import PAGES, ROOT, Block, blocks

MINIMAL = {
    "model": {"path": "model"},
    "data": {"path": ["train.jsonl"], "eval_path": ["test.jsonl"]},
    "reward": {"functions": ["exact_match"]},
}
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
MODULES = ("build",)  # of other packages, that a page says how to install
# not ours to check
OTHERS = ("git", "mkdocs", "ruff", "pyright", "source", "cd", "tensorboard", "pre-commit", "ray", "npm", "ssh")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that were understood, by name; what would run them only notes that it was reached."""
    names: list[str] = []

    def reached(module: Any, function: str, result: Any = 0) -> None:
        monkeypatch.setattr(module, function, lambda *values, **more: names.append(function) or result)

    monkeypatch.setattr(places, "place_problems", lambda settings: [])  # of what is not there
    monkeypatch.setattr(places, "remote_problems", lambda settings: [])
    monkeypatch.setattr(copies, "run_at", lambda place, step: contextlib.nullcontext(Path(place)))
    monkeypatch.setattr(modules, "module_problems", lambda settings: [])
    value_problems = trials.value_problems
    of_ours = lambda parts, known: [x for x in value_problems(parts, known) if "does not import" not in str(x)]  # noqa: E731
    monkeypatch.setattr(trials, "value_problems", of_ours)
    monkeypatch.setattr(machine, "machine_problems", lambda settings, ranks, visible: [])
    for function in ("quickstart", "smol_quickstart", "export", "diff", "serve"):
        reached(actions, function)
    reached(distributed, "placed")
    reached(ablate, "ablate")
    reached(audit, "audit")
    reached(compare, "compare")
    reached(plan, "run")
    reached(checking, "check")
    reached(bias, "run")
    reached(write, "write_report", Path("report.html"))
    reached(write, "alarms_of", [])
    reached(timeline, "write")
    reached(view, "view")
    reached(env, "show")
    reached(guide, "show")
    return names


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The tables of both; `more` wins."""
    both = dict(base)
    for name, value in more.items():
        inside = isinstance(value, dict) and isinstance(both.get(name), dict)
        both[name] = merged(both[name], value) if inside else value
    return both


def words_of(text: str) -> Iterator[list[str]]:
    """The words of every single command of a shell block."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("&|;"):
                command.append(word)
                continue
            while command and re.match(r"[A-Z_]+=", command[0]):
                command.pop(0)
            if command:
                yield command
            command = []


def write_what_it_names(words: list[str], directory: Path) -> None:
    """Files and directories that a command of ours reads its settings from, unless an earlier block shows them."""
    rest = words[1:]
    named = [word for word in rest[:1] if not word.startswith("-")]
    named += [rest[rest.index("--replay") + 1]] if "--replay" in rest else []
    for name in named:
        path = directory / name
        path = path if path.suffix == ".toml" else path / "settings.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).suffix == ".toml" and (ROOT / name).exists():
            shutil.copy(ROOT / name, path)
        elif name == "runs/quickstart/settings.toml":
            files.save(quickstart.settings(Path("runs/quickstart"), 0), path)
        elif not path.exists():
            files.save(files.from_dict(MINIMAL), path)


def check_ours(words: list[str], parsed: list[str], directory: Path) -> None:
    """`fppo` with these arguments gets as far as running."""
    if len(words) > 1:
        write_what_it_names(words, directory)
    parsed.clear()
    helped = {"-h", "--help"} & set(words)
    with contextlib.suppress(SystemExit) if helped else contextlib.nullcontext():
        assert cli.main(words) == 0
    assert parsed or helped


def check_python(words: list[str]) -> None:
    """The script, or the module after -m, exists; the program after -c imports what there is."""
    if words[:1] == ["-c"]:
        first, _, rest = words[1].partition(";")
        compile(rest.strip(), "-c", "exec")
        exec(first, {})
    elif words[:1] == ["-m"]:
        in_project = (ROOT / words[1].replace(".", "/")).with_suffix(".py").exists()
        assert in_project or words[1] in MODULES or importlib.util.find_spec(words[1]), f"there is no module {words[1]}"
    else:
        assert (ROOT / words[0]).exists(), f"there is no {words[0]}"


def check(words: list[str], parsed: list[str], directory: Path) -> None:
    """One command; AssertionError if it is none that a reader can run."""
    program, *rest = words
    if program in ("torchrun", "taskset"):
        if "fppo" in rest:
            check_ours(rest[rest.index("fppo") + 1 :], parsed, directory)
    elif program == "fppo":
        check_ours(rest, parsed, directory)
    elif program == "python":
        check_python(rest)
    elif program == "pip":
        named = {extra for word in rest for group in re.findall(r"\[([\w,]+)\]", word) for extra in group.split(",")}
        assert named <= EXTRAS, f"there is no extra {named - EXTRAS}"
    elif program == "pytest":
        wanted = [word for word in rest if word.startswith("tests")]
        assert all((ROOT / word).exists() for word in wanted), wanted
    elif "/" in program:
        assert (ROOT / program).exists(), f"there is no {program}"
    else:
        assert program in OTHERS, f"what is {program}?"


def toml_of(block: Block) -> dict[str, Any]:
    """The tables of a TOML block, over settings that can run."""
    return merged(MINIMAL, tomllib.loads(block.text))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_settings_are_understood(page, parsed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if block.language == "toml":
            settings = files.check(files.from_dict(toml_of(block)))
            if block.file is not None:
                files.save(settings, tmp_path / block.file)
        elif block.language == "bash":
            for words in words_of(block.text):
                try:
                    check(words, parsed, tmp_path)
                except AssertionError as error:
                    text = capsys.readouterr().err
                    raise AssertionError(f"{block.name}: {' '.join(words)}\n{error}\n{text}") from error
