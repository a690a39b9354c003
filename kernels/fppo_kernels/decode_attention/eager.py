"""The reference implementation: masked attention over the columns that are read."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo_kernels.attention.eager import masked_attention
from fppo_kernels.shapes import Float, Int


def eager(
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
    """Attention [R, Hq, Dv] of one query per row [R, Hq, D] over columns start to end of the row's keys [R, Hkv, C, D]
    and values [R, Hkv, C, Dv].

    Other columns are not read. `bias` [R, C], in the dtype of the other tensors, is 0, or -inf at columns that the row
    does not see; each row sees at least one. The other keywords are those of `masked_attention`.

    With `spans` (int64 [N, 3], contiguous) query n reads a row of its own, and there columns of its own from a first to
    before a last one, all within `start` and `end`; there is no `bias` then. A kernel without this keyword checks
    drafted tokens of a row one after another.
    """
    if spans is not None:
        columns = torch.arange(keys.shape[2], device=keys.device)
        hidden = (columns < spans[:, 1:2]) | (columns >= spans[:, 2:])
        bias = torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, -torch.inf)
        keys, values = keys[spans[:, 0]], values[spans[:, 0]]
    part = keys[:, :, start:end]
    seen = query.new_ones(1, dtype=torch.bool) if bias is None else bias[:, None, None, start:end] == 0
    part_of_values, one = values[:, :, start:end], query[:, :, None]
    return masked_attention(one, part, part_of_values, seen, scale=scale, softcap=softcap, sinks=sinks)[:, :, 0]
