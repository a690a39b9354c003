# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Rotary positions by a program in C++: one pass over the heads forward, and one back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fppo_kernels._cpp import call, kind_of
from fppo_kernels.shapes import Float


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x = x.contiguous()
    out, (heads, width) = torch.empty_like(x), x.shape[-2:]
    call("rotary/_heads.cpp", f"turn_{kind_of(x)}", x, cos, sin, out, cos.numel() // width, heads, width, sign)
    return out


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turn(query, cos, sin, 1.0), _turn(key, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *(_turn(grad, cos, sin, -1.0) for grad in grads), None, None


def cpp(
    query: Float[Tensor, "*rows q d"],
    key: Float[Tensor, "*rows k d"],
    cos: Float[Tensor, "*rows d"],
    sin: Float[Tensor, "*rows d"],
) -> tuple[Float[Tensor, "*rows q d"], Float[Tensor, "*rows k d"]]:
    """`eager` in one pass, in float32 or wider and rounded once. It has first derivatives only.

    Raises ValueError for float16, several dtypes, and tensors that are not on the CPU.
    """
    kind_of(query, key, cos, sin)
    shape = query.shape[:-2] + cos.shape[-1:]
    return _Turn.apply(query, key, *(x.expand(shape).contiguous() for x in (cos, sin)))
