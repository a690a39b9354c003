"""A cache of keys and values of rows during generation, and attention that reads and writes it.

In a step all rows write the same column: prompts are left-padded in the cache, so a write is a copy into a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fppo.models.rows import packed_attention
from fppo.models.seams import Attend, AttentionLayer
from fppo_kernels.padding import Lengths

# keys and values [R, Hkv, C, D] by the index of the attention call in a pass (a layer may call twice); some of the
# C columns may be unwritten
Layers = dict[int, tuple[Tensor, Tensor]]


def prefill_attention(
    attention: Callable[..., Tensor], lengths: Lengths, kept: Layers, asked: list[AttentionLayer]
) -> Attend:
    """Make an `attend` for one pass over packed prompts. Each call stores its keys and values [N, Hkv, D] in `kept`,
    and its arguments `layer` in `asked`."""
    attend_packed = packed_attention(attention, lengths)

    def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        kept[len(kept)] = key.squeeze(0), value.squeeze(0)
        asked.append(layer)
        return attend_packed(query, key, value, layer)

    return attend


def allocate(like: Layers, rows: int, columns: int, *, zeroed: bool = False) -> Layers:
    """Allocate a cache for layers with the heads and widths of `like`, [N, Hkv, D] each. Attention that reads unwritten
    columns needs it `zeroed`."""
    return {i: tuple(_blank(x, (rows, x.shape[1], columns, x.shape[2]), zeroed) for x in kv) for i, kv in like.items()}  # type: ignore[misc]


def _blank(like: Tensor, shape: tuple[int, ...], zeroed: bool) -> Tensor:
    return like.new_zeros(shape) if zeroed else like.new_empty(shape)


def write_prompts_(cache: Layers, start: int, kept: Layers, index: Tensor, shape: tuple[int, int], n: int) -> None:
    """Write the packed keys and values `kept` of B prompts, `n` times each, to columns 0 to P of rows start, start + 1,
    ...

    `shape` is (B, P); packed token i stands at index[i] of the padded prompts [B, P], flattened. Padding becomes zero,
    and padding at the end of the packed row is dropped.
    """
    batch, width = shape
    for layer, pair in kept.items():
        for whole, x in zip(cache[layer], pair, strict=True):
            padded = x.new_zeros(batch * width, *x.shape[1:]).index_copy_(0, index, x[: len(index)])
            rows = padded.view(batch, 1, width, *x.shape[1:]).transpose(2, 3).expand(-1, n, -1, -1, -1)
            target = whole[start : start + batch * n, :, :width]
            target.unflatten(0, (batch, n)).copy_(rows)


def grow_(cache: Layers, used: int, columns: int, *, zeroed: bool = False) -> None:
    """Resize every layer of `cache` to `columns` columns. The first `used` are kept; new ones may be `zeroed`.

    Layers are resized one by one, so that the old and the new memory of all of them never exist at once.
    """

    def widen(x: Tensor) -> Tensor:
        wide = _blank(x, (*x.shape[:2], columns, x.shape[3]), zeroed)
        wide[:, :, :used].copy_(x[:, :, :used])
        return wide

    for layer, (keys, values) in cache.items():
        cache[layer] = widen(keys), widen(values)


def row_bytes(like: Layers, columns: int) -> int:
    """Bytes of `columns` columns of one row, for layers with the heads and widths of `like`, [N, Hkv, D] each."""
    return columns * sum(x[0].numel() * x.element_size() for pair in like.values() for x in pair)


def compact_(cache: Layers, holes: Tensor, moved: Tensor, rows: int, used: int) -> Layers:
    """Copy the rows `moved`, all beyond the first `rows`, over the rows `holes`, and return the first `rows` rows. Only
    the first `used` columns are copied."""

    def pack(x: Tensor) -> Tensor:
        written = x[:, :, :used]
        if len(holes):
            written.index_copy_(0, holes, written.index_select(0, moved))
        return x[:rows]

    return {layer: (pack(k), pack(v)) for layer, (k, v) in cache.items()}


def as_packed(attend: Attend, rows: int) -> Attend:
    """Adapt an `attend` for one token per row to one packed row: the tokens of all rows, then padding."""

    def attend_packed(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        query_rows, key_rows, value_rows = (x[0, :rows, None] for x in (query, key, value))
        out = attend(query_rows, key_rows, value_rows, layer)
        return F.pad(out, (0, 0, 0, 0, 0, 0, 0, query.shape[1] - rows)).transpose(0, 1)

    return attend_packed


def bias_of(hidden: Tensor, cache: Layers) -> Tensor:
    """The bias of attention scores [R, C], in the cache's dtype: -inf where `hidden`, bool [R, C], else 0."""
    kind = next((keys.dtype for keys, _ in cache.values()), torch.float32)  # unused without attention
    return torch.zeros(hidden.shape, dtype=kind, device=hidden.device).masked_fill_(hidden, -torch.inf)


def decode_attention(
    attention: Callable[..., Tensor], cache: Layers, column: int, first: int, bias: Tensor | None
) -> Attend:
    """An `attend` for one pass with one token per row: it writes key and value to `column`, and reads columns from
    `first` on.

    `bias` [R, C] is -inf at padding; None if no row has padding from `first` on. Since all rows are at the same column,
    a window is a range of columns.
    """
    end, calls = column + 1, count()

    def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        keys, values = cache[next(calls)]
        keys.select(2, column).copy_(key.squeeze(1))
        values.select(2, column).copy_(value.squeeze(1))
        start = first if layer.window is None else max(first, end - layer.window)
        return attention(query[:, 0], keys, values, bias, start=start, end=end, **_numbers(layer))[:, None]

    return attend


def fixed_attention(attention: Callable[..., Tensor], cache: Layers, column: Tensor, pads: Tensor) -> Attend:
    """`decode_attention` with the same operations at every column: it reads all columns, and masks each row's padding,
    the first `pads` columns (int64 [R, 1]), and everything after `column` (int64 [1])."""
    calls, columns = count(), next(iter(cache.values()))[0].shape[2]
    places = torch.arange(columns, device=column.device)
    hidden = (places < pads) | (places > column)
    biases: dict[int | None, Tensor] = {}

    def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        keys, values = cache[next(calls)]
        keys.index_copy_(2, column, key.transpose(1, 2))
        values.index_copy_(2, column, value.transpose(1, 2))
        if layer.window not in biases:
            beyond = hidden if layer.window is None else hidden | (places <= column - layer.window)
            biases[layer.window] = bias_of(beyond, cache)
        bias = biases[layer.window]
        return attention(query[:, 0], keys, values, bias, start=0, end=columns, **_numbers(layer))[:, None]

    return attend


def _numbers(layer: AttentionLayer) -> dict[str, Any]:
    return {"scale": layer.scale, "softcap": layer.softcap, "sinks": layer.sinks}
