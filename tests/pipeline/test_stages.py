"""Stages around others: greedy baselines of episodes and failures, and what an ensemble's disagreement leaves out."""

from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import metrics
from fppo.batch import Column, Rollout, Scored, extend
from fppo.losses import KLState
from fppo.pipeline import stages
from fppo.rollout.engine import Sampling
from tests import tiny


def greedy_stage(baselines):
    """A stage whose greedy responses, one to each prompt, have these scores, and whose others score 1."""
    greedy = batches.narrow(Rollout, tiny.experience(1, len(baselines)))

    class Engine:
        def generate(self, params, ask):
            assert (ask.sampling.n, len(ask.prompts.tokens)) == (1, len(baselines))
            return greedy

    def score(rows):
        scores = torch.tensor(baselines) if rows.tokens is greedy.tokens else torch.ones(len(rows.row_ids))
        return extend(Scored, rows, scores=scores, named_scores={}), {"own/metric": metrics.mean(float(len(scores)))}

    return stages.ScoreWithGreedy(score=score, engine=Engine(), sampling=Sampling(max_tokens=6))


def test_a_greedy_baseline_is_that_of_a_rows_own_episode():
    """Four rows of two episodes, the first of which has all rows but one."""
    rollout = batches.narrow(Rollout, tiny.experience(0, 4))
    rollout = attrs.evolve(rollout, episodes=torch.tensor([9, 7, 9, 9]), observed=Column([[], [], [], []]))
    prompts = SimpleNamespace(tokens=torch.zeros(2, 1))
    scored, report = greedy_stage([0.25, 0.75])(rollout, params={}, prompts=prompts)
    assert scored.baselines.tolist() == [0.25, 0.75, 0.25, 0.25]
    assert metrics.report(report)["own/metric"] == 4.0  # the metrics are those of the responses, not of the greedy ones


def test_a_baseline_that_failed_is_no_baseline_of_any_number():
    rollout = batches.narrow(Rollout, tiny.experience(0, 4))
    prompts = SimpleNamespace(tokens=torch.zeros(2, 1))
    scored, report = greedy_stage([float("nan"), 0.75])(rollout, params={}, prompts=prompts)
    assert scored.baselines.isnan().tolist() == [True, True, False, False]
    assert scored.has_score.tolist() == [False, False, True, True]
    assert metrics.report(report)["critic/baseline/mean"] == 0.75
    assert report["critic/baseline/mean"].count == 2


@pytest.mark.parametrize("name", ["LeaveAgreed", "LeaveDisputed"])
@given(seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.3, 0.7]))
def test_tokens_that_a_share_of_disagreement_leaves_out(name, seed, share):
    """Tokens on which critics agree most have no advantage; where they agree least there is no entropy bonus."""
    batch = tiny.experience(seed, 4)
    mask = batch.response_mask
    apart = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    batch = attrs.evolve(batch, disagreement=apart, advantages=batch.advantages + 5.0)
    kl, seen = KLState(coef=0.7), []

    def estimate(annotated, state):
        seen.append((annotated, state))
        return batch, KLState(coef=0.9), {"own/metric": metrics.mean(3.0)}

    found, after, report = getattr(stages, name)(estimate, share=share)(batch, kl)
    assert seen == [(batch, kl)]
    assert float(after.coef) == 0.9
    agreed = name == "LeaveAgreed"
    order = sorted(apart[mask].tolist(), reverse=not agreed)
    gone = order[: int(share * len(order))]
    left = torch.tensor([[x in gone for x in row] for row in apart.tolist()]) & mask
    metric = "critic/ensemble/left" if agreed else "critic/ensemble/disputed"
    assert report.keys() == {"own/metric", metric}
    assert (report[metric].total, report[metric].count) == (len(gone), mask.sum())
    if agreed:
        torch.testing.assert_close(found.advantages[mask], batch.advantages.where(~left, 0.0)[mask])
        assert found.entropy_mask is None
        assert torch.equal(found.returns, batch.returns)
    else:
        assert torch.equal(found.entropy_mask & mask, mask & ~left)
        assert torch.equal(found.advantages, batch.advantages)
    with pytest.raises(ValueError, match=f"{name} needs disagreement"):
        getattr(stages, name)(lambda *_: (attrs.evolve(batch, disagreement=None), kl, {}), share=share)(batch, kl)
