"""Root-mean-square norms as in their formula."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fppo_kernels.shapes import Float


def eager(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, " h"], *, eps: float, offset: float = 0.0
) -> Float[Tensor, "*rows h"]:
    """Compute x / sqrt(mean(x^2) + eps) * (weight + offset), with the mean over the last dimension, in the dtype of
    `x`.

    The computation is in float32 or wider, rounded once. Models with this kernel call their own norms.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    numbers = x.to(wide)
    normed = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.to(wide) + offset)).to(x.dtype)


def add_eager(
    x: Float[Tensor, "*rows h"],
    residual: Float[Tensor, "*rows h"],
    weight: Float[Tensor, " h"],
    *,
    eps: float,
    offset: float = 0.0,
) -> tuple[Float[Tensor, "*rows h"], Float[Tensor, "*rows h"]]:
    """Compute the norm of x + residual, and return it with that sum, which is rounded before it is normalised.

    Models with this kernel add and call their own norms.
    """
    total = x + residual
    return eager(total, weight, eps=eps, offset=offset), total


class NormNumbers(NamedTuple):
    """Numbers of a norm: its epsilon and its offset."""

    eps: float
    offset: float


def norm_of(numbers: NormNumbers, x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, ...]:
    """The norm of `x`; with a residual the norm of x + residual, and the sum itself. For kernels that take derivatives
    of this definition."""
    if residual is None:
        return (eager(x, weight, eps=numbers.eps, offset=numbers.offset),)
    return add_eager(x, residual, weight, eps=numbers.eps, offset=numbers.offset)
