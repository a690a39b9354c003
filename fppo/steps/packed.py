"""Which tokens of a packed row a rank runs, and how they attend to those of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fppo import models
from fppo.models.flops import window_of_all
from fppo.models.model import Model
from fppo.models.seams import Attend
from fppo.runtime.mesh import Mesh
from fppo_kernels.collectives import Axis
from fppo_kernels.context import BLOCKS, deal, gathered_attention
from fppo_kernels.padding import Packed
from fppo_kernels.record import Kernels
from fppo_kernels.ring import ring_attention
from fppo_kernels.ulysses import gather_sequence, slice_sequence, ulysses


class Slice(NamedTuple):
    """A rank's tokens of a packed row of N, of which the ranks of one axis have different ones."""

    own: Callable[[Tensor], Tensor]  # of numbers of all tokens [N, ...] this rank's
    attend: Attend
    places: Tensor  # [N]: where each token of the row is among all ranks' tokens, one rank after the other


def cutting(mesh: Mesh) -> Axis:
    """The axis whose ranks have different tokens of a packed row."""
    return mesh["context"] if mesh["context"].size > 1 else mesh["sequence"]


def multiple(mesh: Mesh) -> int:
    """What a packed row is filled up to a multiple of, so that ranks have slices, or blocks, of equal size, which the
    tensor axis divides."""
    context = mesh["context"].size
    return mesh["sequence"].size * mesh["tensor"].size * (context * BLOCKS[-1] if context > 1 else 1)


def slice_of(packed: Packed, model: Model, kernels: Kernels, mesh: Mesh) -> Slice:
    """This rank's tokens of a packed row that is filled up: a slice of it, or what it is dealt on a context axis."""
    places = torch.arange(len(packed.tokens), device=packed.tokens.device)
    axis = cutting(mesh)
    own: Callable[[Tensor], Tensor] = partial(slice_sequence, axis=axis)
    if mesh["context"].size == 1:
        attention = ulysses(kernels.attention, axis, kernels.all_to_all)
    else:
        dealt = deal(packed.lengths.lengths, axis.size, window=window_of_all(model), device=places.device)
        wrap = ring_attention if mesh.ring else partial(gathered_attention, kernels.attention)
        attention, places, numbers = wrap(dealt, axis), dealt.back, dealt.places[axis.rank]
        own = lambda x: x[numbers]  # noqa: E731
    return Slice(own, models.packed_attention(attention, packed.lengths), places)


class Own(NamedTuple):
    """Which of M tokens of the packed row this rank has."""

    numbers: Tensor | slice  # among the M
    places: Tensor  # among this rank's


def own_tokens(tokens: Tensor, length: int, axis: Axis) -> Own:
    """Those of `tokens` (places among all ranks' tokens [M], one rank after the other) that this rank has, of `length`
    tokens."""
    if axis.size == 1:
        return Own(slice(None), tokens)
    places = tokens - axis.rank * length
    numbers = ((places >= 0) & (places < length)).nonzero().flatten()
    return Own(numbers, places[numbers])


def gathered(columns: Sequence[Tensor], own: Own, tokens: Tensor, length: int, axis: Axis) -> Sequence[Tensor]:
    """Numbers of this rank's tokens, [M, ...], as those of all `tokens` [M], on every rank, by one collective."""
    if axis.size == 1:
        return columns
    flat = [x.flatten(1) if x.dim() > 1 else x[:, None] for x in columns]
    stacked = torch.cat(flat, 1)
    slots = stacked.new_zeros(length, stacked.shape[1]).index_copy(0, own.places, stacked)
    whole = gather_sequence(slots, axis)[tokens].split([x.shape[1] for x in flat], 1)
    return [x.view(-1, *column.shape[1:]) for x, column in zip(whole, columns, strict=True)]
