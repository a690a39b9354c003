"""Distillation's estimator is its definition, and its mean gradient that of the divergence it is named after."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import advantages, laws
from fppo.advantages.columns import OfRows
from fppo.laws.expectation import StepMath, compared, step_bias
from fppo.laws.references import advantages as references
from tests import tiny

SIZES = st.integers(1, 4), st.integers(1, 5)
SEEDS = st.integers(0, 2**20)


def columns(rows, width, seed, spread):
    """Log-probs of policy and teacher, with garbage outside a mask with gaps; scores and groups."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=g) < 0.6
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e300]).double()

    def tokens():
        drawn = -spread * torch.rand(rows, width, generator=g).double() ** 2
        return drawn.where(mask, garbage[torch.randint(4, (rows, width), generator=g)])

    return tokens(), tokens(), mask, torch.randn(rows, generator=g).double(), torch.randint(2, (rows,), generator=g)


@given(
    *SIZES,
    SEEDS,
    st.sampled_from([1e-3, 3.0, 1e4]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.1, 1.0]),
    st.none() | st.floats(0.1, 5.0),
    st.sampled_from([0.0, 0.7]),
)
def test_it_is_its_definition(rows, width, seed, spread, gamma, coef, limit, score_coef):
    log_probs, teacher, mask, scores, groups = columns(rows, width, seed, spread)
    given_ = {"gamma": gamma, "coef": coef, "limit": limit, "score_coef": score_coef}
    found = advantages.reverse_kl(log_probs, teacher, mask, scores=scores, groups=groups, **given_)
    expected = references.reverse_kl(log_probs, teacher, mask, scores=scores, groups=groups, **given_)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found.advantages.dtype == torch.float64
    means = advantages.mean_reverse_kl(log_probs, teacher, mask)
    gaps = (log_probs - teacher).where(mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    torch.testing.assert_close(means, gaps, rtol=1e-12, atol=1e-12)


@given(*SIZES, SEEDS, st.sampled_from([0.0, 0.5, 1.0]))
def test_a_teacher_that_agrees_teaches_nothing(rows, width, seed, gamma):
    log_probs, _, mask, *_ = columns(rows, width, seed, 3.0)
    for dtype in (torch.float32, torch.float64):
        found = advantages.reverse_kl(log_probs.to(dtype), log_probs.to(dtype), mask, gamma=gamma)
        assert found.advantages.dtype == dtype
        assert not found.advantages.any()
        assert not found.returns.any()


def test_a_token_that_the_teacher_rules_out_is_bounded_by_a_limit():
    log_probs, mask = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)
    teacher = torch.tensor([[-torch.inf, -2.0]])
    assert advantages.reverse_kl(log_probs, teacher, mask, limit=5.0).advantages.tolist() == [[-5.0, 0.0]]
    assert advantages.reverse_kl(log_probs, teacher, mask).advantages.tolist() == [[-math.inf, 0.0]]


@pytest.mark.parametrize(("gamma", "of"), [(0.0, "token"), (1.0, "sequence")])
@pytest.mark.parametrize("score_coef", [0.0, 1.0])
def test_the_mean_gradient_is_the_divergence_of_tokens_or_of_whole_responses(gamma, of, score_coef):
    """Over all batches of small worlds, whose reference is the teacher, through the library's own step."""
    estimator = partial(advantages.reverse_kl, gamma=gamma, coef=0.3, score_coef=score_coef)
    for world in laws.worlds():
        found = step_bias(StepMath(estimator=estimator), world)
        goal = world.gradient(0.3, of)
        if score_coef == 0.0:
            goal = goal - world.gradient(0.0)
        exact = compared(found.mean, goal, found.deviation)
        assert exact.error < 1e-9, world.made
    assert goal.norm() > 1e-3


def test_in_between_it_is_no_divergence():
    estimator = partial(advantages.reverse_kl, gamma=0.5)
    world = laws.world()
    found = step_bias(StepMath(estimator=estimator), world)
    for of in ("token", "sequence"):
        goal = world.gradient(1.0, of) - world.gradient(0.0)
        assert compared(found.mean, goal, found.deviation).turned > 1e-3


def test_what_does_not_fit_is_named():
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for wrong, text in (
        ({"gamma": 1.5}, "gamma must be between 0 and 1, got 1.5"),
        ({"limit": 0.0}, "limit must be > 0, got 0.0"),
        ({"score_coef": 1.0}, r"score_coef=1.0 needs scores and groups \[B\]"),
    ):
        with pytest.raises(ValueError, match=text):
            advantages.reverse_kl(x, x, mask, **wrong)
    batch = tiny.experience(0, 4)
    with pytest.raises(ValueError, match="the estimator 'reverse_kl' needs teacher_log_probs in the batch"):
        OfRows(advantages.reverse_kl)(batch, advantages.token_rewards(batch.scores, batch.response_mask))
