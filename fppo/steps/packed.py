"""Where the tokens of a pass are, known on the host, which of them a rank runs, and how they attend to others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import attrs
import torch
from torch import Tensor

from fppo import models
from fppo.models.flops import window_of_all
from fppo.models.model import Model
from fppo.models.seams import Attend
from fppo.runtime.mesh import Mesh
from fppo.shapes import Mask
from fppo_kernels.collectives import Axis
from fppo_kernels.context import BLOCKS, Deal, deal, gathered_attention
from fppo_kernels.padding import Packed, Places, find_places, sent
from fppo_kernels.ring import ring_attention
from fppo_kernels.table import Kernels
from fppo_kernels.ulysses import gather_sequence, slice_sequence, ulysses

if TYPE_CHECKING:
    from fppo.steps.forward import Forward


class Slice(NamedTuple):
    """A rank's tokens of a packed row of N, of which the ranks of one axis have different ones."""

    own: Callable[[Tensor], Tensor]  # of numbers of all tokens [N, ...] this rank's
    attend: Attend
    places: Tensor  # [N]: where each token of the row is among all ranks' tokens, one rank after the other


class Masked(Protocol):
    """What is read of a record to know where its tokens are."""

    @property
    def attention_mask(self) -> Tensor: ...  # [B, S] bool
    @property
    def response_mask(self) -> Tensor: ...  # [B, T] bool


class Masks(NamedTuple):
    """The masks of rows, on the host."""

    attention: Mask  # [B, S]
    response: Mask  # [B, T]

    @property
    def lengths(self) -> list[int]:
        """The number of real tokens of each row."""
        return self.attention.sum(1).tolist()


def masks_of(rows: Masked) -> Masks:
    """Waits for the device, if the rows are on one."""
    return Masks(rows.attention_mask.cpu(), rows.response_mask.cpu())


def blank_masks(masks: Masks) -> Masks:
    """The masks of `ranks.blank`, a row of one token."""
    attention = masks.attention.new_zeros(1, masks.attention.shape[1])
    attention[:, -1:] = True
    return Masks(attention, masks.response.new_zeros(1, masks.response.shape[1]))


def cutting(mesh: Mesh) -> Axis:
    """The axis whose ranks have different tokens of a packed row."""
    return mesh["context"] if mesh["context"].size > 1 else mesh["sequence"]


def multiple(mesh: Mesh) -> int:
    """What a packed row is filled up to a multiple of, so that ranks have slices, or blocks, of equal size, which the
    tensor axis divides."""
    context = mesh["context"].size
    return mesh["sequence"].size * mesh["tensor"].size * (context * BLOCKS[-1] if context > 1 else 1)


class Own(NamedTuple):
    """Which of M tokens of the packed row this rank has."""

    numbers: Tensor | slice  # among the M
    places: Tensor  # among this rank's


@attrs.frozen(eq=False)
class Indices:
    """Where the tokens of some rows are, for a pass over them that need not wait for the device to know it.

    It is of the rows that have the two masks, on a mesh; `packed` or as they are. Places are on the rows' device.
    """

    attention_mask: Tensor  # [B, S]
    response_mask: Tensor  # [B, T]
    mesh: Mesh
    packed: bool
    real: Places
    responses: Tensor  # [M]: the response tokens, in [B * T]
    before: Tensor  # [M]: the token before each, among all ranks' tokens, one rank after the other
    own: Own  # of these
    length: int  # of this rank's slice of the row, between blocks
    dealt: Deal | None  # of the packed row, on a context axis

    def of(self, rows: Masked, mesh: Mesh, packed: bool) -> bool:
        """Whether it is of these very rows, on this mesh, packed or not."""
        same = self.attention_mask is rows.attention_mask and self.response_mask is rows.response_mask
        return same and self.mesh is mesh and self.packed == packed


def find_indices(rows: Masked, masks: Masks, model: Model, mesh: Mesh, *, packed: bool) -> Indices:
    """Where the tokens of rows with these masks are, by work on the host alone."""
    (count, width), length, device = masks.attention.shape, masks.response.shape[1], rows.attention_mask.device
    index = masks.response.flatten().nonzero().flatten()
    before = index + (index // max(length, 1) + 1) * (width - length) - 1
    real, total, dealt, axis = find_places(masks.attention), count * width, None, cutting(mesh)
    if packed:
        total = -(-sum(real.sizes) // multiple(mesh)) * multiple(mesh)
        order = torch.arange(total)
        if mesh["context"].size > 1:
            sizes = [size for size in (*real.sizes, total - sum(real.sizes)) if size]
            dealt = deal(sizes, axis.size, window=window_of_all(model))
            order = dealt.back
            dealt = dealt._replace(places=tuple(sent(x, device) for x in dealt.places), back=sent(order, device))
        before = order[(masks.attention.flatten().cumsum(0) - 1)[before + 1] - 1]
    own = own_tokens(before, total // axis.size, axis)
    numbers = own.numbers if isinstance(own.numbers, slice) else sent(own.numbers, device)
    return Indices(
        attention_mask=rows.attention_mask,
        response_mask=rows.response_mask,
        mesh=mesh,
        packed=packed,
        real=real._replace(index=sent(real.index, device)),
        responses=sent(index, device),
        before=sent(before, device),
        own=Own(numbers, sent(own.places, device)),
        length=total // (axis.size * mesh["tensor"].size),
        dealt=dealt,
    )


class Indexed(NamedTuple):
    """The rows of a pass, where their tokens are, and their masks."""

    rows: Any
    indices: Indices
    masks: Masks

    def on(self, forward: Forward) -> Forward:
        """What runs the model on them."""
        return attrs.evolve(forward, indices=self.indices)


def indexed(rows: Masked, masks: Masks, forward: Forward) -> Indexed:
    """Rows that have these masks, for passes of a forward."""
    indices = find_indices(rows, masks, forward.model, forward.mesh, packed=forward.remove_padding)
    return Indexed(rows, indices, masks)


def indices_of(rows: Masked, forward: Forward) -> Indices:
    """The indices that the forward has, if they are of these rows; else new ones, for which the host may wait."""
    known = forward.indices
    if known is not None and known.of(rows, forward.mesh, forward.remove_padding):
        return known
    return indexed(rows, masks_of(rows), forward).indices


def slice_of(packed: Packed, kernels: Kernels, mesh: Mesh, dealt: Deal | None) -> Slice:
    """This rank's tokens of a packed row that is filled up: a slice of it, or what it is `dealt` on a context axis."""
    places = torch.arange(len(packed.tokens), device=packed.tokens.device)
    axis = cutting(mesh)
    own: Callable[[Tensor], Tensor] = partial(slice_sequence, axis=axis)
    if dealt is None:
        attention = ulysses(kernels.attention, axis, kernels.all_to_all)
    else:
        wrap = ring_attention if mesh.ring else partial(gathered_attention, kernels.attention)
        attention, places, numbers = wrap(dealt, axis), dealt.back, dealt.places[axis.rank]
        own = lambda x: x[numbers]  # noqa: E731
    return Slice(own, models.packed_attention(attention, packed.lengths), places)


def own_tokens(tokens: Tensor, length: int, axis: Axis) -> Own:
    """Select from `tokens` (places among all ranks' tokens [M], one rank after the other) those of this rank, which has
    `length` tokens."""
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
