"""The short scripts run, fit on a page, and print what they are for."""

import importlib.util
from pathlib import Path

import pytest
import torch

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
