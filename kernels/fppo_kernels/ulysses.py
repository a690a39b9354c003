# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Attention over a row whose tokens are spread over the ranks of an axis (DeepSpeed Ulysses, arXiv:2309.14509).

Each rank holds a slice of the packed row and all heads; two all-to-alls turn that into the whole row and a slice of the
heads, and back. Each rank's gradients of parameters are then its share: their sum over the axis is the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fppo_kernels import collectives
from fppo_kernels.collectives import Axis
from fppo_kernels.padding import Lengths
from fppo_kernels.shapes import Float


def slice_sequence(x: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Take this rank's slice, one of n equal ones along `dim`, of an `x` that all ranks hold.

    The gradient is this rank's share, zero outside the slice. Raises ValueError for a dimension that ranks do not
    divide.
    """
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"a row of {x.shape[dim]} tokens does not divide by {axis.size} ranks: pad it to a multiple of {axis.size}"
        )
    return x if axis.size == 1 else x.chunk(axis.size, dim)[axis.rank]


def gather_sequence(x: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Concatenate all ranks' slices along `dim`, on every rank: the inverse of `slice_sequence`.

    All ranks must compute the same from the result: each then holds the whole gradient, and the backward pass takes its
    own slice of it, without communication.
    """
    return x if axis.size == 1 else _Gather.apply(x, axis, dim % x.dim())  # type: ignore[return-value]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.where = axis, dim
        return collectives.all_gather(x, axis, dim=dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, dim = ctx.where
        return slice_sequence(grads[0], axis, dim=dim), None, None


def ulysses(
    attention: Callable[..., Tensor], axis: Axis, all_to_all: Callable[..., Tensor] = collectives.all_to_all
) -> Callable[..., Tensor]:
    """Adapt an attention kernel to slices [N / n, H, D] of a packed row whose tokens are sharded over `axis`.

    The result takes the lengths of the whole row of N tokens, and calls `attention` with the whole row and Hq / n query
    heads. Key heads that several ranks' query heads need are repeated. It raises ValueError if the ranks do not divide
    the query heads or the tokens. On an axis of one rank it is `attention` itself.
    """
    if axis.size == 1:
        return attention

    def sharded(
        query: Float[Tensor, "n q d"],
        key: Float[Tensor, "n k d"],
        value: Float[Tensor, "n k e"],
        *,
        lengths: Lengths,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Float[Tensor, " q"] | None = None,
    ) -> Float[Tensor, "n q e"]:
        _check(query, key, lengths, axis)
        key, value = _repeated(key, query.shape[1], axis), _repeated(value, query.shape[1], axis)
        # one collective for all three, each split into the ranks' heads
        slices = [x.reshape(len(x), axis.size, -1) for x in (query, key, value)]
        whole = all_to_all(torch.cat(slices, 2), axis, split_dim=1, concat_dim=0).squeeze(1)
        sizes = [(x.shape[1] // axis.size, x.shape[2]) for x in (query, key, value)]
        own: tuple[Tensor, ...] = whole.split([heads * width for heads, width in sizes], 1)
        q, k, v = (x.unflatten(1, size) for x, size in zip(own, sizes, strict=True))
        if sinks is not None:
            sinks = slice_sequence(sinks, axis)
        out = attention(q, k, v, lengths=lengths, scale=scale, window=window, softcap=softcap, sinks=sinks)
        return all_to_all(out, axis, split_dim=0, concat_dim=1)

    return sharded


def _check(query: Tensor, key: Tensor, lengths: Lengths, axis: Axis) -> None:
    heads, total = query.shape[1], sum(lengths.lengths)
    if heads % axis.size:
        raise ValueError(
            f"{heads} query heads do not divide by the {axis.size} ranks of the sequence axis: "
            f"use an axis whose size divides {heads}"
        )
    if heads % key.shape[1]:
        raise ValueError(f"{heads} query heads do not divide by {key.shape[1]} key heads")
    if total != len(query) * axis.size:
        raise ValueError(
            f"lengths are those of {total} tokens, but {axis.size} slices of {len(query)} hold "
            f"{len(query) * axis.size}: pad the row to a multiple of {axis.size}, the padding its last sequence"
        )


def _repeated(x: Tensor, query_heads: int, axis: Axis) -> Tensor:
    """Repeat heads of `x` [N, Hkv, D] where needed, so that slice r of its heads serves slice r of the query heads.

    A rank's query heads form runs that share a key head; the new group size is the longest run length that fits all.
    """
    group = query_heads // x.shape[1]
    run = math.gcd(group, query_heads // axis.size)
    if run == group:
        return x
    reads = torch.arange(0, query_heads, run, device=x.device) // group
    return x.index_select(1, reads)
