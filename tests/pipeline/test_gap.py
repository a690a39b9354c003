"""An engine that samples from another policy than the one that is trained is noticed in the step."""

import warnings
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from fppo import metrics, tree
from fppo.assembly.run import assemble
from fppo.pipeline.gap import WatchAnnotate
from fppo.pipeline.step import ppo_step
from fppo_kernels.table import needs_cpp
from tests import tiny_run


@attrs.frozen
class Other:
    """An engine whose policy has other weights than it is given, or whose log-probs are others than it drew from."""

    engine: Any
    weights: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, x: x
    log_probs: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    def generate(self, params, ask):
        made = self.engine.generate({name: self.weights(name, x) for name, x in params.items()}, ask)
        return tree.replace(made, rollout_log_probs=self.log_probs(made.rollout_log_probs))


def sharper(name, x):
    """The weights of a policy that is surer of its next tokens."""
    return 9.0 * x if name == "model.norm.weight" else x


def with_engine(assembly, **how):
    rollout = assembly.program.rollout
    return attrs.evolve(assembly.program, rollout=attrs.evolve(rollout, engine=Other(rollout.engine, **how)))


def take_step(directory, *, wrong=True, **changes):
    tiny_run.write_task(directory)
    with assemble(tiny_run.settings(directory, **changes)) as assembly:
        program = with_engine(assembly, weights=sharper) if wrong else assembly.program
        return ppo_step(assembly.run, program=program, draw=assembly.draw)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_engine_warns_or_ends_the_run(dtype, tmp_path):
    with pytest.warns(RuntimeWarning, match=r"engine samples from another policy.*after 0 updates: rollout_corr"):
        take_step(tmp_path / "warn", model__compute_dtype=dtype)
    with pytest.raises(ValueError, match="another policy than the one that is trained"):
        take_step(tmp_path / "stop", model__compute_dtype=dtype, rollout__gap="stop")


@pytest.mark.slow
@pytest.mark.parametrize("source", ["update", "engine"])
def test_a_run_without_a_pass_before_the_update_is_watched_in_the_update(source, tmp_path):
    own = {"algorithm__old_log_probs": source, "actor__mini_batch_size": 8, "actor__epochs": 1, "rollout__gap": "stop"}
    own |= tiny_run.NO_KL
    take_step(tmp_path / "right", wrong=False, **own)
    with pytest.raises(ValueError, match="another policy than the one that is trained"):
        take_step(tmp_path / "wrong", **own)


@pytest.mark.slow
def test_updates_that_leave_the_policy_behind_them_are_not_on_policy(tmp_path):
    take_step(tmp_path, algorithm__old_log_probs="engine", rollout__gap="stop")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_and_a_gap_that_is_not_looked_at_pass(dtype, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        settings = {"model__compute_dtype": dtype}
        _, _, report = take_step(tmp_path / "right", wrong=False, rollout__gap="stop", **settings)
        assert metrics.report(report)["rollout_corr/k3_kl"] < 1e-3
        take_step(tmp_path / "off", rollout__gap="off", **settings)


@pytest.mark.slow
def test_rows_of_an_earlier_policy_are_passed_over(tmp_path):
    run, scored, _ = take_step(tmp_path, wrong=False)
    report = {"rollout_corr/k3_kl": metrics.mean(3.0)}
    stage = WatchAnnotate(stage=lambda rows, _: (rows, report), limit=0.1, then="stop")
    assert (scored.versions < run.actor.step).all()
    assert stage(scored, run) == (scored, report)
    with pytest.raises(ValueError, match=r" = 3, where rounding explains at most 0\.1"):
        stage(tree.replace(scored, versions=torch.full_like(scored.versions, run.actor.step)), run)
    mixed = scored.versions.where(
        torch.arange(len(scored.versions)) > 0, run.actor.step
    )  # the first row is the policy's
    assert stage(tree.replace(scored, versions=mixed), run)[1] == report


EXACT = {"rollout__exact": True, "actor__mini_batch_size": 4, "actor__epochs": 2}


@pytest.mark.slow
@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
def test_an_exact_run_takes_the_engines_log_probs_and_measures_them_in_its_first_update(tmp_path):
    tiny_run.write_task(tmp_path)
    with assemble(tiny_run.settings(tmp_path, **EXACT)) as assembly:
        run = assembly.run
        for _ in range(2):
            run, experience, report = ppo_step(run, program=assembly.program, draw=assembly.draw)
            assert torch.equal(experience.old_log_probs, experience.rollout_log_probs)
            found = metrics.report(report)
            for name in ("ratio_mean", "ratio_max", "equal"):
                assert found[f"training/rollout_{name}"] == 1
            assert found["training/rollout_probs_diff_max"] == 0
            counted = report["training/rollout_equal"].count
            assert 0 < counted < experience.response_mask.sum()  # the first mini-batch
            assert found["training/old_log_probs/engine"] == 1


@pytest.mark.slow
@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
def test_an_exact_run_ends_where_a_bit_differs(tmp_path):
    tiny_run.write_task(tmp_path)
    with assemble(tiny_run.settings(tmp_path, **EXACT)) as assembly:
        program = with_engine(assembly, log_probs=lambda x: torch.nextafter(x, torch.tensor(-9.0)))
        with pytest.raises(ValueError, match=r"rollout\.exact: 100\.00% of the engine's log-probs have other bits"):
            ppo_step(assembly.run, program=program, draw=assembly.draw)
