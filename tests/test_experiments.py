"""The short scripts run, fit on a page, and print what they are for."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

from fppo.rollout.turns.tools import evaluate
from fppo.runs import jsonl

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def _load(name):
    spec = importlib.util.spec_from_file_location(f"experiments_{name}", EXPERIMENTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.py")), ids=lambda path: path.name)
def test_an_experiment_fits_on_a_page(path):
    assert len(path.read_text().splitlines()) <= 60


def test_custom_loss(capsys):
    _load("custom_loss").main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "spo keeps the laws."
    numbers = {line.rsplit(maxsplit=1)[0].strip(): float(line.rsplit(maxsplit=1)[1]) for line in lines[1:]}
    assert numbers["actor/skipped"] == 0
    assert numbers["advantages * change of log-probs"] > 10  # the policy went where the advantages point


def test_sweep_clip(capsys):
    module = _load("sweep_clip")
    columns = module.main()
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(module.RANGES)
    assert (columns["clip fraction"].diff() <= 0).all()
    assert (columns["cosine"].diff() >= 0).all()
    assert columns["cosine"][-1] > 0.999
    batch = module.synthetic(256, 64, 0.15, module.Key(0))
    for clip, loss in zip(columns["clip range"], columns["loss"], strict=True):  # vmap against the loop
        torch.testing.assert_close(module.loss_at(clip, *batch)[0], loss)


def test_the_bench_of_micro_batching_prints_ratios(capsys):
    _load("bench/micro_batching").main(seeds=1)
    row = capsys.readouterr().out.splitlines()[2].split()
    assert float(row[3]) <= 1.01  # micro-batches over the bound
    assert float(row[7]) <= 1.0001  # the heaviest of 64 parts over the mean


@pytest.mark.parametrize("name", ["ppo_arithmetic", "grpo_arithmetic"])
def test_arithmetic(name, capsys):
    _load(name).main(steps=2, warm_up=2, batch=16)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(lines) == 3
    assert "val-core/addition/reward/mean@1" in lines[0]
    assert ("vf loss" in lines[-1]) == (name == "ppo_arithmetic")


def _word_problems(path, count, seed):
    """Rows like GSM8K's: a sum in words, and a solution with the calculation annotated."""
    draws = torch.randint(2, 99, (count, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    sums = [(f"Tom has {a} apples and buys {b}.", f"{a}+{b}", a + b) for a, b in draws]
    lines = [{"question": q, "answer": f"{x} = <<{x}={value}>>{value}\n#### {value}"} for q, x, value in sums]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_gsm8k_with_a_calculator(tmp_path, monkeypatch):
    """The whole of it, small: every call that the policy makes is computed, and the policy trains behind it."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    _word_problems(tmp_path / "train.jsonl", 400, 0)
    _word_problems(tmp_path / "test.jsonl", 16, 1)
    small = ["steps=2", "rollout.batch-size=32", "rollout.max-tokens=48", "eval.every=0", "log.loggers=jsonl"]
    small += ["critic.mini-batch-size=32", "log.samples-per-step=32", "device=cpu"]
    run = tmp_path / "run"
    _load("gsm8k_calculator").main(tmp_path, run, warm_up=80, width=64, layers=1, more=tuple(small))
    first, *steps = jsonl.read(run / "metrics.jsonl")
    for line in steps:
        assert line["rollout/turns/max"] > 1
        assert line["rollout/observation_tokens/mean"] > 0
        assert line["actor/grad_norm"] > 0
    texts = [line["response"] for line in jsonl.read(run / "samples.jsonl")]
    calls = [call for text in texts for call in re.findall(r"<<([^<>=]*)=([^<>]*)>>", text)]
    computed = [evaluate(call) == value for call, value in calls if evaluate(call) is not None]
    assert len(computed) > 10
    assert all(computed)
    assert "val-core/test/reward/mean@1" in first
