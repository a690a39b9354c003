"""Estimators that compare the responses to one prompt: an outcome score per row, the same advantage at all its tokens.

`scores` floating [B], `mask` bool [B, T], `groups` int64 [B] (rows of one prompt share an id, in any order), else
ValueError. All are constants to the gradient; results have the dtype of the scores. A row without tokens counts
nowhere, whatever its score. Equal scores within a group give exactly 0 (before any whitening), and so does the only row
of a group: there is nothing to compare it with. Scores are equal if they differ by no more than 8 rounding errors of
the group's largest. So a constant added to all scores of a group changes no advantage (except in maxrl, which divides
by the mean).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fppo.advantages._common import Advantages, Centred, centre, check_rows, group_rows, span, spread
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
