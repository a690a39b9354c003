"""Means and deviations over the tokens or rows of a batch that may be spread over ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fppo.metrics import Mean, Metrics, mean

AllReduce = Callable[[Tensor], Tensor]


def local(x: Tensor) -> Tensor:
    """The sum over ranks where there is one rank."""
    return x


def moments(x: Tensor, mask: Tensor, all_reduce: AllReduce) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and population variance of `x` where `mask` is True, over all ranks; 0-d float64, 0 if empty."""
    kept = x.detach().double().where(mask, 0.0)
    count, total = all_reduce(torch.stack([mask.sum().double(), kept.sum()]))
    middle = total / count.clamp(min=1)
    # a second pass: the mean of squares less the squared mean would cancel
    spread = all_reduce((kept - middle).square().where(mask, 0.0).sum())
    return count, middle, spread / count.clamp(min=1)


def deviation(x: Tensor, mask: Tensor, all_reduce: AllReduce, *, unbiased: bool = False) -> Mean:
    """The standard deviation over all ranks, 0 if there are fewer than two; equal on each, so the mean of it."""
    count, _, variance = moments(x, mask, all_reduce)
    if unbiased:
        variance = variance * count / (count - 1).clamp(min=1)
    return mean(variance.sqrt())


def prefixed(prefix: str, metrics: Metrics) -> Metrics:
    """The metrics with `prefix` before each name."""
    return {prefix + name: metric for name, metric in metrics.items()}
