"""Packed attention by the flash-attn package (Dao, 2023, FlashAttention-2)."""

from __future__ import annotations

import torch
from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
from torch import Tensor

from fppo_kernels.padding import Lengths
from fppo_kernels.shapes import Float

MAX_HEAD_DIM = 256


def flash(
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
    """`sdpa` for float16 and bfloat16 on CUDA, without sinks, and with heads of one size for queries and values.

    Raises ValueError for anything else.
    """
    if sinks is not None:
        raise ValueError("attention/flash has no sinks; attention/sdpa, attention/eager and attention/flex have")
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"attention/flash computes in float16 and bfloat16, not {query.dtype}; attention/sdpa does")
    if query.shape[-1] > MAX_HEAD_DIM or value.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"attention/flash takes heads of one size up to {MAX_HEAD_DIM}, got {query.shape[-1]} and "
            f"{value.shape[-1]}; attention/sdpa takes any"
        )
    if not len(query):
        return query + value.sum() * 0  # the kernel fails for empty input
    left = -1 if window is None else window - 1
    keys = lengths if key_lengths is None else key_lengths
    return flash_attn_varlen_func(  # pyright: ignore[reportUnknownVariableType]
        query,
        key,
        value,
        lengths.cu_seqlens,
        keys.cu_seqlens,
        lengths.max_length,
        keys.max_length,
        softmax_scale=scale,
        causal=True,  # the last query sees the last key
        window_size=(left, 0 if window is not None else -1),
        softcap=softcap or 0.0,
        deterministic=True,
    )
