# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""The root-mean-square norm by one fused Triton program forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton as _triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from fppo_kernels.rms_norm._triton_kernels import backward_kernel, forward_kernel
from fppo_kernels.shapes import Float

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 1 << 16  # numbers of a row that one instance can hold
INSTANCES = 512  # of the backward program at most: each leaves a gradient of the weight


def _cut(width: int, **asked: bool) -> dict[str, Any]:
    """How many numbers an instance holds, by how many warps, and what else a program is compiled for."""
    block = _triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16), **asked}


class _TritonNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        out, scales = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
        total = x if residual is None else torch.empty_like(x)
        if rows:
            with torch.cuda.device_of(x):
                tensors = x, x if residual is None else residual, weight, out, total, scales
                settings = _cut(width, ADD=residual is not None)
                forward_kernel[(rows,)](*tensors, rows, width, eps, offset, **settings)
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
        x, weight, scales = ctx.saved_tensors
        if grad is None:
            return d_total, d_total, None, None, None
        rows, width = x.shape
        count, d_x, needed = max(1, min(rows, INSTANCES)), torch.empty_like(x), ctx.needs_input_grad[2]
        parts = x.new_zeros(count if needed else 0, width, dtype=torch.float32)
        add, grad = ctx.added and d_total is not None, grad.contiguous()
        tensors = x, weight, grad, d_total.contiguous() if d_total is not None and add else grad, scales, d_x, parts
        if rows:
            with torch.cuda.device_of(x):
                settings = _cut(width, WEIGHT=needed, ADD=add)
                backward_kernel[(count,)](*tensors, rows, width, ctx.offset, **settings)
        return d_x, d_x if ctx.added else None, parts.sum(0).to(weight.dtype) if needed else None, None, None


def triton(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, " h"], *, eps: float, offset: float = 0.0
) -> Float[Tensor, "*rows h"]:
    """`eager` in one pass over `x`, which it keeps, with a number per row, for one pass back.

    It has first derivatives only. Raises ValueError for float64 and for rows of more than 65,536 numbers.
    """
    _check("rms_norm", x, weight)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _TritonNorm.apply(rows, None, weight.contiguous(), eps, offset)[0].view(x.shape)


def add_triton(
    x: Float[Tensor, "*rows h"],
    residual: Float[Tensor, "*rows h"],
    weight: Float[Tensor, " h"],
    *,
    eps: float,
    offset: float = 0.0,
) -> tuple[Float[Tensor, "*rows h"], Float[Tensor, "*rows h"]]:
    """`add_eager` as `triton` is `eager`, with the same errors."""
    _check("add_rms_norm", x, weight)
    rows = (each.reshape(-1, x.shape[-1]).contiguous() for each in (x, residual))
    normed, total = _TritonNorm.apply(*rows, weight.contiguous(), eps, offset)
    return normed.view(x.shape), total.view(x.shape)


def _check(op: str, x: Tensor, weight: Tensor) -> None:
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise ValueError(
            f"{op}/triton takes float32, bfloat16 and float16, got {x.dtype} and {weight.dtype}; {op}/eager takes any"
        )
    if x.shape[-1] > WIDEST:
        raise ValueError(f"{op}/triton takes rows of at most {WIDEST} numbers, got {x.shape[-1]}")
