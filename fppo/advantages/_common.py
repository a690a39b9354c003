"""Helpers of the estimators: the result record, checks of shapes, statistics of groups of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fppo.losses._common import check_mask
from fppo.shapes import Mask, RowIds, Rows, Tokens
from fppo_kernels.shapes import Bool

_NOISE = 8.0  # a difference of this many rounding errors of the largest number is rounding, not signal


class Advantages(NamedTuple):
    """The result of an estimator: advantages and returns, both [B, T], 0 where the mask is False, without gradient.

    `returns` is the reward-to-go, the critic's target (gae: advantage + value); for outcome scores the score itself.
    """

    advantages: Tokens
    returns: Tokens


def check_rows(mask: Tensor, groups: Tensor | None = None, **tensors: Tensor) -> None:
    """Raise ValueError unless every tensor is floating [B] and `groups` is integer [B], with the mask's B."""
    check_mask(mask)
    for name, x in tensors.items():
        if x.shape != mask.shape[:1] or not x.is_floating_point():
            raise ValueError(f"{name} must be floating [B] = [{len(mask)}], got {x.dtype} {list(x.shape)}")
    if groups is not None and (groups.shape != mask.shape[:1] or groups.is_floating_point()):
        raise ValueError(f"groups must be int64 [B] = [{len(mask)}], got {groups.dtype} {list(groups.shape)}")


def check_unit(name: str, value: float | Tensor) -> None:
    """Raise ValueError unless `value` is in [0, 1]. A tensor passes unread: reading it would wait for the device."""
    if not isinstance(value, Tensor) and not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")


def on_mask(x: Tokens, mask: Mask) -> Tokens:
    """`x` [B, T] as a constant in float64, 0 where the mask is False."""
    return x.detach().double().where(mask, 0.0)


def spread(x: Rows, scores: Rows, mask: Mask) -> Advantages:
    """Broadcast one number per row to the row's tokens: advantages `x` [B] float64, and returns `scores` [B], both
    [B, T] in the dtype of the scores, 0 outside the mask."""
    dtype = scores.dtype
    return Advantages(x.to(dtype)[:, None].where(mask, 0.0), scores.detach()[:, None].where(mask, 0.0))


class Groups(NamedTuple):
    """Rows by group: `order` [B] sorts rows by group, `lengths` [G] rows in each, `group_of` [B] each row's group."""

    order: RowIds
    lengths: Tensor
    group_of: RowIds

    def reduce(self, x: Tensor, how: str) -> Tensor:
        """The "sum", "max" or "min" (`how`) of `x` [B, ...] over the rows of each row's group, [B, ...]. Rows of a
        group are taken in their order, so results are reproducible."""
        if not x.numel():
            return x
        return torch.segment_reduce(x[self.order], how, lengths=self.lengths)[self.group_of]


def group_rows(groups: RowIds) -> Groups:
    """The groups of rows with equal ids, int64 [B], any ids in any order."""
    order = torch.argsort(groups, stable=True)
    unique: tuple[Tensor, ...] = torch.unique(groups, return_inverse=True, return_counts=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return Groups(order, lengths=unique[2], group_of=unique[1])


def rounding(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The difference up to which numbers of `dtype` count as equal, given the size of the `largest` of them."""
    return _NOISE * torch.finfo(dtype).eps * largest


class ScoreSpan(NamedTuple):
    """The scores of each row's group, float64 [B]: the lowest and the highest, and `rounding` between them."""

    lowest: Rows
    highest: Rows
    rounding: Rows

    @property
    def equal(self) -> Bool[Tensor, " b"]:
        """The rows whose group's scores are all equal, up to rounding, or empty; bool [B]."""
        return self.highest - self.lowest <= self.rounding


def span(scores: Rows, present: Bool[Tensor, " b"], groups: Groups) -> ScoreSpan:
    """The span of each group's scores over the `present` rows; 0 to 0 in a group without any."""
    full = scores.detach().double()
    some = groups.reduce(present.double(), "max") > 0
    lowest = groups.reduce(full.where(present, torch.inf), "min").where(some, 0.0)
    highest = groups.reduce(full.where(present, -torch.inf), "max").where(some, 0.0)
    return ScoreSpan(lowest, highest, rounding(torch.maximum(lowest.abs(), highest.abs()), scores.dtype))


def equal_scores(scores: Rows, present: Bool[Tensor, " b"], groups: RowIds) -> Bool[Tensor, " b"]:
    """The rows whose group has equal scores [B] over its `present` rows, or no present row; bool [B].

    `groups` int64 [B], any ids in any order. Scores are equal if they differ by no more than 8 rounding errors of the
    group's largest.
    """
    return span(scores, present, group_rows(groups)).equal


class Centred(NamedTuple):
    """Scores relative to their group, each float64 [B]: the deviation from the group's mean, the group's unbiased std,
    and its number of rows."""

    deviation: Rows
    std: Rows
    rows: Rows


def centre(scores: Rows, present: Bool[Tensor, " b"], groups: Groups, weights: Tensor | None = None) -> Centred:
    """Deviations [B] from the (weighted) mean of the group over its `present` rows; 0 for the others.

    Scores are taken relative to the group's lowest, so that scores equal up to rounding give exactly 0, and so does the
    only row of a group.
    """
    within = span(scores, present, groups)
    above = (scores.detach().double() - within.lowest).where(present & ~within.equal, 0.0)
    weights = present.double() if weights is None else weights.double().where(present, 0.0)
    total = groups.reduce(weights, "sum")
    deviation = above - groups.reduce(above * weights, "sum") / total.where(total > 0, 1.0)
    deviation = deviation.where(present, 0.0)
    count = groups.reduce(present.double(), "sum")
    mean_square = groups.reduce(deviation.square(), "sum") / (count - 1).clamp(min=1)
    return Centred(deviation, mean_square.sqrt(), count)
