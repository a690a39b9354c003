"""Estimators in expectation: the mean gradient over all groups that a small policy can sample, exactly."""

import itertools
from functools import partial

import pytest
import torch

from fppo.advantages import grpo, opo, optimal_token_baseline, rloo, token_rewards

SEQUENCES = [(0,), *[(first, second) for first in (1, 2) for second in range(3)]]  # 0 ends one; two tokens at most
MASK = torch.tensor([[True, len(s) == 2] for s in SEQUENCES])
PLACES = torch.tensor([[0, s[0]] for s in SEQUENCES])  # which distribution each token is of: the first, or one after
TOKENS = torch.tensor([[*s, 0][:2] for s in SEQUENCES])


def baseline(scores, mask, groups, *, picked, logits, **how):
    every = logits.log_softmax(-1).detach()
    squares = every.exp().square().sum(-1)[PLACES[picked]]
    log_probs = every[PLACES[picked], TOKENS[picked]]
    rewards = token_rewards(scores, mask)
    return optimal_token_baseline(
        rewards, mask, groups, log_probs=log_probs.where(mask, 0.0), sum_squared_probs=squares.where(mask, 0.0), **how
    )


def without_more(fn, **how):
    return lambda scores, mask, groups, *, picked, logits: fn(scores, mask, groups, **how)


def bias(fn, *, n, seed):
    """How far the mean of sum(A * grad log pi) is from the gradient of n * E[score], over the size of that."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 3, generator=g, dtype=torch.float64).requires_grad_()
    table = (torch.rand(len(SEQUENCES), generator=g) < 0.5).double() + torch.arange(len(SEQUENCES)) / 10
    groups = torch.tensor(list(itertools.product(range(len(SEQUENCES)), repeat=n)))
    picked, number = groups.flatten(), torch.arange(len(groups)).repeat_interleave(n)
    every = logits.log_softmax(-1)[PLACES, TOKENS].where(MASK, 0.0)
    chances = every.sum(1).exp()
    advantages = fn(table[picked], MASK[picked], number, picked=picked, logits=logits).advantages
    weights = chances.detach()[groups].prod(1)[number]
    found = torch.autograd.grad((weights[:, None] * advantages * every[picked]).sum(), logits, retain_graph=True)[0]
    expected = torch.autograd.grad(n * (chances * table).sum(), logits)[0]
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "fn",
    [
        without_more(rloo),
        without_more(opo, leave_one_out=True),
        partial(baseline, leave_one_out=True),
    ],
    ids=["rloo", "opo", "optimal_token_baseline"],
)
def test_a_baseline_of_the_other_rows_has_no_bias(fn, n):
    assert max(bias(fn, n=n, seed=seed) for seed in range(4)) < 1e-12


@pytest.mark.parametrize("fn", [without_more(opo), baseline], ids=["opo", "optimal_token_baseline"])
def test_a_baseline_with_the_rows_own_return_in_it_has_one(fn):
    """As the papers and verl have it: that of grpo without std is half the gradient at n = 2, these turn it too."""
    assert bias(without_more(grpo, scale="none"), n=2, seed=0) == pytest.approx(0.5)
    assert min(abs(bias(fn, n=2, seed=seed) - 0.5) for seed in range(4)) > 1e-4
