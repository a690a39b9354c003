"""Reference implementations: dense masked attention, and packed attention with one block-diagonal mask."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo_kernels.padding import Lengths, sent
from fppo_kernels.shapes import Bool, Float


def masked_attention(
    query: Float[Tensor, "*batch q l d"],
    key: Float[Tensor, "*batch k s d"],
    value: Float[Tensor, "*batch k s e"],
    mask: Bool[Tensor, " ..."],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " q"] | None = None,
) -> Float[Tensor, "*batch q l e"]:
    """`softmax(query @ key.T * scale, where mask) @ value` over tensors [..., H, L, D]; all in float32 or wider.

    Query head h reads key head h // (Hq / Hkv). `softcap` c turns scores s to c * tanh(s / c) (Gemma 2). `sinks` [Hq]
    adds exp(sink) to the softmax's denominator (GPT-OSS). `mask` bool broadcasts to [..., Hq, L, Lk].
    """
    groups = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[-2]]
    return (weights @ value.to(wide)).to(query.dtype)


def _places(lengths: Lengths, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each packed token, the index of its sequence [N], and the number of tokens after it in the sequence [N]."""
    sizes = torch.tensor(lengths.lengths, dtype=torch.int64)
    sequence = torch.arange(len(sizes)).repeat_interleave(sizes)
    after = sizes.cumsum(0)[sequence] - 1 - torch.arange(len(sequence))
    return sent(sequence, device), sent(after, device)


def eager(
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
    """Attention [N, Hq, Dv] of packed query [N, Hq, D], key [M, Hkv, D], value [M, Hkv, Dv], causal in each sequence.

    With `window` w a token sees itself and the w - 1 tokens before it. `key_lengths` are the lengths of the sequences
    of keys, one for each sequence of queries and none shorter: the queries are the last tokens of each. None: they
    equal `lengths`.
    """
    sequence, after = _places(lengths, query.device)
    of_key, after_key = (sequence, after) if key_lengths is None else _places(key_lengths, query.device)
    distance = after_key[None, :] - after[:, None]
    mask = (sequence[:, None] == of_key[None, :]) & (distance >= 0)
    if window is not None:
        mask = mask & (distance < window)
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    return masked_attention(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks).transpose(0, 1)
