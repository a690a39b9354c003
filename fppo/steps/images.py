"""Images of the rows in a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fppo.batch import Column
from fppo.models.model import Model
from fppo.models.vision_pass import Images, place_images
from fppo.steps.packed import SharedRow, Slice, own_tokens
from fppo_kernels.collectives import Axis
from fppo_kernels.padding import Places


class _ImageRows(Protocol):
    @property
    def tokens(self) -> Tensor: ...
    @property
    def attention_mask(self) -> Tensor: ...


def packed_images(
    rows: _ImageRows,
    model: Model,
    tokens: Tensor,
    positions: Tensor,
    lengths: Sequence[int],
    shared: SharedRow | None = None,
) -> tuple[Images | None, Tensor]:
    """The images of a packed row [N] of `rows` with these `lengths` [B], and the positions of its tokens, [N] or [3,
    N]. If rows share tokens (`shared`), images among these occur once."""
    inputs: Column | None = getattr(rows, "inputs", None)
    if inputs is None:
        return None, positions
    if shared is None:
        return place_images(model, inputs, tokens, positions, lengths)
    every = shared.places  # indices of the tokens of all rows
    images, own = place_images(model, inputs, tokens[every], positions[every], shared.real.sizes)
    if images is None:
        return None, positions
    whole = positions.expand(*own.shape[:-1], -1).clone()
    whole[..., every] = own  # rows that share a token have the same position for it
    numbers = torch.full_like(tokens, -1)
    numbers[every[images.places]] = images.numbers  # and the same feature
    places = (numbers >= 0).nonzero().flatten()
    return images._replace(numbers=numbers[places], places=places), whole


def own_images(images: Images, positions: Tensor, part: Slice, axis: Axis) -> tuple[Images, Tensor]:
    """The images in this rank's `part` of a packed row that is cut over the axis, and the positions of its tokens,
    given all `positions` [N] or [3, N]. With several ranks it waits for the device."""
    if axis.size == 1:
        return images, positions
    own = own_tokens(part.places[images.places], len(part.places) // axis.size, axis)
    order = own.places.argsort()
    numbers = images.numbers[own.numbers][order]
    columns = part.own(positions.movedim(-1, 0)).movedim(0, -1)
    return images._replace(numbers=numbers, places=own.places[order]), columns


def padded_images(rows: _ImageRows, model: Model, positions: Tensor, real: Places) -> tuple[Images | None, Tensor]:
    """The images in padded rows with tokens at the `real` places, and the positions of their tokens: `positions` are
    [B, S], the result [B, S] or [3, B, S]."""
    if getattr(rows, "inputs", None) is None:
        return None, positions
    index, sizes, _ = real
    images, own = packed_images(rows, model, rows.tokens.flatten()[index], positions.flatten()[index], sizes)
    if images is None:
        return None, positions
    whole = positions.flatten().expand(*own.shape[:-1], -1).clone()
    whole[..., index] = own
    return images._replace(places=index[images.places]), whole.unflatten(-1, positions.shape)
