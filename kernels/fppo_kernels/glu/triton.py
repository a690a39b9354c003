# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""The gated activation by one fused Triton program forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton as _triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from fppo_kernels.glu._triton_kernels import backward_kernel, forward_kernel
from fppo_kernels.glu.eager import ACTIVATIONS
from fppo_kernels.shapes import Float

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 1024


def _cut(count: int, activation: str) -> tuple[tuple[int], dict[str, Any]]:
    """The instances for so many numbers, and what they are compiled for."""
    return (_triton.cdiv(count, BLOCK),), {"KIND": activation, "BLOCK": BLOCK}


class _TritonGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        out, count = torch.empty_like(gate), gate.numel()
        grid, settings = _cut(count, activation)
        if count:
            with torch.cuda.device_of(gate):
                forward_kernel[grid](gate, up, out, count, **settings)
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        d_gate, d_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        grid, settings = _cut(count, ctx.activation)
        if count:
            with torch.cuda.device_of(gate):
                backward_kernel[grid](gate, up, grad.contiguous(), d_gate, d_up, count, **settings)
        return d_gate, d_up, None


def triton(
    gate: Float[Tensor, "*rows h"], up: Float[Tensor, "*rows h"], *, activation: str = "silu"
) -> Float[Tensor, "*rows h"]:
    """`eager` in one pass, in float32 and rounded once. It keeps `gate` and `up` alone for the pass back.

    It has first derivatives only. Raises ValueError for float64, two dtypes, and an activation that is not known.
    """
    if gate.dtype not in DTYPES or gate.dtype != up.dtype:
        raise ValueError(
            f"glu/triton takes float32, bfloat16 or float16, got {gate.dtype} and {up.dtype}; glu/eager takes any"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"glu/triton has no activation {activation!r}; it has {list(ACTIVATIONS)}")
    return _TritonGlu.apply(gate.contiguous(), up.contiguous(), activation)
