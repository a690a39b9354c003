"""Estimators that weigh steps by length, by turn and by off-policy weights, against their formulas as loops."""

from functools import partial

import pytest
import torch

from fppo import laws
from fppo.advantages import Advantages, gae, length_lam, td, turn_gae, vtrace
from fppo.laws import LawViolation


def row_by_row(of_row):
    """An estimator [B, T] of one that takes the numbers of a row's tokens, in its mask, as lists."""

    def estimate(*tensors):
        *columns, mask = tensors
        advantages, returns = torch.zeros_like(columns[0]), torch.zeros_like(columns[0])
        for b, row in enumerate(mask):
            if row.any():
                advantage, target = of_row(*(x[b, row].tolist() for x in columns))
                advantages[b, row], returns[b, row] = (
                    torch.tensor(x, dtype=advantages.dtype) for x in (advantage, target)
                )
        return Advantages(advantages, returns)

    return estimate


def plain_gae(r, v, gamma, lam):
    """The sum over later tokens of (gamma lam)^l delta."""
    v = [*v, 0.0]
    delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
    return [sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, len(r))) for t in range(len(r))]


@row_by_row
def slow_decoupled(r, v):
    critic = plain_gae(r, v, 0.9, 1.0)
    return plain_gae(r, v, 0.9, 0.7), [a + x for a, x in zip(critic, v, strict=True)]


@row_by_row
def slow_adaptive(r, v):
    advantages = plain_gae(r, v, 0.9, max(0.0, 1 - 1 / (0.6 * len(r))))
    return advantages, [a + x for a, x in zip(plain_gae(r, v, 0.9, 1.0), v, strict=True)]


@row_by_row
def slow_td(r, v):
    goals, last = [], len(r)
    for t in range(last):
        ahead = [0.9 ** (k - t) * r[k] for k in range(t, min(t + 3, last))]
        goals.append(sum(ahead) + (0.9**3 * v[t + 3] if t + 3 < last else 0.0))
    return [g - x for g, x in zip(goals, v, strict=True)], goals


@row_by_row
def slow_vtrace(r, v, w):
    """Remark 1 of the paper, backwards over the row."""
    following = goal = 0.0  # the value of the next state, and v of it
    advantages, goals = [], []
    for reward, value, weight in zip(reversed(r), reversed(v), reversed(w), strict=True):
        delta = weight * (reward + 0.9 * following - value)
        advantages.append(reward + 0.9 * goal - value)
        goal = value + delta + 0.9 * 0.8 * min(0.7, weight) * (goal - following)
        following = value
        goals.append(goal)
    return advantages[::-1], goals[::-1]


def slow_turns(rewards, values, mask):
    """The turns of each row as the steps of GAE; each token's target is its turn's rewards left and what follows."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for b, row in enumerate(mask.tolist()):
        turns = []
        for t, inside in enumerate(row):
            if inside and (t == 0 or not row[t - 1]):
                turns.append([])
            if inside:
                turns[-1].append(t)
        r, v = (
            [sum(rewards[b, t].item() for t in turn) for turn in turns],
            [values[b, turn[0]].item() for turn in turns],
        )
        of_turns = plain_gae(r, v, 0.9, 0.7)
        later = [*(a + x for a, x in zip(of_turns, v, strict=True)), 0.0]
        for k, turn in enumerate(turns):
            value = v[k + 1] if k + 1 < len(turns) else 0.0
            for place, t in enumerate(turn):
                left = sum(rewards[b, s].item() for s in turn[place:])
                advantages[b, t] = of_turns[k]
                returns[b, t] = left + 0.9 * (0.3 * value + 0.7 * later[k + 1])
    return Advantages(advantages, returns)


def adaptive(rewards, values, mask):
    lam = length_lam(mask, alpha=0.6)
    return gae(rewards, values, mask, gamma=0.9, lam=lam, critic_lam=1.0)


FORMULAS = {
    "decoupled": (partial(gae, gamma=0.9, lam=0.7, critic_lam=1.0), slow_decoupled, {}),
    "length": (adaptive, slow_adaptive, {}),
    "turns": (partial(turn_gae, gamma=0.9, lam=0.7), slow_turns, {"bridges": False}),
    "td": (partial(td, steps=3, gamma=0.9), slow_td, {}),
    "vtrace": (
        partial(vtrace, gamma=0.9, lam=0.8, cut=0.7),
        slow_vtrace,
        {"columns": ("rewards", "values", "weights")},
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_an_estimator_is_its_formula_and_keeps_the_laws(name):
    estimator, reference, how = FORMULAS[name]
    laws.check_temporal(estimator, reference=reference, **how)


def test_a_wrong_discount_is_seen():
    with pytest.raises(LawViolation, match="as of estimate") as caught:
        laws.check_temporal(partial(td, steps=3, gamma=0.8), reference=slow_td)
    assert caught.value.law == "reference"
    with pytest.raises(LawViolation, match="without its masked steps"):
        laws.check_temporal(partial(turn_gae, gamma=0.9))


def test_the_ends_of_the_ranges_are_known_estimators():
    draws = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 9, generator=draws, dtype=torch.float64)
    mask = torch.rand(4, 9, generator=draws) < 0.7
    whole = torch.ones_like(mask)
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    for steps, lam in ((1, 0.0), (99, 1.0)):
        close(td(rewards, values, mask, steps=steps, gamma=0.9), gae(rewards, values, mask, gamma=0.9, lam=lam))
    on_policy = vtrace(rewards, values, torch.ones_like(rewards), mask, gamma=0.9, lam=0.7)
    close(on_policy.returns, gae(rewards, values, mask, gamma=0.9, lam=0.7).returns)
    one_turn = turn_gae(rewards, values, whole, gamma=0.5, lam=0.5)  # which no discount reaches
    close(one_turn.advantages, (rewards.sum(1) - values[:, 0])[:, None].expand_as(rewards))
    close(one_turn.returns, gae(rewards, values, whole).returns)
    assert length_lam(torch.ones(1, 400, dtype=torch.bool)).tolist() == [0.95]
    assert length_lam(torch.ones(1, 20, dtype=torch.bool)).tolist() == [0.0]


def test_nothing_to_estimate_and_numbers_out_of_range():
    for shape in ((0, 3), (3, 0)):
        x, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        for result in (td(x, x, mask, steps=1), turn_gae(x, x, mask), vtrace(x, x, x, mask), adaptive(x, x, mask)):
            assert result.advantages.shape == result.returns.shape == shape
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for call, text in (
        (partial(td, steps=0), "steps must be 1 or more, got 0"),
        (partial(turn_gae, lam=1.5), "lam must be between 0 and 1, got 1.5"),
        (partial(gae, critic_lam=-0.1), "critic_lam must be between 0 and 1, got -0.1"),
    ):
        with pytest.raises(ValueError, match=text):
            call(x, x, mask)
    with pytest.raises(ValueError, match="cut must be > 0"):
        vtrace(x, x, x, mask, cut=0.0)
    with pytest.raises(ValueError, match="alpha must be > 0"):
        length_lam(mask, alpha=0.0)
