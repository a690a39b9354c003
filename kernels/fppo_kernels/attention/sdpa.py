# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Packed attention by torch's scaled_dot_product_attention, with one call for all sequences of similar length and
equally many earlier keys."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from fppo_kernels.attention.eager import masked_attention
from fppo_kernels.padding import Lengths, sent
from fppo_kernels.shapes import Bool, Float
from fppo_kernels.transforms import active, stacked

FULL, SPARE = 0.95, 16  # a sequence joins longer ones if it has 0.95 of their length, or is 16 shorter


def for_any_shape(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which scaled_dot_product_attention does not use cuDNN's kernel.

    That kernel plans every new shape for tenths of a second, and ragged rows nearly always have a new shape. No-op if
    it is disabled already.
    """
    flags = torch.backends.cuda
    if device.type != "cuda" or not flags.cudnn_sdp_enabled():
        return nullcontext()
    others = (
        (SDPBackend.FLASH_ATTENTION, flags.flash_sdp_enabled),
        (SDPBackend.EFFICIENT_ATTENTION, flags.mem_efficient_sdp_enabled),
        (SDPBackend.MATH, flags.math_sdp_enabled),
    )
    return sdpa_kernel([backend for backend, enabled in others if enabled()])


def causal_mask(length: int, keys: int, window: int | None, device: torch.device) -> Bool[Tensor, "l m"]:
    """A mask, bool [L, M]: True if a query (row), one of the last L of M tokens, may see a key (column): itself and at
    most `window` - 1 tokens before it."""
    distance = torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def batch_attention(
    query: Float[Tensor, "b l q d"],
    key: Float[Tensor, "b m k d"],
    value: Float[Tensor, "b m k e"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " q"] | None = None,
    mask: Bool[Tensor, " ..."] | None = None,
) -> Float[Tensor, "b l q e"]:
    """Causal attention [B, L, Hq, Dv] of query [B, L, Hq, D] (the last L of M tokens), key [B, M, Hkv, D] and value [B,
    M, Hkv, Dv], without padding.

    A `mask` (bool, broadcast to [B, Hq, L, M]) stands in for the causal one and its window. Under transforms of
    torch.func, one reverse pass excepted, it computes all scores at once.
    """
    length, keys = query.shape[1], key.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    by_hand = softcap is not None or sinks is not None or stacked()  # torch's kernels have only first derivatives
    if mask is None and (by_hand or (window is not None and window < keys)):
        mask = causal_mask(length, keys, window, query.device)
    if by_hand:
        assert mask is not None
        return masked_attention(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks).transpose(1, 2)
    if mask is None and length < keys:
        # GPU kernels have this mask built in; counters of operations cannot make a tensor of it
        mask = causal_lower_right(length, keys) if query.is_cuda else causal_mask(length, keys, None, query.device)
    with for_any_shape(query.device):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


def sdpa(
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
    """Attention [N, Hq, Dv] of packed query [N, Hq, D], key [M, Hkv, D], value [M, Hkv, Dv], causal per sequence.

    With `key_lengths` the queries are the last tokens of each sequence of keys.
    """
    seen = lengths if key_lengths is None else key_lengths
    if len(set(lengths.lengths)) == 1 and seen.lengths == lengths.lengths:
        rows = [x.view(-1, lengths.max_length, *x.shape[1:]) for x in (query, key, value)]
        return batch_attention(*rows, scale=scale, window=window, softcap=softcap, sinks=sinks).flatten(0, 1)
    if not len(query):
        return query.new_zeros(0, query.shape[1], value.shape[2]) + (query.sum() + key.sum() + value.sum()) * 0
    own, keys = _plans(lengths.lengths, seen.lengths, query.device)
    groups: list[tuple[Tensor, ...]] = [
        _gathered(x, plan.places, plan.slots).split(plan.sizes)
        for x, plan in ((query, own), (key, keys), (value, keys))
    ]
    outputs: list[Tensor] = []
    for (count, _), *group in zip(own.shapes, *groups, strict=True):
        batch = [x.view(count, -1, *x.shape[1:]) for x in group]
        outputs.append(batch_attention(*batch, scale=scale, window=window, softcap=softcap, sinks=sinks).flatten(0, 1))
    return _gathered(torch.cat(outputs), own.slots, own.places, own.real)


def _gathered(x: Tensor, index: Tensor, back: Tensor, real: Tensor | None = None) -> Tensor:
    """Index rows: x[index]; `back` and `real` are for the gradient, see `_GatheredRows`."""
    return x.index_select(0, index) if active() else _GatheredRows.apply(x, index, back, real)


class _GatheredRows(torch.autograd.Function):
    """Index rows, x[index], with an inverse index `back`: the gradient is gathered, where autograd would scatter and
    add.

    `real`, unless None, marks the rows of `x` that are used at all.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, real: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, real)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back, real = ctx.saved_tensors
        grad = grads[0].index_select(0, back)
        return grad if real is None else grad.where(real[:, None, None], 0.0), None, None, None


class _Plan(NamedTuple):
    """N packed tokens as groups of equally long rows, M tokens in all with padding."""

    shapes: list[tuple[int, int]]  # rows and tokens per row of each group
    places: Tensor  # [M]: the index of each token; padding repeats its row's first token
    real: Tensor  # bool [M]: False for padding
    slots: Tensor  # [N]: the index of each token among the M

    @property
    def sizes(self) -> list[int]:
        return [count * longest for count, longest in self.shapes]


def _plans(lengths: tuple[int, ...], seen: tuple[int, ...], device: torch.device) -> tuple[_Plan, _Plan]:
    """Plans for queries (the last tokens of their sequences) and for keys; `seen` are the keys' lengths."""
    before = [count - size for size, count in zip(lengths, seen, strict=True)]
    groups = _groups(lengths, before)
    own = _plan(lengths, groups, device)
    return own, own if seen == lengths else _plan(seen, groups, device)


def _plan(lengths: Sequence[int], groups: Sequence[Sequence[int]], device: torch.device) -> _Plan:
    """Plan sequences of these lengths in groups of sequence indices."""
    begins = [0, *itertools.accumulate(lengths)]
    shapes: list[tuple[int, int]] = []
    places: list[Tensor] = []
    reals: list[Tensor] = []
    for group in groups:
        sizes = [lengths[number] for number in group]
        begin, step = torch.tensor([begins[number] for number in group])[:, None], torch.arange(max(sizes))
        real = step < torch.tensor(sizes)[:, None]
        places.append((begin + step.where(real, 0)).flatten())  # no token attends to padding
        reals.append(real.flatten())
        shapes.append((len(group), max(sizes)))
    place, real = torch.cat(places), torch.cat(reals)
    slots = real.nonzero().flatten()[place[real].argsort()]
    return _Plan(shapes, *(sent(x, device) for x in (place, real, slots)))


def _groups(lengths: Sequence[int], before: Sequence[int]) -> list[list[int]]:
    """Group the indices of sequences with similar length and equally many earlier keys."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda i: (before[i], -lengths[i])):
        first = groups[-1][0] if groups else number
        longest, size = lengths[first], lengths[number]
        if not groups or before[number] != before[first] or size < min(FULL * longest, longest - SPARE):
            groups.append([])
        groups[-1].append(number)
    return groups
