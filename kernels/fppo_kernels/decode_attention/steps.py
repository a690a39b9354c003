"""Tokens of rows between the products of a decoder layer: three functions in C++, each in one call.

They compute what rotary/cpp, decode_attention/cpp, rms_norm/cpp and glu/cpp compute, bit for bit, without a gradient. A
small model spends more time on the calls of those kernels than in them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fppo_kernels._cpp import KINDS, call, kind_of
from fppo_kernels.shapes import Float, Int

DTYPES = frozenset(KINDS)


class StepColumns(NamedTuple):
    """The columns of a cache that a step writes and reads, and the rotations of positions 0, 1, ...

    Without `spans` a step runs a token of each row. Else it runs N tokens, each of which is written to the last column
    that it reads.
    """

    cos: Float[Tensor, "p d"]
    sin: Float[Tensor, "p d"]
    starts: Int[Tensor, " r"]  # int64; column - starts is a row's position
    column: int  # of the new token, or the last of all
    start: int = 0  # the first column that is read
    bias: Float[Tensor, "r c"] | None = None  # -inf at padding
    spans: Int[Tensor, "n 3"] | None = None  # int64; a token's row, its first column, and the end of its last one

    def behind(self, window: int | None) -> StepColumns:
        """These columns, of which only the last `window` are read."""
        if window is None:
            return self
        if self.spans is None:
            return self._replace(start=max(self.start, self.column + 1 - window))
        rows, firsts, ends = self.spans.unbind(1)
        return self._replace(spans=torch.stack([rows, firsts.maximum(ends - window), ends], 1))


def attend_step(
    heads: Float[Tensor, "n h d"],
    keys: Float[Tensor, "r k c d"],
    values: Float[Tensor, "r k c d"],
    where: StepColumns,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " q"] | None = None,
) -> Float[Tensor, "n e"]:
    """Rotate the queries and keys of `heads`, q queries, k keys and k values of each token; write keys and values to
    the cache; and return the attention of the queries to it, [N, q * D]. Raises ValueError for dtypes and devices that
    decode_attention/cpp does not take."""
    kind, (_, kv_heads, columns, width) = kind_of(heads, keys, values), keys.shape
    heads, tokens, queries = heads.contiguous(), len(heads), heads.shape[1] - 2 * kv_heads
    turned, out = heads.new_empty(2, tokens, queries * width).unbind()
    wide = None if sinks is None else sinks.to(torch.promote_types(heads.dtype, torch.float32)).contiguous()
    tensors = heads, where.cos, where.sin, where.starts, where.spans, keys, values, where.bias, wide, turned, out
    sizes = tokens, kv_heads, queries // kv_heads, columns, width, where.start, where.column
    call("decode_attention/_rows.cpp", f"step_{kind}", *tensors, *sizes, float(scale), float(softcap or 0.0))
    return out


def add_norm_step(
    x: Float[Tensor, "r h"], residual: Float[Tensor, "r h"] | None, weight: Float[Tensor, " h"], eps: float
) -> Float[Tensor, "r h"]:
    """Compute the root-mean-square norm of x + residual, and write the sum to `residual`; None: the norm of `x`."""
    x = x.contiguous()
    scales = x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
    out = torch.empty_like(x)
    tensors = x, residual, weight, out, residual, scales
    call("rms_norm/_rows.cpp", f"normalise_{kind_of(x)}", *tensors, *x.shape, float(eps), 0.0)
    return out


def glu_step(both: Float[Tensor, "r i"], activation: str) -> Float[Tensor, "r j"]:
    """Compute activation(gate) * up of rows that have gate and up side by side: [R, 2 J] -> [R, J]."""
    both, (rows, width) = both.contiguous(), both.shape
    out = both.new_empty(rows, width // 2)
    call("glu/_numbers.cpp", f"{activation}_rows_{kind_of(both)}", both, out, *out.shape)
    return out
