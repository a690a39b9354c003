"""The layer of linear/float8 in float64, from the definition of e4m3 instead of torch's casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fppo_kernels.shapes import Float

LARGEST, BITS, LEAST = 448.0, 3, -6  # e4m3: the largest number, the fraction's bits, the smallest exponent


def rounded(x: Tensor, *, by_row: bool = True) -> Tensor:
    """Round a float64 matrix to e4m3: each row, or the whole matrix, is multiplied by the largest power of two that
    keeps it within `LARGEST`, rounded with ties to even, and divided again."""
    top = x.abs().amax(-1, keepdim=True) if by_row else x.abs().amax()
    _, exponent = torch.frexp(LARGEST / top.where(top > 0, LARGEST))
    scale = torch.ldexp(torch.ones_like(top), exponent - 1)
    _, exponent = torch.frexp(x * scale)
    step = torch.ldexp(torch.ones_like(x), (exponent - 1).clamp(min=LEAST) - BITS)
    return (x * scale / step).round() * step / scale


def reference(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, "m h"], bias: Float[Tensor, " m"] | None = None
) -> Float[Tensor, "*rows m"]:
    """Compute the layer and its gradient (see fppo_kernels.linear.float8) for finite numbers, in float64."""
    return _ReferenceLinear.apply(x, weight, bias)  # type: ignore[return-value]


class _ReferenceLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = rounded(x) @ rounded(weight).t()
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        d_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return rounded(grad) @ rounded(weight, by_row=False), rows.t() @ x.flatten(0, -2), d_bias
