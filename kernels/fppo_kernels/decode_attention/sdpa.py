"""Decode attention by torch's scaled_dot_product_attention."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fppo_kernels.decode_attention.eager import eager
from fppo_kernels.shapes import Float


def sdpa(
    query: Float[Tensor, "r q d"],
    keys: Float[Tensor, "r k c d"],
    values: Float[Tensor, "r k c e"],
    bias: Float[Tensor, "r c"] | None = None,
    *,
    start: int,
    end: int,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " q"] | None = None,
) -> Float[Tensor, "r q e"]:
    """Compute `eager` in one call of torch's function; with soft cap or sinks, which torch lacks, by `eager` itself."""
    if softcap is not None or sinks is not None:
        return eager(query, keys, values, bias, start=start, end=end, scale=scale, softcap=softcap, sinks=sinks)
    # a group's heads as several queries: keys and values are read once, and not repeated
    folded = query.reshape(len(query), keys.shape[1], -1, query.shape[2])
    mask = None if bias is None else bias[:, None, None, start:end].expand(-1, -1, folded.shape[2], -1)
    part, of_part = keys.narrow(2, start, end - start), values.narrow(2, start, end - start)
    out = F.scaled_dot_product_attention(folded, part, of_part, attn_mask=mask, scale=scale)
    return out.reshape(*query.shape[:2], values.shape[3])
