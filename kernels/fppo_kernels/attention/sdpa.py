"""Packed attention by torch's scaled_dot_product_attention, one call for all sequences of about one length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fppo_kernels.attention.eager import masked_attention
from fppo_kernels.padding import Lengths

FULL, SPARE = 0.9, 16  # a sequence joins longer ones if it is at least 0.9 of the longest, or at most 16 tokens short


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """bool [L, L], True where a query (row) may see a key (column): itself and at most `window` - 1 before it."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def batch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Causal attention [B, L, Hq, Dv] of query [B, L, Hq, D], key [B, L, Hkv, D], value [B, L, Hkv, Dv], no padding.

    A given `mask` (bool, broadcast to [B, Hq, L, L]) stands in for the causal one and its window.
    """
    length = query.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if mask is None and (softcap is not None or sinks is not None or (window is not None and window < length)):
        mask = causal_mask(length, window, query.device)
    if softcap is not None or sinks is not None:
        assert mask is not None
        return masked_attention(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def sdpa(
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
    """Attention [N, Hq, Dv] of packed query [N, Hq, D], key [N, Hkv, D], value [N, Hkv, Dv], causal per sequence."""
    if len(set(lengths.lengths)) == 1:
        parts = [x.view(-1, lengths.max_length, *x.shape[1:]) for x in (query, key, value)]
        return batch_attention(*parts, scale=scale, window=window, softcap=softcap, sinks=sinks).flatten(0, 1)
    outputs, places = [], []
    for longest, begins, sizes in _groups(lengths.lengths):
        begin, size = (torch.tensor(x, device=query.device)[:, None] for x in (begins, sizes))
        step = torch.arange(longest, device=query.device)
        real = step < size
        place = begin + step.where(real, 0)  # what fills up a sequence comes after it, and no token looks that far
        parts = [x[place.flatten()].view(len(begins), longest, *x.shape[1:]) for x in (query, key, value)]
        out = batch_attention(*parts, scale=scale, window=window, softcap=softcap, sinks=sinks)
        outputs.append(out[real])
        places.append(place[real])
    if not outputs:
        return query.new_zeros(0, query.shape[1], value.shape[2])
    return torch.cat(outputs)[torch.argsort(torch.cat(places))]


def _groups(lengths: Sequence[int]) -> list[tuple[int, list[int], list[int]]]:
    """Sequences of about one length: the longest length, where each begins, and how long each is."""
    ends = list(itertools.accumulate(lengths))
    groups: list[tuple[int, list[int], list[int]]] = []
    for size, end in sorted(zip(lengths, ends, strict=True), key=lambda pair: -pair[0]):
        if not groups or size < min(FULL * groups[-1][0], groups[-1][0] - SPARE):
            groups.append((size, [], []))
        groups[-1][1].append(end - size)
        groups[-1][2].append(size)
    return groups
