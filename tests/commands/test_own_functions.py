"""Functions named as module:function are found beside the settings file and where the command was first started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fppo.commands.cli import main
from fppo.runs import jsonl
from fppo.settings import files
from tests import tiny_run

MINE = """
import fppo_kernels.attention.sdpa
from fppo import advantages, losses, metrics

def loss(log_probs, old_log_probs, advantages, mask, radius=0.2):
    per_token, report = losses.ppo_clip(log_probs, old_log_probs, advantages, mask, clip_high=radius)
    return per_token, report | {"actor/radius": metrics.mean(radius)}

def advantage(rows, rewards):
    return advantages.grpo(rewards.sum(1), rows.response_mask, rows.groups)

def attention(*args, **keywords):
    return fppo_kernels.attention.sdpa.sdpa(*args, **keywords)
"""
ELSEWHERE = """
def reward(sample):
    return {"score": float(len(sample.response)), "seen": 7.0}
"""
FLAGS = (
    *("--actor.loss.name", "mine:loss", "--actor.loss.radius", "0.3", "--algorithm.advantage", "mine:advantage"),
    *("--model.attention", "mine:attention", "--reward.functions", "elsewhere:reward"),
)


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    files.save(tiny_run.settings(tmp_path, rollout__n=2), tmp_path / "run.toml")
    (tmp_path / "mine.py").write_text(MINE)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "first" / "elsewhere.py").write_text(ELSEWHERE)
    return tmp_path


def _console(cwd, *arguments):
    """What a console script does: without the working directory on its path."""
    program = "import sys; from fppo.commands.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_finds_them_in_ranks_and_workers_and_when_it_goes_on_from_elsewhere(task):
    _console(task / "first", "train", "../run.toml", *FLAGS, "--steps", 1, "--nproc", 2)
    saved = files.load(task / "run" / "settings.toml")
    assert saved.module_dirs == (str(task), str(task / "first"))
    again = ("--steps", 2, "--mesh.shard", 1, "--check", "false")
    _console(task / "second", "train", task / "run" / "settings.toml", *again)
    first, second = [line for line in jsonl.read(task / "run" / "metrics.jsonl") if line["step"]]
    assert first["reward/seen"] == second["reward/seen"] == 7.0
    assert first["actor/radius"] == second["actor/radius"] == pytest.approx(0.3)
    assert saved.actor.loss.keywords == {"radius": 0.3}


def test_a_loss_that_would_train_on_in_silence_ends_the_command_before_any_work(task, monkeypatch, capsys):
    monkeypatch.chdir(task)
    (task / "wrong.py").write_text("def mean(log_probs, old, advantages, mask):\n    return log_probs.mean(), {}\n")
    assert main(["train", "run.toml", "--actor.loss.name", "wrong:mean"]) == 2
    told = capsys.readouterr().err
    assert "actor.loss.name = 'wrong:mean': mean breaks the law" in told
    assert "the loss has shape [], expected [B, T]" in told
    assert "--no-check, or check = false at the top of the file" in told
    assert not (task / "run").exists()


def test_keywords_of_ones_own_functions_are_checked_before_any_work(task, monkeypatch, capsys):
    monkeypatch.chdir(task)
    (task / "radii.py").write_text(MINE)  # a name that no other test has imported
    wrong = ["--actor.loss.name", "radii:loss", "--actor.loss.radus", "0.1"]
    assert main(["train", "run.toml", *wrong]) == 2
    assert "actor.loss.radus = 0.1: radii:loss has no such keyword; did you mean radius?" in capsys.readouterr().err
    vary = ["--vary", "actor.loss.radius=0.1,far"]
    assert main(["compare", "run.toml", "--actor.loss.name", "radii:loss", *vary, "--seeds", "1"]) == 2
    assert "actor.loss.radius = 'far': must be a number" in capsys.readouterr().err


def test_runs_without_them_remember_no_directories(task):
    assert files.load(task / "run.toml").module_dirs == ()


def test_directories_that_are_named_are_kept(task):
    own = str(task / "first")
    loaded = files.load(task / "run.toml", ["--actor.loss.name", "mine:loss", "--module-dirs", own])
    assert loaded.module_dirs == (own,)
