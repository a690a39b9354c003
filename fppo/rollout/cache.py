"""A cache of keys and values of rows during generation, and attention that reads and writes it.

In a step all rows write the same column: prompts are left-padded in the cache, so a write is a copy into a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo.models.rows import packed_attention
from fppo.models.seams import Attend, AttentionLayer
from fppo_kernels.padding import Lengths, sent
from fppo_kernels.table import takes_spans

Integers = np.ndarray[Any, np.dtype[np.int64]]

# keys and values [R, Hkv, C, D] by the index of the attention call in a pass (a layer may call twice); some of the
# C columns may be unwritten
Layers = dict[int, tuple[Tensor, Tensor]]


def prefill_attention(
    attention: Callable[..., Tensor], lengths: Lengths, stored: Layers, calls: list[AttentionLayer]
) -> Attend:
    """Make an `attend` for one pass over packed prompts. Each call stores its keys and values [N, Hkv, D] in `stored`,
    and its arguments `layer` in `calls`."""
    attend_packed = packed_attention(attention, lengths)

    def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        stored[len(stored)] = key.squeeze(0), value.squeeze(0)
        calls.append(layer)
        return attend_packed(query, key, value, layer)

    return attend


def row_bytes(like: Layers, columns: int) -> int:
    """Bytes of `columns` columns of one row, for layers with the heads and widths of `like`, [N, Hkv, D] each."""
    return columns * sum(x[0].numel() * x.element_size() for pair in like.values() for x in pair)


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
        return attention(query[:, 0], keys, values, bias, start=start, end=end, **layer.numbers)[:, None]

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
        return attention(query[:, 0], keys, values, bias, start=0, end=columns, **layer.numbers)[:, None]

    return attend


class _Turn(NamedTuple):
    """The tokens of a pass with the same number in their rows."""

    tokens: Tensor  # int64 [r]: their places in the pass
    rows: Tensor | None  # int64 [r]; None: all rows, in order
    columns: Integers  # [R]: the last column that each row sees


class PassPlaces:
    """The columns of a pass over `counts` (>= 1) tokens of each of R rows, laid end to end: those of row r follow one
    another from column `ends`[r] on. A row's tokens begin after `pads` columns."""

    def __init__(self, pads: Integers, ends: Integers, counts: Integers, device: torch.device) -> None:
        rows, places = np.repeat(np.arange(len(counts)), counts), np.arange(counts.sum())
        self._counts, self._ends, self._begins = counts, ends, counts.cumsum() - counts
        self._pads, self._device = pads, device
        self.row_numbers, self.column_numbers = rows, ends[rows] + places - self._begins[rows]
        self.rows, self.columns = self._sent(rows), self._sent(self.column_numbers)

    @cached_property
    def turns(self) -> Sequence[_Turn]:
        """The first token of each row, then the second of those that have one, and so on."""
        found, counts = list[_Turn](), self._counts
        for number in range(counts.max()):
            own = np.flatnonzero(counts > number)
            rows = None if len(own) == len(counts) else self._sent(own)
            every = self._ends + np.minimum(number, counts - 1)
            found.append(_Turn(self._sent(self._begins[own] + number), rows, every))
        return found

    def _sent(self, values: Integers) -> Tensor:
        return sent(torch.from_numpy(np.ascontiguousarray(values)), self._device)

    def spans(self, window: int | None) -> Tensor:
        """Each token's row, the first column that it sees, and the end of the last one, int64 [N, 3]."""
        ends = self.column_numbers + 1
        starts = self._pads[self.row_numbers]
        starts = starts if window is None else np.maximum(starts, ends - window)
        return self._sent(np.stack([self.row_numbers, starts, ends], 1))

    def turn_spans(self, window: int | None, cache: Layers) -> Sequence[tuple[int, int, Tensor | None]]:
        """For each turn the first column that any row sees, the end of the last one, and the bias [R, C] that hides
        others; None if all rows see the same."""
        found, columns = list[tuple[int, int, Tensor | None]](), next(iter(cache.values()))[0].shape[2]
        for turn in self.turns:
            ends = turn.columns + 1
            starts = self._pads if window is None else np.maximum(self._pads, ends - window)
            first, end, bias = int(starts.min()), int(ends.max()), None
            if first < starts.max() or ends.min() < end:
                places = torch.arange(columns, device=self._device)
                bias = bias_of((places < self._sent(starts)[:, None]) | (places >= self._sent(ends)[:, None]), cache)
            found.append((first, end, bias))
        return found


def pass_attention(attention: Callable[..., Tensor], cache: Layers, places: PassPlaces) -> Attend:
    """An `attend` for one pass over several tokens of each row, each as a row of one token [N, 1, H, D]: it writes
    their keys and values to their columns, and each token reads its row's columns up to its own."""
    attend_tokens = _by_spans(attention, places) if takes_spans(attention) else _by_turns(attention, cache, places)
    calls = count()

    def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        keys, values = cache[next(calls)]
        keys[places.rows, :, places.columns] = key[:, 0]
        values[places.rows, :, places.columns] = value[:, 0]
        return attend_tokens(query[:, 0], keys, values, layer)[:, None]

    return attend


_AttendTokens = Callable[[Tensor, Tensor, Tensor, AttentionLayer], Tensor]


def _by_spans(attention: Callable[..., Tensor], places: PassPlaces) -> _AttendTokens:
    """Attention of a pass by a kernel in which queries share rows."""
    spans, end = dict[int | None, Tensor](), int(places.column_numbers.max()) + 1

    def attend(query: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer) -> Tensor:
        if layer.window not in spans:
            spans[layer.window] = places.spans(layer.window)
        return attention(query, keys, values, start=0, end=end, spans=spans[layer.window], **layer.numbers)

    return attend


def _by_turns(attention: Callable[..., Tensor], cache: Layers, places: PassPlaces) -> _AttendTokens:
    """Attention of a pass by a kernel for one query per row."""
    spans = dict[int | None, Sequence[tuple[int, int, Tensor | None]]]()

    def attend(query: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer) -> Tensor:
        if layer.window not in spans:
            spans[layer.window] = places.turn_spans(layer.window, cache)
        out = query.new_empty(*query.shape[:2], values.shape[3])
        for (tokens, rows, _), (start, end, bias) in zip(places.turns, spans[layer.window], strict=True):
            own = query[tokens]
            if rows is not None:  # other rows read along, and nobody reads what they get
                own = query.new_zeros(len(keys), *own.shape[1:]).index_copy_(0, rows, own)
            mixed = attention(own, keys, values, bias, start=start, end=end, **layer.numbers)
            out[tokens] = mixed if rows is None else mixed[rows]
        return out

    return attend
