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


def _cut(width: int) -> dict[str, Any]:
    """How many numbers an instance holds, and by how many warps."""
    block = _triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        rows, width = x.shape
        out, scales = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
        if rows:
            with torch.cuda.device_of(x):
                forward_kernel[(rows,)](x, weight, out, scales, rows, width, eps, offset, **_cut(width))
        ctx.save_for_backward(x, weight, scales)
        ctx.offset = offset
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        rows, width = x.shape
        count, d_x, needed = max(1, min(rows, INSTANCES)), torch.empty_like(x), ctx.needs_input_grad[1]
        parts = x.new_zeros(count if needed else 0, width, dtype=torch.float32)
        tensors = x, weight, grad.contiguous(), scales, d_x, parts
        if rows:
            with torch.cuda.device_of(x):
                backward_kernel[(count,)](*tensors, rows, width, ctx.offset, WEIGHT=needed, **_cut(width))
        return d_x, parts.sum(0).to(weight.dtype) if needed else None, None, None


def triton(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, " h"], *, eps: float, offset: float = 0.0
) -> Float[Tensor, "*rows h"]:
    """`eager` in one pass over `x`, which it keeps, with a number per row, for one pass back.

    It has first derivatives only. Raises ValueError for float64 and for rows of more than 65,536 numbers.
    """
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise ValueError(
            f"rms_norm/triton takes float32, bfloat16 and float16, got {x.dtype} and {weight.dtype}; "
            "rms_norm/eager takes any"
        )
    if x.shape[-1] > WIDEST:
        raise ValueError(f"rms_norm/triton takes rows of at most {WIDEST} numbers, got {x.shape[-1]}")
    return _Norm.apply(x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous(), eps, offset).view(x.shape)
