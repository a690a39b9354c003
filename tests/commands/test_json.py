"""Every command that reports prints one document of JSON on request, and nothing else, with the same exit status."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fppo.commands import cli, output
from fppo.commands.arguments import printed
from fppo.settings import files
from tests import tiny_run
from tests.commands.test_ablate import SMALL
from tests.commands.test_bias import SMALL as WORLDS

TABLE = Path(__file__).parents[2] / "docs/guides/command-line.md"
COMMANDS = {
    "env": ["env"],
    "plan": ["plan", "--model.path", "qwen2.5-0.5b", "--gpu", "h100", "--no-tries"],
    "check": ["check", "run.toml", "--gpu", "cpu"],
    "bias": ["bias", *WORLDS, "--tables", "kl"],
    "audit": ["audit", "mine:FAULTS"],
    "ablate": ["ablate", "--op", "log_probs", *SMALL, "--implementations", "reference"],
    "ablate --replay": ["ablate", "--op", "log_probs", "--replay", "run", "--step", "2"],
    "report": ["report", "run"],
    "report --alarms": ["report", "run", "--alarms"],
    "diff": ["diff", "run", "other"],
    "eval": ["eval", "run"],
    "compare": ["compare", "run.toml", "--vary", "actor.optimizer.lr=0.1,0.2", "--seeds", "1", "--steps", "1"],
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Two runs whose metrics differ, settings for others, and a faulty function of another trainer."""
    root = tmp_path_factory.mktemp("task")
    tiny_run.write_task(root)
    asked = tiny_run.settings(root, steps=2, eval__before=False)
    files.save(asked, root / "asked.toml")
    assert cli.main(["train", str(root / "asked.toml")]) == 0
    shutil.copytree(root / "run", root / "other")
    metrics = root / "other" / "metrics.jsonl"
    metrics.write_text(re.sub(r'"actor/entropy": [0-9.]+', '"actor/entropy": 0.5', metrics.read_text()))
    (root / "other" / "digests.jsonl").unlink()
    files.save(tiny_run.settings(root, output_dir=str(root / "new"), eval__before=False), root / "run.toml")
    (root / "mine.py").write_text("from tests.studies.audit.test_report import ADAPTERS\n\nFAULTS = ADAPTERS[1:2]\n")
    return root


def documented():
    """The keys of each command's document, by the table of the docs."""
    rows = re.findall(r"^\| `([a-z -]+)` \| (`\w+`[^|]*) \|$", TABLE.read_text(), re.MULTILINE)
    return {command: set(re.findall(r"`(\w+)`", keys.partition(":")[0])) for command, keys in rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_document_is_all_that_is_printed(task, name, monkeypatch, capfd):
    monkeypatch.chdir(task)
    monkeypatch.syspath_prepend(str(task))
    plain = cli.main(COMMANDS[name]) if name in ("audit", "diff") else 0
    capfd.readouterr()
    assert cli.main([*COMMANDS[name], "--json"]) == plain
    said = capfd.readouterr()
    found = json.loads(said.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert found.keys() == documented()[name]


def test_the_table_has_every_command():
    assert documented().keys() == COMMANDS.keys()


def test_json_without_a_file_is_standard_output():
    assert printed(["run.toml", "--json", "--gpu", "cpu"]) == ["run.toml", "--json", "-", "--gpu", "cpu"]
    assert printed(["run.toml", "--json"]) == ["run.toml", "--json", "-"]
    for given in (["--json", "a.json"], ["--json", "-"], ["--json=a"], ["a"], []):
        assert printed(given) == given


def test_what_is_printed_meanwhile_goes_to_standard_error_also_by_other_processes(capfd):
    with output.shown("-") as show:
        print("early")
        subprocess.run([sys.executable, "-c", "print('from a process')"], check=True)
        show("words", {"a": [math.nan, -math.inf, 1.5], "b": (Path("x"), None)})
        print("late")
    said = capfd.readouterr()
    assert json.loads(said.out) == {"a": [None, None, 1.5], "b": ["x", None]}
    assert [word in said.err for word in ("early", "from a process", "late", "words")] == [True, True, True, False]


def test_words_are_printed_and_the_document_is_written(tmp_path, capsys):
    with output.shown(str(tmp_path / "out" / "a.json")) as show:
        show("words", {"a": math.inf})
    assert capsys.readouterr().out == "words\n"
    assert json.loads((tmp_path / "out" / "a.json").read_text()) == {"a": None}


def test_an_error_prints_no_document(capfd):
    assert cli.main(["diff", "nowhere", "nowhere else", "--json"]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert "nowhere" in said.err
