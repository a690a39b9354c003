# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The gated activation by a program in C++: one pass over the numbers forward, and one back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fppo_kernels._cpp import call, kind_of
from fppo_kernels.glu.eager import ACTIVATIONS
from fppo_kernels.shapes import Float

_FILE = "glu/_numbers.cpp"


def _forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    out = torch.empty_like(gate)
    call(_FILE, f"{activation}_forward_{kind_of(gate)}", gate, up, out, gate.numel())
    return out


class _CppGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _forward(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        tensors = gate, up, grad.contiguous(), torch.empty_like(gate), torch.empty_like(up)
        call(_FILE, f"{ctx.activation}_backward_{kind_of(gate)}", *tensors, gate.numel())
        return tensors[3], tensors[4], None


def cpp(
    gate: Float[Tensor, "*rows h"], up: Float[Tensor, "*rows h"], *, activation: str = "silu"
) -> Float[Tensor, "*rows h"]:
    """`eager` in one pass, in float32 or wider and rounded once. It keeps `gate` and `up` alone for the pass back.

    It has first derivatives only. Raises ValueError for float16, two dtypes, tensors that are not on the CPU, and an
    activation that is not known.
    """
    kind_of(gate, up)
    if activation not in ACTIVATIONS:
        raise ValueError(f"glu/cpp has no activation {activation!r}; it has {list(ACTIVATIONS)}")
    return (_CppGlu.apply if torch.is_grad_enabled() else _forward)(gate.contiguous(), up.contiguous(), activation)
