"""Rewards and advantages of turns, whose tokens are numbered, against definitions written out by hand."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import advantages
from fppo.advantages import by_turn, grpo, rloo, token_rewards, turn_gae


def turns_of(seed, rows=5, width=12):
    """(rewards, values, mask, turn ids), with holes within turns and between them, and turns side by side."""
    g = torch.Generator().manual_seed(seed)
    steps = torch.rand(rows, width, generator=g) < 0.3
    steps[:, 0] = False
    mask = torch.rand(rows, width, generator=g) < 0.7
    rewards, values = torch.randn(2, rows, width, generator=g, dtype=torch.float64)
    return rewards, values, mask, steps.cumsum(1).where(mask, -1).int()


NAMES = ("grpo", "rloo", "opo", "gpg", "maxrl", "grpo_passk", "lite_ppo", "qae", "pkpo")  # whitened ones have no zeros


def lists(ids):
    """The columns of each turn, by number, of a row."""
    found = {}
    for column, number in enumerate(ids.tolist()):
        if number >= 0:
            found.setdefault(number, []).append(column)
    return list(found.values())


@given(st.integers(0, 10**6))
def test_numbered_turns_are_the_steps_of_gae(seed):
    rewards, values, mask, ids = turns_of(seed)
    result = turn_gae(rewards, values, mask, turn_ids=ids, gamma=0.9, lam=0.7)
    for row in range(len(mask)):
        turns = lists(ids[row])
        total = [sum(rewards[row, t].item() for t in turn) for turn in turns] + [0.0]
        value = [values[row, turn[0]].item() for turn in turns] + [0.0]
        later = 0.0
        for k in reversed(range(len(turns))):
            goal = 0.9 * ((1 - 0.7) * value[k + 1] + 0.7 * (later + value[k + 1]))
            later = total[k] - value[k] + goal
            for place, t in enumerate(turns[k]):
                assert result.advantages[row, t].item() == pytest.approx(later, abs=1e-10)
                left = sum(rewards[row, s].item() for s in turns[k][place:])
                assert result.returns[row, t].item() == pytest.approx(left + goal, abs=1e-10)
    assert (result.advantages[~mask] == 0).all()


def test_runs_of_the_mask_are_turns_without_numbers():
    rewards, values, mask, _ = turns_of(3)
    runs = (mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]).cumsum(1).where(mask, -1)
    plain, numbered = (turn_gae(rewards, values, mask, turn_ids=x, gamma=0.5, lam=0.5) for x in (None, runs))
    torch.testing.assert_close(tuple(plain), tuple(numbered), rtol=0, atol=0)


@given(st.integers(0, 10**6))
def test_rewards_of_turns_stand_where_they_are_and_add_up_to_the_score(seed):
    turns, kl, mask, _ = turns_of(seed)
    scores = turns[:, 0].clone()
    rewards = token_rewards(scores, mask, turns=turns, kl=kl, kl_coef=0.5)
    for row in range(len(mask)):
        columns = mask[row].nonzero().flatten().tolist()
        for column in columns:
            own = turns[row, column] - 0.5 * kl[row, column]
            rest = scores[row] - turns[row, columns].sum() if column == columns[-1] else 0.0
            assert rewards[row, column].item() == pytest.approx(float(own + rest), abs=1e-10)
    assert (rewards[~mask] == 0).all()
    nothing = token_rewards(scores, mask, turns=torch.full_like(turns, torch.nan))
    assert torch.equal(nothing, token_rewards(scores, mask))


@pytest.mark.parametrize("estimate", [rloo, partial(grpo, scale="none")])
@pytest.mark.parametrize("seed", range(3))
def test_turns_are_compared_with_those_of_the_same_number(estimate, seed):
    rewards, _, mask, ids = turns_of(seed, rows=6)
    groups = torch.tensor([4, 4, 4, 9, 9, 9])
    result = by_turn(estimate, rewards, mask, groups, ids)
    for row in range(len(mask)):
        for number in set(ids[row].tolist()) - {-1}:
            peers = [r for r in range(len(mask)) if groups[r] == groups[row] and (ids[r] == number).any()]
            score = {r: rewards[r, ids[r] >= number].sum() for r in peers}
            others = [score[r] for r in peers if r != row or estimate is not rloo]
            mean = sum(others) / len(others) if len(peers) > 1 else score[row]
            got = result.advantages[row, ids[row] == number]
            torch.testing.assert_close(got, (score[row] - mean).expand_as(got))
    assert (result.advantages[~mask] == 0).all()
    one = by_turn(estimate, rewards, mask, groups, torch.zeros_like(ids))
    scores = rewards.where(mask, 0.0).sum(1)
    torch.testing.assert_close(one.advantages, estimate(scores, mask, groups).advantages)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shift", [0.0, 50.0])
def test_a_turn_that_one_response_alone_reached_teaches_nothing(name, shift):
    """The third turn of the first row, and all of the last row, the only one of its group."""
    ids = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 0, 1, 1, -1, -1], [0, -1, -1, -1, -1, -1], [0, 0, 1, -1, -1, -1]])
    mask, groups = ids >= 0, torch.tensor([5, 5, 5, 3])
    rewards = token_rewards(torch.tensor([0.5, 2.0, -2.0, 1.0]) + shift, mask)
    result = by_turn(getattr(advantages, name), rewards, mask, groups, ids).advantages
    assert not result[0, 4:].any()
    assert not result[3].any()
    assert result[0, :4].all() or name in ("grpo_passk", "qae", "pkpo")  # which leave rows without an advantage
    assert result[1, 2] != 0


def test_nothing_to_compare_and_numbers_that_are_none():
    x, mask = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    ids, groups = torch.full((2, 3), -1), torch.zeros(2, dtype=torch.int64)
    assert (by_turn(rloo, x, mask, groups, ids).advantages == 0).all()
    for bad in (ids[:, :2], ids.float()):
        with pytest.raises(ValueError, match="give integers of the mask's shape"):
            by_turn(rloo, x, mask, groups, bad)
        with pytest.raises(ValueError, match="give integers of the mask's shape"):
            turn_gae(x, x, mask, turn_ids=bad)
    assert advantages.turn_returns(x, mask, turn_ids=ids).shape == x.shape


@pytest.mark.usefixtures("unhooked")
def test_rewards_that_would_be_spread_over_turns_are_refused():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    ids, groups = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for bad in (x[:, :1], x[0], x.long()):
        with pytest.raises(ValueError, match=r"^rewards must be floating \[B, T\] = \[2, 3\] as the mask, got"):
            by_turn(rloo, bad, mask, groups, ids)
