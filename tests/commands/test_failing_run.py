"""A run that can come to nothing ends with the reason and the exit status 1; what fails later is counted and shown."""

import math

import pytest

from fppo import losses, models
from fppo.commands import cli
from fppo.quickstart import character_tokenizer
from fppo.runs import jsonl
from fppo.settings import files
from tests import tiny_run


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    files.save(
        tiny_run.settings(tmp_path, steps=2, eval__before=False, log__loggers=["console", "jsonl"]),
        tmp_path / "run.toml",
    )
    return tmp_path


def _train(task, *overrides):
    return cli.main(["train", str(task / "run.toml"), *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("before", [[], pytest.param(["--eval.before"], marks=pytest.mark.slow)])
def test_a_reward_that_fails_on_all_of_the_first_batch_ends_the_run_with_its_error(task, capsys, before):
    functions = ["exact_match", "tests.rewards.functions:refuses"]
    assert _train(task, "--reward.functions", *functions, *before) == 1
    said = capsys.readouterr().err
    assert "the reward 'refuses' failed on every one of the first" in said
    assert "LookupError: the key is not set" in said
    lines = jsonl.read(task / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == []


@pytest.mark.slow
def test_failures_beside_good_rows_are_counted_and_shown(task, capsys):
    assert (
        _train(
            task,
            "--reward.functions",
            "tests.rewards.functions:refuses_half",
            "--rollout.batch-size",
            "24",
            "--eval.every",
            "1",
        )
        == 0
    )
    printed = capsys.readouterr().out.splitlines()
    shown = [line for line in printed if line.startswith("step ") and "  held out  " not in line]
    lines = jsonl.read(task / "run" / "metrics.jsonl")
    assert len(shown) == len(lines) == 2
    for text, line in zip(shown, lines, strict=True):
        assert line["reward/errors"] > 0
        assert f"  no score {line['reward/errors']:.0f}" in text
        assert line["val-aux/errors"] > 0
        assert line["val-aux/timeouts"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("path", "role"), [("--model.path", "actor"), ("--model.critic-path", "critic")])
def test_weights_that_are_not_finite_end_the_run_with_their_name(task, capsys, path, role):
    model, params = models.load(task / "start")
    name = min(name for name in params if "mlp" in name)
    params[name][0] = math.nan
    models.save(model, params, task / "nan", tokenizer=character_tokenizer())
    assert _train(task, path, str(task / "nan")) == 1
    said = capsys.readouterr().err
    assert "the critic cannot learn: its first updates were all skipped, as no gradient was finite" in said
    assert f"parameters are not finite either, first {name} of the {role}: start from another model" in said


def infinite(log_probs, old_log_probs, advantages, mask):
    per_token, report = losses.ppo_clip(log_probs, old_log_probs, advantages, mask)
    return per_token * math.inf, report


@pytest.mark.slow
def test_a_loss_that_is_never_finite_ends_the_run(task, capsys):
    assert _train(task, "--actor.loss.name", f"{__name__}:infinite", "--no-check") == 1
    said = capsys.readouterr().err
    assert "the actor cannot learn: its first updates were all skipped" in said
    assert "all parameters are finite: look at the loss" in said
