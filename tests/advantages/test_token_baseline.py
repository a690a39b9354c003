import pytest
import torch
from hypothesis import given

from fppo.advantages import optimal_token_baseline, token_rewards
from fppo.laws.references import advantages as references
from tests.advantages._data import cases, close, spoil


def inputs(case):
    rewards, a, b = case.tokens
    log_probs = -a.abs() - 0.01
    return rewards, log_probs, log_probs.exp().square() + 0.1 * torch.sigmoid(b)


@given(cases())
def test_is_its_definition(case):
    rewards, log_probs, squares = inputs(case)
    rho = torch.rand(rewards.shape, generator=case.generator).double() + 0.5
    for how in ({}, {"correction": rho}, {"leave_one_out": True}):
        own, expected = (
            fn(rewards, case.mask, case.groups, log_probs=log_probs, sum_squared_probs=squares, **how)
            for fn in (optimal_token_baseline, references.optimal_token_baseline)
        )
        close(own.advantages, expected.advantages)
        close(own.returns, expected.returns)


@given(cases())
def test_garbage_row_order_and_padding_change_nothing(case):
    tensors = [*inputs(case), case.tokens[1].abs()]

    def run(mask, groups, rewards, log_probs, squares, rho):
        return optimal_token_baseline(
            rewards, mask, groups, log_probs=log_probs, sum_squared_probs=squares, correction=rho
        )

    plain = run(case.mask, case.groups, *tensors)
    spoiled = run(case.mask, case.groups, *(spoil(x, ~case.mask, case.generator) for x in tensors))
    assert torch.equal(plain.advantages, spoiled.advantages)
    assert not plain.advantages[~case.mask].any()
    order = torch.randperm(len(case.mask), generator=case.generator)
    close(run(case.mask[order], case.groups[order], *(x[order] for x in tensors)).advantages, plain.advantages[order])
    wide = run(
        torch.nn.functional.pad(case.mask, (1, 2)), case.groups, *(torch.nn.functional.pad(x, (1, 2)) for x in tensors)
    )
    close(wide.advantages[:, 1:-2], plain.advantages)


@given(cases(min_group=2))
def test_equal_rewards_give_exactly_zero(case):
    """Also where the policy is certain, so that every weight is 0."""
    scores = (case.groups.double() + 0.1) / 3.0
    mask = torch.ones_like(case.mask)
    for log_probs, squares in (inputs(case)[1:], (torch.zeros(mask.shape).double(), torch.ones(mask.shape).double())):
        result = optimal_token_baseline(
            token_rewards(scores, mask), mask, case.groups, log_probs=log_probs, sum_squared_probs=squares
        )
        assert not result.advantages.any()


def test_rows_weigh_the_same_where_the_policy_is_certain():
    mask, groups = torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
    certain = torch.zeros(2, 2, dtype=torch.float64)
    run = optimal_token_baseline(rewards, mask, groups, log_probs=certain, sum_squared_probs=certain + 1.0)
    assert run.advantages.tolist() == [[-1.0, -1.0], [1.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(case=cases(min_group=2))
def test_a_rounding_between_equal_rewards_is_no_advantage(dtype, case):
    scores = (100.0 + case.groups % 5).to(dtype)
    upwards = torch.rand(scores.shape, generator=case.generator) < 0.5
    scores = torch.where(upwards, torch.nextafter(scores, torch.full_like(scores, torch.inf)), scores)
    mask, (_, log_probs, squares) = torch.ones_like(case.mask), inputs(case)
    rewards = token_rewards(scores, mask)
    result = optimal_token_baseline(
        rewards, mask, case.groups, log_probs=log_probs.to(dtype), sum_squared_probs=squares.to(dtype)
    )
    assert not result.advantages.any()


@given(cases())
def test_a_constant_added_to_the_returns_of_a_group_changes_no_advantage(case):
    rewards, log_probs, squares = inputs(case)
    last = token_rewards(10.0 + case.groups % 5, case.mask)
    for out in (False, True):
        how = {"log_probs": log_probs, "sum_squared_probs": squares, "leave_one_out": out}
        plain, shifted = (
            optimal_token_baseline(x, case.mask, case.groups, **how).advantages for x in (rewards, rewards + last)
        )
        close(shifted, plain, 1e-8)


def test_tokens_that_one_row_alone_has_are_compared_with_the_others_last_ones():
    mask = torch.tensor([[True, True, True], [True, False, False], [True, True, True]])
    rewards = token_rewards(torch.tensor([3.0, 1.0, 7.0]).double(), mask)
    certain, groups = torch.zeros(3, 3, dtype=torch.float64), torch.tensor([0, 0, 1])
    for out, expected in ((False, [1.0, -1.0, 0.0]), (True, [2.0, -2.0, 0.0])):
        run = optimal_token_baseline(
            rewards, mask, groups, log_probs=certain, sum_squared_probs=certain + 1.0, leave_one_out=out
        )
        assert run.advantages.tolist() == (torch.tensor(expected)[:, None] * mask).tolist()
