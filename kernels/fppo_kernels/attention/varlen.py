"""Packed attention by torch's own variable-length flash attention."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from fppo_kernels.padding import Lengths
from fppo_kernels.shapes import Float

GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 may lack it


def varlen(
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
    """Compute `sdpa` for float16 and bfloat16 on CUDA, without soft caps and sinks. Raises ValueError otherwise.

    Like `sdpa`, its backward pass sums in a fixed order only under `torch.use_deterministic_algorithms`.
    """
    if softcap is not None or sinks is not None:
        what = "soft cap" if softcap is not None else "sinks"
        raise ValueError(f"attention/varlen has no {what}; attention/sdpa, attention/eager and attention/flex have")
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"attention/varlen computes in float16 and bfloat16, not {query.dtype}; attention/sdpa does")
    if not len(query):
        return query + value.sum() * 0  # the kernel fails for empty input
    grouped: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if GROUPED:
            grouped = {"enable_gqa": True}
        else:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    keys = lengths if key_lengths is None else key_lengths
    ends, longest = (lengths.cu_seqlens, keys.cu_seqlens), (lengths.max_length, keys.max_length)
    left = -1 if window is None else window - 1
    return varlen_attn(  # type: ignore[return-value]
        query, key, value, *ends, *longest, scale=scale, window_size=(left, 0), **grouped
    )
