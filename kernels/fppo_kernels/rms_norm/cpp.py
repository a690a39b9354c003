# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The root-mean-square norm by a program in C++: one pass over the rows forward, and one back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fppo_kernels._cpp import call, kind_of
from fppo_kernels.shapes import Float

PARTS = 16  # of the rows, whose gradients by the weight are added up apart: so the number of threads changes no bit
_FILE = "rms_norm/_rows.cpp"


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm, the numbers that it is of, and what they were multiplied by."""
    scales = x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
    out, total = torch.empty_like(x), None if residual is None else torch.empty_like(x)
    tensors = x, residual, weight, out, total, scales
    call(_FILE, f"normalise_{kind_of(x)}", *tensors, *x.shape, float(eps), float(offset))
    return out, x if total is None else total, scales


class _CppNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        out, total, scales = _forward(x, residual, weight, eps, offset)
        ctx.save_for_backward(total, weight, scales)
        ctx.offset, ctx.added = offset, residual is not None
        ctx.set_materialize_grads(False)
        if residual is None:
            ctx.mark_non_differentiable(scales)
        return out, scales if residual is None else total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor | None, d_total: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, weight, scales = ctx.saved_tensors
        d_total = d_total.contiguous() if ctx.added and d_total is not None else None
        if grad is None:
            return d_total, d_total, None, None, None
        (rows, width), d_x = total.shape, torch.empty_like(total)
        parts = scales.new_zeros(PARTS, width) if ctx.needs_input_grad[2] else None
        tensors = total, weight, scales, grad.contiguous(), d_total, d_x, parts
        call(_FILE, f"differentiate_{kind_of(total)}", *tensors, rows, width, PARTS, float(ctx.offset))
        d_weight = None if parts is None else parts.sum(0).to(weight.dtype)
        return d_x, d_x if ctx.added else None, d_weight, None, None


def cpp(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, " h"], *, eps: float, offset: float = 0.0
) -> Float[Tensor, "*rows h"]:
    """`eager` in one pass over `x`, which it keeps, with a number per row, for one pass back.

    It has first derivatives only. Raises ValueError for float16, two dtypes, and tensors that are not on the CPU.
    """
    kind_of(x, weight)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    apply: Callable[..., tuple[Tensor, ...]] = _CppNorm.apply if torch.is_grad_enabled() else _forward
    return apply(rows, None, weight.contiguous(), eps, offset)[0].view(x.shape)


def add_cpp(
    x: Float[Tensor, "*rows h"],
    residual: Float[Tensor, "*rows h"],
    weight: Float[Tensor, " h"],
    *,
    eps: float,
    offset: float = 0.0,
) -> tuple[Float[Tensor, "*rows h"], Float[Tensor, "*rows h"]]:
    """`add_eager` as `cpp` is `eager`."""
    kind_of(x, residual, weight)
    rows, others = (each.reshape(-1, x.shape[-1]).contiguous() for each in (x, residual))
    apply: Callable[..., tuple[Tensor, ...]] = _CppNorm.apply if torch.is_grad_enabled() else _forward
    normed, total, *_ = apply(rows, others, weight.contiguous(), eps, offset)
    return normed.view(x.shape), total.view(x.shape)
