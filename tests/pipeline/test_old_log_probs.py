"""Where old log-probs come from, where what was sampled from is not the policy's whole distribution."""

import inspect

import pytest
import torch

from fppo import losses, tree
from fppo.assembly.run import assemble
from fppo.pipeline.program import sample_batch
from fppo.steps.forward import compute_log_probs
from fppo.steps.micro_batching import MicroBatching
from tests import tiny_run

CUT = {"rollout__top_p": 0.6, "rollout__top_k": 5, "rollout__temperature": 1.3}
ONCE = {"actor__epochs": 1, "actor__mini_batch_size": 8, "algorithm__kl__coef": 0.0}
FIXED = {"algorithm__kl__controller": "fixed", "algorithm__kl__horizon": 10000}


@pytest.mark.parametrize("source", ["engine", "pass", "update"])
def test_they_are_of_the_distribution_before_top_k_and_top_p(tmp_path, source):
    """The ratio's old policy is the one whose log-probs are trained, at the sampling temperature: what the engine cut
    off to sample has no part in it."""
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path, **CUT, **ONCE, **FIXED, algorithm__old_log_probs=source)
    with assemble(settings) as assembly:
        run, program = assembly.run, assembly.program
        scored, _, _ = sample_batch(run, draw=assembly.draw, rollout=program.rollout, score=program.score)
        annotated, _ = program.annotate(scored, run)
        mask = annotated.response_mask
        update = inspect.unwrap(program.update_actor)
        forward = update.keywords["forward"]
        expected = compute_log_probs(
            run.actor.params, scored, forward=forward, micro_batching=MicroBatching(size=8), temperature=1.3
        )
        assert ((scored.sampling_log_probs - expected)[mask] > 0.1).any()  # the cut made a difference
        torch.testing.assert_close(annotated.old_log_probs[mask], expected[mask], rtol=0, atol=1e-5)
        experience, _, _ = program.estimate(annotated, run.kl)
        off = tree.replace(experience, sampling_log_probs=torch.full_like(expected, float("nan")))
        seen = []

        def loss(log_probs, old_log_probs, advantages, mask):
            seen.append((old_log_probs, mask))
            return losses.ppo_clip(log_probs, old_log_probs, advantages, mask)

        update.func(run.actor, off, **{**update.keywords, "loss_fn": loss})
    assert sum(int(mask.sum()) for _, mask in seen) == int(mask.sum())
    trained = torch.cat([old[mask] for old, mask in seen]).sort().values
    torch.testing.assert_close(trained, expected[mask].sort().values, rtol=0, atol=1e-5)
