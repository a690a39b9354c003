# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Packed attention by a program in C++, sequence by sequence, without padding; CPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fppo_kernels._cpp import call, kind_of
from fppo_kernels.padding import Lengths
from fppo_kernels.shapes import Float

_PROGRAM = "attention/_sequences.cpp"


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ends: Any, numbers: Any
    ) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out = query.new_empty(*query.shape[:2], value.shape[2])
        wide = torch.promote_types(query.dtype, torch.float32)
        of_sinks = None if sinks is None else sinks.to(wide).contiguous()
        log_sums = query.new_empty(query.shape[:2], dtype=wide)
        call(_PROGRAM, f"forward_{kind_of(query)}", query, key, value, of_sinks, *ends, out, log_sums, *numbers)
        ctx.save_for_backward(query, key, value, sinks, *ends, out, log_sums)
        ctx.numbers = numbers
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, sinks, ends, key_ends, out, log_sums = ctx.saved_tensors
        grad = grad.contiguous()
        dots = (grad.to(log_sums.dtype) * out.to(log_sums.dtype)).sum(-1)
        slopes = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        tensors = query, key, value, grad, log_sums, dots, ends, key_ends, *slopes
        call(_PROGRAM, f"backward_{kind_of(query)}", *tensors, *ctx.numbers)
        of_sinks = None if sinks is None else -((sinks - log_sums).exp() * dots).sum(0).to(sinks.dtype)
        return *slopes, of_sinks, None, None


def cpp(
    query: Float[Tensor, "n q d"],
    key: Float[Tensor, "m k d"],
    value: Float[Tensor, "m k e"],
    *,
    lengths: Lengths,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " q"] | None = None,
    key_lengths: Lengths | None = None,
) -> Float[Tensor, "n q e"]:
    """`eager` in float32 or wider, rounded once. It has first derivatives only.

    Threads share sequences and heads of keys out among themselves. Raises ValueError for float16, several dtypes, and
    tensors that are not on the CPU.
    """
    kind_of(query, key, value)
    sizes = len(lengths.lengths), query.shape[1], *key.shape[1:], value.shape[2]
    ends = lengths.cu_seqlens.long(), (key_lengths or lengths).cu_seqlens.long()
    numbers = *sizes, window or 0, float(scale), float(softcap or 0.0)
    return _Attention.apply(query, key, value, sinks, ends, numbers)
