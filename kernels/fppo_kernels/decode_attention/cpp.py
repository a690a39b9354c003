"""Decode attention in C++: each head of a row reads its keys and values once."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo_kernels._cpp import call, check_shape, kind_of
from fppo_kernels.shapes import Float, Int


def cpp(
    query: Float[Tensor, "n q d"],
    keys: Float[Tensor, "r k c d"],
    values: Float[Tensor, "r k c e"],
    bias: Float[Tensor, "r c"] | None = None,
    *,
    start: int,
    end: int,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " q"] | None = None,
    spans: Int[Tensor, "n 3"] | None = None,
) -> Float[Tensor, "n q e"]:
    """Compute `eager` in float32 or wider, rounded once, without a gradient.

    Raises ValueError for float16, mixed dtypes, and tensors that are not on the CPU.
    """
    query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
    kind = kind_of(query, keys, values, *(() if bias is None else (bias,)))
    (tokens, heads, width), (rows, kv_heads, columns, value_width) = query.shape, values.shape
    check_shape("keys", keys, rows, kv_heads, columns, width)
    check_shape("query", query, rows if spans is None else tokens, heads // kv_heads * kv_heads, width)
    check_shape("bias", bias, rows, columns)
    check_shape("sinks", sinks, heads)
    check_shape("spans", spans, tokens, 3)
    if not 0 <= start <= end <= columns:
        raise ValueError(f"start = {start}, end = {end}: give columns of the {columns} that there are")
    out = query.new_empty(tokens, heads, value_width)
    wide = None if sinks is None else sinks.to(torch.promote_types(query.dtype, torch.float32)).contiguous()
    tensors = query, keys, values, None if bias is None else bias.contiguous(), wide, spans, out
    sizes = tokens, kv_heads, heads // kv_heads, columns, width, value_width, start, end
    call("decode_attention/_rows.cpp", f"attend_{kind}", *tensors, *sizes, float(scale), float(softcap or 0.0))
    return out
