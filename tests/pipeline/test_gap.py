"""An engine that samples from another policy than the one that is trained is noticed in the step."""

import warnings

import pytest
import torch

from fppo import metrics, tree
from fppo.assembly.run import assemble
from fppo.pipeline.gap import WatchAnnotate
from fppo.pipeline.step import ppo_step
from fppo.rollout import embedded, stepping
from tests import tiny_run


def take_step(directory, *, wrong=True, **changes):
    tiny_run.write_task(directory)
    plain = embedded.logits_of

    def other(head, hidden, linear):
        logits = plain(head, hidden, linear)
        return logits + (9.0 * torch.arange(logits.shape[1], device=logits.device)).cos()  # recordable

    with assemble(tiny_run.settings(directory, **changes)) as assembly, pytest.MonkeyPatch.context() as patch:
        if wrong:
            patch.setattr(embedded, "logits_of", other)
            patch.setattr(stepping, "logits_of", other)
        return ppo_step(assembly.run, program=assembly.program, draw=assembly.draw)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_engine_warns_or_ends_the_run(dtype, tmp_path):
    with pytest.warns(RuntimeWarning, match=r"engine samples from another policy.*after 0 updates: rollout_corr"):
        take_step(tmp_path / "warn", model__compute_dtype=dtype)
    with pytest.raises(ValueError, match="another policy than the one that is trained"):
        take_step(tmp_path / "stop", model__compute_dtype=dtype, rollout__gap="stop")


@pytest.mark.parametrize("source", ["update", "engine"])
def test_a_run_without_a_pass_before_the_update_is_watched_in_the_update(source, tmp_path):
    own = {"algorithm__old_log_probs": source, "actor__mini_batch_size": 8, "actor__epochs": 1, "rollout__gap": "stop"}
    own |= {"algorithm__kl__coef": 0.0, "algorithm__kl__controller": "fixed", "algorithm__kl__horizon": 10000}
    take_step(tmp_path / "right", wrong=False, **own)
    with pytest.raises(ValueError, match="another policy than the one that is trained"):
        take_step(tmp_path / "wrong", **own)


def test_updates_that_leave_the_policy_behind_them_are_not_on_policy(tmp_path):
    take_step(tmp_path, algorithm__old_log_probs="engine", rollout__gap="stop")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_and_a_gap_that_is_not_looked_at_pass(dtype, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        settings = {"model__compute_dtype": dtype}
        _, _, report = take_step(tmp_path / "right", wrong=False, rollout__gap="stop", **settings)
        assert metrics.report(report)["rollout_corr/k3_kl"] < 1e-3
        take_step(tmp_path / "off", rollout__gap="off", **settings)


def test_rows_of_an_earlier_policy_are_passed_over(tmp_path):
    run, scored, _ = take_step(tmp_path, wrong=False)
    report = {"rollout_corr/k3_kl": metrics.mean(3.0)}
    stage = WatchAnnotate(stage=lambda rows, _: (rows, report), limit=0.1, then="stop")
    assert (scored.versions < run.actor.step).all()
    assert stage(scored, run) == (scored, report)
    with pytest.raises(ValueError, match=r" = 3, where rounding explains at most 0\.1"):
        stage(tree.replace(scored, versions=torch.full_like(scored.versions, run.actor.step)), run)
