"""Estimators that compare the responses to one prompt: an outcome score per row, the same advantage at all its tokens.

`scores` floating [B], `mask` bool [B, T], `groups` int64 [B] (rows of one prompt share an id, in any order), else
ValueError. All are constants to the gradient; results have the dtype of the scores. A row without tokens counts
nowhere, whatever its score. Equal scores within a group give exactly 0 (before any whitening), and so does the only row
of a group: there is nothing to compare it with. Scores are equal if they differ by no more than 8 rounding errors of
the group's largest. So a constant added to all scores of a group changes no advantage (except in maxrl, which divides
by the mean, and lite_ppo, which divides by the deviation over all groups).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fppo.advantages._common import Advantages, Centred, Groups, centre, check_rows, group_rows, span, spread
from fppo.advantages.whitening import whiten
from fppo.losses._common import check_mask, unknown
from fppo.shapes import Mask, RowIds, Rows

SCALES = ("std", "none")

_EPS = 1e-6


def divisor(stats: Centred, scale: str) -> Rows:
    """The number by which deviations are divided: the group's standard deviation + 1e-6, or 1 for the scale "none"."""
    if scale not in SCALES:
        unknown("scale", scale, SCALES)
    return stats.std + _EPS if scale == "std" else torch.ones_like(stats.std)


def _centre(scores: Rows, mask: Mask, groups: RowIds, weights: Tensor | None = None) -> Centred:
    check_rows(mask, groups, scores=scores)
    return centre(scores, mask.any(1), group_rows(groups), weights)


def grpo(scores: Rows, mask: Mask, groups: RowIds, *, scale: str = "std") -> Advantages:
    """(S - mean) / (std + 1e-6), with S the row's score, mean and unbiased std over its group; arXiv:2402.03300.

    `scale="none"` leaves the division out (Dr. GRPO, arXiv:2503.20783).
    """
    stats = _centre(scores, mask, groups)
    return spread(stats.deviation / divisor(stats, scale), scores, mask)


def maxrl(scores: Rows, mask: Mask, groups: RowIds) -> Advantages:
    """(S - mean) / mean, S the row's score, the mean over its group; 0 where that is at most 1e-6; arXiv:2602.02710.

    Meant for scores of 0 and 1. With n rows in a group, the expected gradient is that of the log of the success
    probability, its series cut at order n, so that rare successes weigh more. Means of other scores may be near 0.
    """
    stats = _centre(scores, mask, groups)
    mean = scores.detach().double() - stats.deviation
    kept = mask.any(1) & (mean > _EPS)
    return spread((stats.deviation / mean.where(kept, 1.0)).where(kept, 0.0), scores, mask)


def rloo(scores: Rows, mask: Mask, groups: RowIds) -> Advantages:
    """The score S minus the mean score of the other rows of its group, which is n / (n - 1) (S - mean) in a group of n
    rows; 0 for the only row of a group; arXiv:2402.14740."""
    stats = _centre(scores, mask, groups)
    return spread(stats.rows / (stats.rows - 1).clamp(min=1) * stats.deviation, scores, mask)


def opo(scores: Rows, mask: Mask, groups: RowIds, *, leave_one_out: bool = False) -> Advantages:
    """The score minus the group's mean score, weighted by response length (tokens of the mask); arXiv:2505.23585.

    The mean includes the row's own score, as in the paper and in verl, which biases the gradient: it is shorter, and
    turned by 7 % of its size with groups of 2 and 4 % with groups of 4 (responses of 1 to 3 tokens). With
    `leave_one_out` the mean is over the other rows: no bias, and 1 % more noise in the gradient. A longer row with the
    higher score may then have the lower advantage.
    """
    lengths = mask.sum(1)
    stats = _centre(scores, mask, groups, lengths)
    if not leave_one_out:
        return spread(stats.deviation, scores, mask)
    every = group_rows(groups).reduce(lengths.double(), "sum")
    others = every - lengths  # S - mean of the others = (S - mean) * every / others
    return spread(stats.deviation * every / others.clamp(min=1), scores, mask)


def gpg(scores: Rows, mask: Mask, groups: RowIds, *, outcomes: Rows | None = None) -> Advantages:
    """alpha (S - the group's mean), alpha = rows / rows whose outcome is not 0, in the whole batch; arXiv:2504.02546.

    S is the row's score. `outcomes` [B] are the scores before a term such as a KL penalty is added, after which hardly
    any score is 0; None: the scores themselves.
    """
    stats = _centre(scores, mask, groups)
    outcomes = scores if outcomes is None else outcomes
    check_rows(mask, outcomes=outcomes)
    present = mask.any(1)
    alpha = present.sum().double() / ((outcomes != 0) & present).sum().clamp(min=1)
    return spread(alpha * stats.deviation, scores, mask)


def grpo_passk(scores: Rows, mask: Mask, groups: RowIds, *, scale: str = "std") -> Advantages:
    """The group's best row gets (best - second) / (std + 1e-6), all others 0; arXiv:2503.19595.

    Rows that share the best score, up to rounding, get 0, and so does a row without a second.
    """
    stats = _centre(scores, mask, groups)
    present, members = mask.any(1), group_rows(groups)
    full, within = scores.detach().double().where(present, -torch.inf), span(scores, present, members)
    best = full >= within.highest - within.rounding
    second = members.reduce(full.where(~best, -torch.inf), "max")
    only = best & present & (stats.rows > 1) & (members.reduce(best.double(), "sum") == 1)
    gap = (full - second).where(only, 0.0)
    return spread(gap / divisor(stats, scale), scores, mask)


def lite_ppo(scores: Rows, mask: Mask, groups: RowIds) -> Advantages:
    """(S - mean) / (std + 1e-6), with S the row's score, its group's mean, and the unbiased std of all scores of the
    batch; arXiv:2508.08221 (Lite PPO).

    So groups whose scores differ little are not blown up as by `grpo`. Meant for the mode "token-mean".
    """
    stats = _centre(scores, mask, groups)
    present = mask.any(1)
    low = scores.detach().double().where(present, torch.inf).amin(dim=0, keepdim=True) if len(scores) else scores
    above = (scores.detach().double() - low).where(present, 0.0)
    count = present.sum().clamp(min=1)
    apart = (above - above.sum() / count).where(present, 0.0)
    std = (apart.square().sum() / (count - 1).clamp(min=1)).sqrt()
    return spread(stats.deviation / (std + _EPS), scores, mask)


def _ranked(values: Rows, members: Groups, present: Tensor) -> tuple[Tensor, Tensor]:
    """An order of the rows by group and, within it, by their `values`, those not `present` last; and the place at which
    each row's group begins in it. Both int64 [B]."""
    keys = values.where(present, torch.inf)
    order = keys.argsort(stable=True)
    order = order[members.group_of[order].argsort(stable=True)]
    return order, (members.lengths.cumsum(0) - members.lengths)[members.group_of]


def qae(scores: Rows, mask: Mask, groups: RowIds, *, quantile: float = 0.4) -> Advantages:
    """(S - b) / (std + 1e-6), with S the row's score and b the least score of the group that at least `quantile` of its
    scores do not exceed; std is the group's, unbiased; arXiv:2509.22611.

    With scores of 0 and 1, a group of at most 1 - quantile right rows teaches by these alone, any other by its wrong
    ones alone. A larger quantile keeps the entropy up. Raises ValueError for a quantile that is not between 0 and 1.
    """
    if not 0 < quantile < 1:
        raise ValueError(f"quantile must be above 0 and below 1, got {quantile}")
    stats, present, members = _centre(scores, mask, groups), mask.any(1), group_rows(groups)
    if not len(scores):
        return spread(stats.deviation, scores, mask)
    order, begin = _ranked(stats.deviation, members, present)
    place = (stats.rows * quantile - 1e-9).ceil().clamp(min=1).long() - 1
    baseline = stats.deviation[order[begin + place]]
    above = (stats.deviation - baseline).where(present, 0.0)
    return spread(above / divisor(stats, "std"), scores, mask)


def pkpo(scores: Rows, mask: Mask, groups: RowIds, *, k: int = 2) -> Advantages:
    """k times the mean, over all subsets of k rows of the group with this row, of the subset's best score less the best
    without the row; arXiv:2505.15201 (equation 33, times the rows of a group).

    With n >= k rows in each group and the mode "seq-mean-token-sum", the expected gradient is exactly that of the best
    score among k responses, for 0 and 1 pass@k; a group of fewer rows takes k = n. Raises ValueError for k < 2; k = 1
    is `rloo`.
    """
    if k < 2:
        raise ValueError(f"k must be at least 2, got {k}; for k = 1 take rloo")
    stats, present, members = _centre(scores, mask, groups), mask.any(1), group_rows(groups)
    order, begin = _ranked(stats.deviation, members, present)
    rank = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device)) - begin
    size = stats.rows.clamp(max=k)  # of a subset
    subsets = _log_choose(stats.rows - 1, size - 1)
    # the row is the best of a subset, and one of rank j the second: choose the size - 2 others below j
    weight = (_log_choose(rank.double(), size - 2) - subsets).exp()
    weight = weight.where(present & (size >= 2) & (rank >= size - 2), 0.0)
    sums = [x[order].cumsum(0) - x[order] for x in (weight, weight * stats.deviation)]  # of those before, in this order
    below = [x[rank + begin] - x[begin] for x in sums]
    return spread((size * (stats.deviation * below[0] - below[1])).where(present, 0.0), scores, mask)


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """The logarithm of n over k, float64, for 0 <= k <= n; not a number that counts for others."""
    return (n + 1).lgamma() - (k.clamp(min=0) + 1).lgamma() - (n - k + 1).clamp(min=1).lgamma()


def reinforce_plus_plus_baseline(scores: Rows, mask: Mask, groups: RowIds) -> Advantages:
    """The score minus the group's mean score, whitened over all tokens of the batch; arXiv:2501.03262."""
    result = spread(_centre(scores, mask, groups).deviation, scores, mask)
    return Advantages(whiten(result.advantages, mask), result.returns)


def gdpo(
    named_scores: Mapping[str, Rows],
    mask: Mask,
    groups: RowIds,
    *,
    weights: Mapping[str, float] | None = None,
    scale: str = "std",
) -> Advantages:
    """The weighted sum, over the named scores, of the advantages that `grpo` gives each, whitened over the batch's
    tokens; arXiv:2601.05242.

    `named_scores` maps names to [B]; `weights` has a factor for each name in use (None: all, with weight 1). Returns
    are the weighted sum of the scores. Raises ValueError for a weight without a score.
    """
    check_mask(mask)
    if weights is None:
        weights = dict.fromkeys(named_scores, 1.0)
    if not named_scores or not weights:
        raise ValueError("gdpo needs at least one named score; there is none, or weights is empty")
    for name in weights:
        if name not in named_scores:
            unknown("score in weights", name, named_scores)
    terms = {name: grpo(named_scores[name], mask, groups, scale=scale) for name in weights}
    advantages = torch.stack([weights[name] * term.advantages.double() for name, term in terms.items()]).sum(0)
    returns = torch.stack([weights[name] * term.returns.double() for name, term in terms.items()]).sum(0)
    dtype = next(iter(terms.values())).advantages.dtype
    return Advantages(whiten(advantages.to(dtype), mask), returns.to(dtype))
