"""What a run is made of beside its settings is kept by its start, and a start says what is other than before."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import attrs
import pytest

from fppo.commands import cli
from fppo.runs import jsonl, origins
from fppo.runs.origins import Origin
from fppo.settings import files
from tests import tiny_run

CODE = """
def mine(sample):
    return float(len(sample.response) {sign} 2)
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A task whose reward is the user's own, beside the settings."""
    tiny_run.write_task(tmp_path)
    (tmp_path / "origin_rewards.py").write_text(CODE.format(sign="+"))
    monkeypatch.delitem(sys.modules, "origin_rewards", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = {"reward__functions": ["origin_rewards:mine"], "data__eval_path": []}
    files.save(tiny_run.settings(tmp_path, steps=3, **own), tmp_path / "run.toml")
    return tmp_path


def goes_on(task, steps, capsys):
    assert cli.main(["train", str(task / "run.toml"), "--steps", str(steps)]) == 0
    return capsys.readouterr().err


@pytest.mark.slow
def test_a_start_says_what_code_and_packages_are_others(task, capsys, monkeypatch):
    assert "other code" not in goes_on(task, 1, capsys)
    places = task / "run" / "starts"
    kept = json.loads((places / "step_00000000.json").read_text())
    assert kept["code"] == {"origin_rewards": CODE.format(sign="+")}
    assert {"python", "fppo", "torch", "transformers"} <= {*kept["versions"]}

    (task / "origin_rewards.py").write_text(CODE.format(sign="-") + "\n# 2")
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    said = goes_on(task, 2, capsys)
    assert "going on from step 1 with other code: the code of origin_rewards has changed: 3 lines added" in said
    assert f"; python {kept['versions']['python']} -> 3.99.0" in said
    assert json.loads((places / "step_00000001.json").read_text())["code"]["origin_rewards"].endswith("# 2")
    assert "other code" not in goes_on(task, 3, capsys)
    assert sorted(x.name for x in places.glob("*.json")) == ["step_00000000.json", "step_00000001.json"]


@pytest.mark.parametrize("damage", [b"", b"{", b'{"code": 1}', b"\xff\xfe", b"[" * 50_000])
def test_a_damaged_record_is_told_and_stops_nothing(tmp_path, damage):
    settings = tiny_run.settings(tmp_path)
    (tmp_path / "run" / "starts").mkdir(parents=True)
    place = tmp_path / "run" / "starts" / "step_00000000.json"
    assert origins.record(settings, 0) == []
    whole = place.read_text()
    place.write_bytes(damage)
    text = f"with other code, perhaps: the origin of the last start cannot be read in {place.parent}"
    assert origins.record(settings, 0) == [text]
    assert place.read_text() == whole


def test_commits_are_those_that_git_names(tmp_path):
    def git(*words, where=tmp_path / "a"):
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        return subprocess.run(
            ["git", *own, *words], cwd=where, check=True, capture_output=True, text=True
        ).stdout.strip()

    (tmp_path / "a" / "deep").mkdir(parents=True)
    file = tmp_path / "a" / "deep" / "mine.py"
    assert origins.commit_of(file) is None
    git("init")
    assert origins.commit_of(file) is None
    git("commit", "--allow-empty", "-m", "one")
    assert origins.commit_of(file) == git("rev-parse", "HEAD")
    git("pack-refs", "--all")
    assert origins.commit_of(file) == git("rev-parse", "HEAD")
    git("worktree", "add", str(tmp_path / "b"))
    git("commit", "--allow-empty", "-m", "two", where=tmp_path / "b")
    assert origins.commit_of(tmp_path / "b" / "mine.py") == git("rev-parse", "HEAD", where=tmp_path / "b")
    git("checkout", "--detach", "HEAD~1", where=tmp_path / "b")
    assert origins.commit_of(tmp_path / "b" / "mine.py") == git("rev-parse", "HEAD")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".git").write_text("gitdir: ../a/.git\n")  # as submodules have it
    assert origins.commit_of(tmp_path / "c" / "mine.py") == git("rev-parse", "HEAD")


def test_what_differs_is_named():
    one = Origin(versions={"torch": "2.13.0"}, commits={"fppo": "a" * 40, "mine": "c" * 40}, code={"mine": "a\nb\n"})
    assert origins.changes(one, one) == []
    other = attrs.evolve(
        one, versions={"torch": "2.14.1", "peft": "1"}, commits={"fppo": "b" * 40}, code={"mine": "a\n"}
    )
    assert origins.changes(one, other) == [
        "the code of mine has changed: 0 lines added, 1 removed",
        "peft none -> 1",
        "torch 2.13.0 -> 2.14.1",
        f"the commit of fppo {'a' * 10} -> {'b' * 10}",
    ]


@pytest.mark.slow
def test_versions_outside_of_the_bounds_are_told(capsys, monkeypatch, task):
    required = ["torch<2.15,>=2.11", "numpy", "tyro<1.1"]
    assert origins.untested({"torch": "2.13.0+cpu", "numpy": "9"}, required) == []
    told = origins.untested({"torch": "2.15.0", "tyro": "1.1.0rc1"}, required)
    assert told[0] == "torch 2.15.0 is outside the versions fppo was tested with, <2.15,>=2.11"
    assert told[1].startswith("tyro 1.1.0rc1 is outside")
    with monkeypatch.context() as patched:
        patched.setattr(origins, "installed", origins.installed.__wrapped__)
        patched.setattr(origins.metadata, "requires", lambda name: ["numpy<1", "attrs", 'pytest<1; extra == "test"'])
        assert [line.split()[0] for line in origins.untested_here()] == ["numpy"]
    monkeypatch.setattr(origins, "untested_here", lambda: told)
    assert goes_on(task, 1, capsys).count(told[0]) == 1
    assert len(jsonl.read(task / "run" / "digests.jsonl")) == 1
