"""A baseline for every token position, weighted by the variance each response has accumulated so far."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo.advantages._common import Advantages, Groups, check_rows, group_rows, rounding
from fppo.advantages.temporal import discounted_returns
from fppo.losses._common import check_tokens
from fppo.shapes import Mask, RowIds, Tokens

_LEAST = 1e-12  # share of a group's weights below which the others' sum is the rounding error of a difference


def optimal_token_baseline(
    rewards: Tokens,
    mask: Mask,
    groups: RowIds,
    *,
    log_probs: Tokens,
    sum_squared_probs: Tokens,
    correction: Tokens | None = None,
    leave_one_out: bool = False,
) -> Advantages:
    """G_k - B_k with B_k = sum_i G_ik W_ik / sum_i W_ik over the group's rows that have a k-th token.

    G is the undiscounted reward-to-go of the token `rewards` [B, T], W_k the sum over the row's first k tokens of
    1 - 2 pi + sum pi^2: pi = exp(log_probs) of the token taken, sum_squared_probs over the vocabulary, both [B, T]
    under the policy that is trained. `correction` [B, T], the importance weights of the rollout, multiplies each term
    by its square. Tokens are counted along the mask, so tokens between two turns have no effect. Where no other row has
    a k-th token, the baseline is that of the last token that another row has too, and the only row of a group gets 0;
    so a constant added to all returns of a group changes no advantage. Where all weights are 0, all rows have equal
    weights.

    The baseline includes the row's own return, as in verl, which biases the gradient: it is shorter, and turned by 9 %
    of its size with groups of 2 and 10 % with groups of 4 (responses of 1 to 3 tokens). With `leave_one_out` the sums
    are over the other rows: no bias, and 5 to 8 % more noise in the gradient.

    Raises ValueError for other shapes or dtypes.
    """
    check_tokens(mask, rewards=rewards, log_probs=log_probs, sum_squared_probs=sum_squared_probs)
    check_rows(mask, groups)
    terms = 1.0 - 2.0 * log_probs.detach().double().exp() + sum_squared_probs.detach().double()
    if correction is not None:
        check_tokens(mask, correction=correction)
        terms = terms * correction.detach().double().square()
    energy = terms.where(mask, 0.0).clamp(min=0).cumsum(1)
    returns = discounted_returns(rewards.double(), mask)

    first = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)  # the tokens of the mask, in their order
    alive = mask.gather(1, first)
    value, weight = returns.gather(1, first), energy.gather(1, first).where(alive, 0.0)
    packed = _above_baseline(value, weight, alive, group_rows(groups), rewards.dtype, leave_one_out=leave_one_out)

    place = (mask.cumsum(1) - 1).clamp(min=0)
    advantages = packed.gather(1, place).where(mask, 0.0)
    return Advantages(advantages.to(rewards.dtype), returns.to(rewards.dtype))


def _above_baseline(
    value: Tensor, weight: Tensor, alive: Tensor, members: Groups, dtype: torch.dtype, *, leave_one_out: bool
) -> Tensor:
    """`value` [B, T] minus its baseline, the mean by `weight` within the groups `members`. `alive` says which columns
    each row has. In columns that only one row of a group has, the baseline is that of the row's last shared column;
    0 for a row that shares none.

    Values are counted from the lowest, so that equal ones give exactly 0, also where they differ by a rounding error of
    `dtype`.
    """
    shared = alive & (members.reduce(alive.double(), "sum") > 1)  # a row's first columns
    some = members.reduce(shared.double(), "sum") > 0
    columns = torch.arange(value.shape[1], device=value.device)
    last = torch.minimum(columns, (shared.sum(1, keepdim=True) - 1).clamp(min=0))
    lowest = members.reduce(value.where(shared, torch.inf), "min").where(some, 0.0).gather(1, last)
    highest = members.reduce(value.where(shared, -torch.inf), "max").where(some, 0.0).gather(1, last)
    lower, higher = torch.minimum(lowest, value), torch.maximum(highest, value)
    varied = higher - lower > rounding(torch.maximum(lower.abs(), higher.abs()), dtype)
    compared = alive & shared.any(1, keepdim=True) & varied
    above = (value - lowest).where(compared, 0.0)
    baseline = _baseline(
        above.where(shared, 0.0), weight.where(shared, 0.0), shared, members, leave_one_out=leave_one_out
    )
    return (above - baseline.gather(1, last)).where(compared, 0.0)


def _baseline(value: Tensor, weight: Tensor, alive: Tensor, members: Groups, *, leave_one_out: bool) -> Tensor:
    """The weighted mean [B, T] of `value` over each row's group, without the row itself if `leave_one_out`; the plain
    mean where all weights are 0. `value` and `weight` are 0 where `alive` is False."""

    def mean(each: Tensor) -> tuple[Tensor, Tensor]:
        total, added = members.reduce(each, "sum"), members.reduce(value * each, "sum")
        if leave_one_out:
            total, added = (total - each).where(total - each > _LEAST * total, 0.0), added - value * each
        return total, added / total.where(total > 0, 1.0)

    total, weighted = mean(weight)
    return torch.where(total > 0, weighted, mean(alive.double())[1])
