"""Variants of a run side by side: what is varied, what is trained, what is shown."""

import json
import math

import pytest

from fppo._errors import RunFailed
from fppo.commands import actions, cli
from fppo.commands.compare import plan
from fppo.report.compare import Comparison, collect
from fppo.report.spread import spread
from fppo.runs.jsonl import JsonLines
from fppo.settings import files
from fppo.settings.compare import CompareSettings, variants
from tests import tiny_run


def test_values_are_crossed_and_may_bring_others_along():
    found = variants(["critic.loss=mse,hl_gauss+critic.range=[-1.0, 1.0]+critic.bins=21", "algorithm.lam=0.9,1e+0"])
    assert [variant.changes for variant in found] == [
        {"critic.loss": "mse", "algorithm.lam": 0.9},
        {"critic.loss": "mse", "algorithm.lam": 1.0},
        {"critic.loss": "hl_gauss", "critic.range": [-1.0, 1.0], "critic.bins": 21, "algorithm.lam": 0.9},
        {"critic.loss": "hl_gauss", "critic.range": [-1.0, 1.0], "critic.bins": 21, "algorithm.lam": 1.0},
    ]
    assert found[0].name == "critic.loss=mse, algorithm.lam=0.9"
    assert len({variant.directory for variant in found}) == 4


def test_a_spread_is_students_interval():
    found = spread([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.half == pytest.approx(4.303 * math.sqrt(7 / 3) / math.sqrt(3))  # the deviation is sqrt(7 / 3)
    assert math.isnan(spread([1.0]).half)
    assert spread([float(i) for i in range(200)]).half == pytest.approx(8.071, rel=1e-3)


def test_differences_are_those_of_equal_seeds():
    """What seeds share falls out of the difference."""
    curves = {
        "a": {0: [(0, 0.0), (2, 1.0)], 1: [(0, 0.0), (2, 5.0)]},
        "b": {0: [(0, 0.0), (2, 2.0)], 1: [(0, 0.0), (2, 6.2)]},
    }
    first, second = Comparison(curves={"score": curves}).rows()
    assert first["last_apart"] is None
    assert second["last_apart"].mean == pytest.approx(1.1)
    assert second["last_apart"].half < 2 < second["last"].half
    assert second["mean_apart"].mean == pytest.approx(0.55)


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path, rows=8)
    settings = tiny_run.settings(
        tmp_path, steps=1, actor__optimizer__schedule="constant", actor__epochs=1, eval__exact_values=True
    )
    files.save(settings, tmp_path / "run.toml")
    return tmp_path


TOOLBOX = {
    "algorithm.advantage=gae,gae+algorithm.lam=0.9+algorithm.critic_lam=1.0,gae+algorithm.lam_alpha=0.05,"
    "turn_gae+algorithm.gamma=0.9,td+algorithm.td_steps=2,vtrace+algorithm.correction.mode=token": 6,
    "critic.loss=mse,mse+critic.popart=0.1,huber+critic.huber_delta=0.5,hl_gauss+critic.bins=21,two_hot,quantile": 6,
    "critic.reads=tokens,confidence,hidden,hidden+critic.ensemble=4+critic.leave_agreed=0.2": 4,
    "critic.privileged=0,8": 2,
    "critic.pretrain=0,1,1+critic.freeze=true": 3,
    "actor.positive_nll_coef=0.0,0.1": 2,
    "actor.optimizer.warmup_steps=0,2+critic.optimizer.warmup_steps=1": 2,
}


def test_all_of_the_critics_toolbox_can_be_varied(tmp_path):
    """Each estimator, loss and kind of critic beside the others; what a variant lacks is refused."""
    settings = tiny_run.settings(tmp_path)
    planned = {vary: len(plan(settings, CompareSettings(vary=(vary,), seeds=1))) for vary in TOOLBOX}
    assert planned == TOOLBOX


ARGUMENTS = ("--vary", "critic.loss=mse,quantile+critic.bins=3", "--seeds", "1", "--actor.optimizer.lr", "0.002")


@pytest.mark.slow
def test_what_is_done_is_not_run_again(task, monkeypatch, capsys):
    trained = []

    def train(settings, here):
        trained.append((settings.critic.loss, settings.seed, settings.actor.optimizer.lr))
        return 130 if len(trained) == 2 else real(settings, here)

    real = actions.train
    monkeypatch.setattr(actions, "train", train)
    assert cli.main(["compare", str(task / "run.toml"), *ARGUMENTS]) == 130
    assert "stopped in critic.loss=quantile+critic.bins=3, seed 0; the same command goes on" in capsys.readouterr().out
    assert cli.main(["compare", str(task / "run.toml"), *ARGUMENTS]) == 0
    assert trained == [("mse", 0, 0.002), ("quantile", 0, 0.002), ("quantile", 0, 0.002)]
    text = capsys.readouterr().out
    assert "1 of 2 runs are done" in text
    out = task / "run-compare"
    assert "critic/true/r2" in (out / "compare.txt").read_text()
    head, rule, *rows = (out / "compare.md").read_text().splitlines()
    assert head.startswith("| variant | `val-aux/")
    assert head.endswith("| `critic/true/r2` |")
    assert rule == "| --- | --- | --- |"
    assert [row.split(" | ")[0] for row in rows] == ["| `critic.loss=mse`", "| `critic.loss=quantile+critic.bins=3`"]
    numbers = json.loads((out / "compare.json").read_text())
    assert [row["variant"] for row in numbers[:2]] == ["critic.loss=mse", "critic.loss=quantile+critic.bins=3"]
    assert (out / "compare.png").stat().st_size > 5000
    assert cli.main(["compare", str(task / "run.toml"), *ARGUMENTS, "--metrics", "critic/vf_loss"]) == 0
    assert "critic/vf_loss" in capsys.readouterr().out
    assert len(trained) == 3
    assert cli.main(["compare", str(task / "run.toml"), *ARGUMENTS, "--rollout.n", "2"]) == 2
    assert "holds a run with other settings (rollout.n 1 -> 2)" in capsys.readouterr().err


def test_a_run_that_fails_does_not_take_the_others_along(task, monkeypatch, capsys):
    def train(settings, here):
        if settings.critic.loss == "mse":
            raise RunFailed("the critic cannot learn")
        log = JsonLines(f"{settings.output_dir}/metrics.jsonl")
        log.log(1, {"val/sums/accuracy/mean@1": 0.5})
        log.close()
        return 0

    monkeypatch.setattr(actions, "train", train)
    assert cli.main(["compare", str(task / "run.toml"), *ARGUMENTS]) == 1
    text = capsys.readouterr().out
    assert "the critic cannot learn" in text
    assert "critic.loss=quantile+critic.bins=3  1      0.5000" in text
    assert "failed, and tried again by the same command: critic.loss=mse, seed 0" in text


def test_all_that_is_wrong_with_any_variant_is_named_before_any_run(task, monkeypatch, capsys):
    monkeypatch.setattr(actions, "train", None)
    for arguments, text in (
        (["--vary", "critic.loss"], "'critic.loss' is not of that form: write section.setting=VALUE,VALUE"),
        (["--seeds", "2"], "--vary (): is not set; write section.setting=VALUE,VALUE"),
        (["--vary", "seed=1,2"], "seed: fppo compare sets it; give --seeds and --out"),
        (["--vary", "critic.los=mse"], "critic.los = 'mse': there is no such setting; did you mean critic.loss?"),
        (["--vary", "critic.loss=mse,mae"], "critic.loss = 'mae': must be one of"),
        (["--vary", "critic.loss=mse+critic.bins=3"], "critic.loss=mse+critic.bins=3: critic.bins = 3: nothing reads"),
    ):
        assert cli.main(["compare", str(task / "run.toml"), *arguments]) == 2
        assert text in capsys.readouterr().err


def test_a_metric_that_no_run_has_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 2.0}\n')
    with pytest.raises(ValueError, match=r"no run has logged \['b'\]; there are \['a', 'step'\]"):
        collect({"x": {0: tmp_path}}, ["b"])
    with pytest.raises(ValueError, match="no run has logged a held-out score"):
        collect({"x": {0: tmp_path}})
