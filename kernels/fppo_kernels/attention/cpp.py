# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Packed attention in C++, sequence by sequence, without padding; for CPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fppo_kernels._cpp import call, check_shape, kind_of
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.padding import Lengths
from fppo_kernels.shapes import Float
from fppo_kernels.transforms import TwoPass, run

_PROGRAM = "attention/_sequences.cpp"


class PackedOptions(NamedTuple):
    """Non-tensor arguments of the operation."""

    numbers: tuple[int | float, ...]  # sequences, heads, heads of keys, widths, window, scale and soft cap
    lengths: Lengths
    key_lengths: Lengths | None


def _forward(
    options: PackedOptions, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[tuple[Tensor], tuple[Tensor]]:
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = query.new_empty(*query.shape[:2], value.shape[2])
    wide = torch.promote_types(query.dtype, torch.float32)
    of_sinks = None if sinks is None else sinks.to(wide).contiguous()
    log_sums = query.new_empty(query.shape[:2], dtype=wide)
    tensors = query, key, value, of_sinks, *_ends(options), out, log_sums
    call(_PROGRAM, f"forward_{kind_of(query)}", *tensors, *options.numbers)
    return (out,), (log_sums,)


def _backward(
    options: PackedOptions,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    kept: tuple[Tensor, Tensor],
    grads: tuple[Tensor],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    (out, log_sums), sinks = kept, tensors[3]
    query, key, value, grad = (x.contiguous() for x in (*tensors[:3], grads[0]))
    dots = (grad.to(log_sums.dtype) * out.to(log_sums.dtype)).sum(-1)
    slopes = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    every = query, key, value, grad, log_sums, dots, *_ends(options), *slopes
    call(_PROGRAM, f"backward_{kind_of(query)}", *every, *options.numbers)
    of_sinks = None if sinks is None else -((sinks - log_sums).exp() * dots).sum(0).to(sinks.dtype)
    return *slopes, of_sinks


def _ends(options: PackedOptions) -> tuple[Tensor, Tensor]:
    return options.lengths.cu_seqlens.long(), (options.key_lengths or options.lengths).cu_seqlens.long()


def _definition(
    options: PackedOptions, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[Tensor]:
    *_, window, scale, softcap = options.numbers
    out = sdpa(
        query,
        key,
        value,
        lengths=options.lengths,
        scale=scale,
        window=int(window) or None,
        softcap=softcap or None,
        sinks=sinks,
        key_lengths=options.key_lengths,
    )
    return (out,)


_PASSES = TwoPass(forward=_forward, backward=_backward, definition=_definition, reads=(0,))


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
    """Compute `eager` in float32 or wider, rounded once. Derivatives beyond the first are those of `sdpa`.

    Threads divide the sequences and key heads among them. Raises ValueError for float16, mixed dtypes, and tensors that
    are not on the CPU.
    """
    kind_of(query, key, value)
    (heads, width), kv_heads, keys = query.shape[1:], key.shape[1], sum((key_lengths or lengths).lengths)
    check_shape("query", query, sum(lengths.lengths), heads // kv_heads * kv_heads, width)
    check_shape("key", key, keys, kv_heads, width)
    check_shape("value", value, keys, kv_heads, value.shape[2])
    check_shape("sinks", sinks, heads)
    sizes = len(lengths.lengths), query.shape[1], *key.shape[1:], value.shape[2]
    numbers = *sizes, window or 0, float(scale), float(softcap or 0.0)
    return run(_PASSES, PackedOptions(numbers, lengths, key_lengths), query, key, value, sinks)[0]
