"""The rows of a pass, for attention and for mixers with recurrent states.

transformers' own code of such mixers cannot see where rows end in a packed row, except with optional kernels. So rows
run separately, those of similar length together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import attrs
import torch
from torch import Tensor
from transformers import Cache

from fppo.models.seams import Attend, AttentionLayer
from fppo_kernels.attention.sdpa import batch_attention
from fppo_kernels.padding import Lengths, sent


class Mixer(Protocol):
    """A layer that mixes tokens by a recurrent state, as a linear attention or a Mamba layer does.

    `hidden` [B, S, H] are rows of tokens. `states` is the cache to continue from and to update; None: rows begin, and
    no state is kept. Returns the layer's outputs [B, S, ...].
    """

    def __call__(self, hidden: Tensor, states: Cache | None) -> Any: ...


class Carry(Protocol):
    """Run a mixer on the tokens of a call [B, S, H], row by row; implementations know the rows."""

    def __call__(self, mixer: Mixer, hidden: Tensor) -> Any: ...


@attrs.frozen
class RowWise:
    """An `attend` function, and the `carry` of recurrent states along the same rows."""

    attend: Attend
    carry: Carry

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        return self.attend(query, key, value, layer)


class RowGroup(NamedTuple):
    """Rows of a packed row that run together, padded on the right to the longest: [B, S] = `shape`."""

    tokens: Tensor  # [M]: indices in the packed row
    places: Tensor  # [M]: indices in [B * S]
    shape: tuple[int, int]
    rows: tuple[int, ...]


def grouped(lengths: Lengths, *, like: float) -> list[RowGroup]:
    """Group the rows of a packed row: each has at least `like` times the length of its group's longest."""
    sizes = lengths.lengths
    starts = [0, *accumulate(sizes)]
    groups: list[list[int]] = []
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        if not groups or sizes[row] < like * sizes[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    return [_group(sorted(rows), sizes, starts, lengths.cu_seqlens.device) for rows in groups]


def _group(rows: Sequence[int], sizes: Sequence[int], starts: Sequence[int], device: torch.device) -> RowGroup:
    width = max(sizes[row] for row in rows)
    tokens = torch.cat([torch.arange(starts[row], starts[row] + sizes[row]) for row in rows])
    places = torch.cat([torch.arange(i * width, i * width + sizes[row]) for i, row in enumerate(rows)])
    return RowGroup(sent(tokens, device), sent(places, device), (len(rows), width), tuple(rows))


def by_groups(groups: Sequence[RowGroup], hidden: Tensor, run: Callable[[int, Tensor], Any]) -> Any:
    """Call `run(number, rows)` on each group's rows [B, S, H] of a packed `hidden` [1, N, H]; outputs [1, N, ...]."""
    packed = hidden[0]
    outputs = []
    for number, (tokens, places, (count, width), _) in enumerate(groups):
        own = packed[tokens]
        padded = own.new_zeros(count * width, own.shape[1]).index_copy(0, places, own)
        outputs.append(
            _each(run(number, padded.view(count, width, -1)), lambda x, places=places: x.flatten(0, 1)[places])
        )
    tokens = torch.cat([group.tokens for group in groups])

    def join(*parts: Tensor) -> Tensor:
        every = torch.cat(parts)
        return every.new_zeros(len(packed), *every.shape[1:]).index_copy(0, tokens, every)[None]

    if isinstance(outputs[0], tuple):
        return tuple(join(*parts) for parts in zip(*outputs, strict=True))
    return join(*outputs)


def _each(outputs: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    return tuple(fn(x) for x in outputs) if isinstance(outputs, tuple) else fn(outputs)


class PackedRows:
    """The carry of states along the rows of a packed row, each from zero."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths, self._groups = lengths, None

    def __call__(self, mixer: Mixer, hidden: Tensor) -> Any:
        self._groups = self._groups or grouped(self._lengths, like=0.5)  # padding after a row has no effect on it
        return by_groups(self._groups, hidden, lambda _, rows: mixer(rows, None))


class PaddedRows:
    """The carry of states along padded rows, skipping the padding of `attention_mask` (bool [B, S]), each from zero."""

    def __init__(self, attention_mask: Tensor) -> None:
        self._mask = attention_mask.bool()

    def __call__(self, mixer: Mixer, hidden: Tensor) -> Any:
        order = (~self._mask).long().argsort(dim=1, stable=True)  # real tokens first
        rows, back = torch.arange(len(hidden), device=hidden.device)[:, None], order.argsort(dim=1)
        return _each(mixer(hidden[rows, order], None), lambda x: x[rows, back])


def packed_attention(attention: Callable[..., Tensor], lengths: Lengths) -> RowWise:
    """The `attend` of packed tokens, from an attention kernel over query [N, Hq, D] and the packed lengths."""

    def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        q, k, v = query.squeeze(0), key.squeeze(0), value.squeeze(0)
        _, scale, window, softcap, sinks = layer
        out = attention(q, k, v, lengths=lengths, scale=scale, window=window, softcap=softcap, sinks=sinks)
        return out.unsqueeze(0)

    return RowWise(attend, PackedRows(lengths))


def padded_attention(attention_mask: Tensor) -> RowWise:
    """The `attend` of padded rows, real tokens where `attention_mask` (bool [B, S]) is True; for tests and checks."""
    width = attention_mask.shape[1]
    place = torch.arange(width, device=attention_mask.device)
    distance = place[:, None] - place[None, :]
    # a padding token attends to itself, so that no softmax is empty
    visible = (attention_mask.bool()[:, None, :] & (distance >= 0)) | (distance == 0)

    def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        _, scale, window, softcap, sinks = layer
        mask = (visible if window is None else visible & (distance < window))[:, None]
        return batch_attention(query, key, value, scale=scale, softcap=softcap, sinks=sinks, mask=mask)

    return RowWise(attend, PaddedRows(attention_mask))
