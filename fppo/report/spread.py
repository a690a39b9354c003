"""Means over seeds with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import attrs

# the 0.975 quantiles of Student's t with 1, 2, ... degrees of freedom
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


@attrs.frozen
class Spread:
    """A mean, and half the width of its 95 % confidence interval (Student's t); nan where there is one number."""

    mean: float
    half: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if math.isnan(self.half) else f"{self.mean:.4f} ± {self.half:.4f}"


def spread(values: Sequence[float]) -> Spread:
    """The mean and confidence interval of independent draws. Raises ValueError for none."""
    if not values:
        raise ValueError("no numbers to take the mean of")
    if len(values) == 1:
        return Spread(values[0], math.nan, 1)
    degrees = len(values) - 1
    quantile = _STUDENT[degrees - 1] if degrees <= len(_STUDENT) else 1.96 + 2.5 / degrees
    return Spread(fmean(values), quantile * stdev(values) / math.sqrt(len(values)), len(values))
