"""Packed attention by FlexAttention: one compiled kernel that skips blocks of other sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from fppo_kernels.padding import Lengths


@functools.cache
def _compiled() -> Callable:
    return torch.compile(flex_attention, dynamic=True)


@functools.lru_cache(maxsize=8)  # every layer of a model asks for the same one or two
def _mask(lengths: tuple[int, ...], window: int | None, device: torch.device) -> BlockMask:
    total = sum(lengths)
    sizes = torch.tensor(lengths, device=device)
    sequence = torch.arange(len(lengths), device=device).repeat_interleave(sizes)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = (sequence[query] == sequence[key]) & (query >= key)
        return inside if window is None else inside & (query - key < window)

    return create_block_mask(seen, None, None, total, total, device=device)


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    lengths: Lengths,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`sdpa` by FlexAttention. On a CPU it runs uncompiled and has no backward pass: good for a look at the values."""
    if not len(query):
        return query.new_zeros(0, query.shape[1], value.shape[2]) + (query.sum() + key.sum() + value.sum()) * 0
    mask = _mask(lengths.lengths, window, query.device)

    def cap(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)  # type: ignore[operator]

    attend = _compiled() if query.is_cuda else flex_attention
    out, aux = attend(
        *(x.transpose(0, 1)[None] for x in (query, key, value)),
        score_mod=None if softcap is None else cap,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:  # exp(sink) joins the sum of exponentials
        out = out * torch.sigmoid(aux.lse - sinks[:, None].to(aux.lse)).to(out.dtype)[..., None]  # type: ignore[operator]
    return out[0].transpose(0, 1)
