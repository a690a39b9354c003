"""The tokens of a pass, known on the host: their indices, which of them a rank runs, and how they attend to others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import attrs
import torch
from torch import Tensor

from fppo import models
from fppo.models.flops import window_of_all
from fppo.models.model import Model
from fppo.models.seams import Attend
from fppo.runtime.mesh import Mesh
from fppo.shapes import Mask
from fppo.steps.micro_batching import MicroBatching, partition
from fppo.steps.outputs import Forward
from fppo.steps.shared import PackedPieces, SortedRows, distinct_inputs, pack_rows, partition_shared, sort_rows
from fppo_kernels.collectives import Axis
from fppo_kernels.context import BLOCKS, Deal, deal, gathered_attention
from fppo_kernels.padding import Packed, Places, find_places, sent
from fppo_kernels.ring import ring_attention
from fppo_kernels.shared import Branch, Readings, SharedKeys, readings, share, shared_attention
from fppo_kernels.table import Kernels
from fppo_kernels.transforms import active, is_mapped, outside
from fppo_kernels.ulysses import gather_sequence, slice_sequence, ulysses

LEAST_SAVED = 0.1  # the fraction of tokens that sharing must save for "auto"


class Slice(NamedTuple):
    """A rank's tokens of a packed row of N tokens that is cut over one axis, and how they attend."""

    own: Callable[[Tensor], Tensor]  # selects this rank's entries from values of all tokens [N, ...]
    attend: Attend
    places: Tensor  # [N]: each token's index among all ranks' tokens, rank by rank


class Masked(Protocol):
    """The masks of a record, from which the indices of its tokens follow."""

    @property
    def attention_mask(self) -> Tensor: ...  # [B, S] bool
    @property
    def response_mask(self) -> Tensor: ...  # [B, T] bool


class Masks(NamedTuple):
    """The masks of rows on the host, and their tokens if rows share common prefixes."""

    attention: Mask  # [B, S]
    response: Mask  # [B, T]
    tokens: Tensor | None = None  # [B, S], equal where rows may share tokens; None: nothing is shared

    @property
    def lengths(self) -> list[int]:
        """The number of real tokens of each row."""
        return self.attention.sum(1).tolist()

    def sorted(self) -> SortedRows | None:
        """The rows sorted so that rows with common prefixes are adjacent; None if nothing is shared."""
        if self.tokens is None:
            return None
        return outside(sort_rows, self.tokens, self.attention, self.attention.shape[1] - self.response.shape[1])

    @property
    def depths(self) -> list[int]:
        """For each row, the length of the prefix that it shares with another row, which computes it."""
        rows = self.sorted()
        return [] if rows is None else rows.depths


def masks_of(rows: Masked, forward: Forward | None = None) -> Masks:
    """The masks of rows, with their tokens if the forward's passes share common prefixes. Waits for the device, if the
    rows are on one. Raises ValueError for masks that vmap maps over."""
    if forward is None or not _shares(forward):
        return _on_host(rows)
    return keep_tokens_if_shared(masks_and_tokens(rows), forward)


def _on_host(rows: Masked) -> Masks:
    return outside(lambda *masks: Masks(*(x.cpu() for x in masks)), rows.attention_mask, rows.response_mask)


def masks_and_tokens(rows: Masked) -> Masks:
    """Copy the masks of rows to the host, and their tokens if they can be read: rows on the meta device, and rows that
    vmap maps over, give masks alone. Waits for the device."""
    masks, tokens = _on_host(rows), getattr(rows, "tokens", None)
    if type(tokens) is not Tensor or tokens.is_meta or is_mapped(tokens):
        return masks
    return masks._replace(tokens=outside(_distinct, tokens, getattr(rows, "inputs", None)))


def _distinct(tokens: Tensor, inputs: Any) -> Tensor:
    return distinct_inputs(tokens.cpu(), inputs)


def sorted_rows(rows: Masked) -> SortedRows:
    """Sort rows with tokens so that rows with common prefixes are adjacent. Waits for the device."""
    found = masks_and_tokens(rows).sorted()
    assert found is not None
    return found


def keep_tokens_if_shared(masks: Masks, forward: Forward) -> Masks:
    """The masks of rows, with the rows' tokens only if sharing common prefixes pays, according to
    `Forward.share_prompts`; without tokens nothing is shared."""
    if masks.tokens is None or not _shares(forward):
        return masks._replace(tokens=None)
    rows = masks.sorted()
    return masks if rows is not None and saves_enough(rows, forward) else masks._replace(tokens=None)


def saves_enough(rows: SortedRows, forward: Forward) -> bool:
    """Whether sharing common prefixes of these rows saves enough tokens: any at all, or the fraction `LEAST_SAVED` if
    `Forward.share_prompts` is "auto"."""
    return _shares(forward) and rows.saved > (LEAST_SAVED if forward.share_prompts == "auto" else 0.0)


def _shares(forward: Forward) -> bool:
    return bool(forward.share_prompts) and forward.sharing_hindrance() is None


def cut(masks: Masks, micro_batching: MicroBatching) -> list[list[int]]:
    """The row indices of each micro-batch; rows that share tokens are kept together."""
    rows = masks.sorted()
    return partition(masks.lengths, micro_batching) if rows is None else partition_shared(rows, micro_batching)


def blank_masks(masks: Masks) -> Masks:
    """The masks of `ranks.blank`: one row with one token."""
    attention = masks.attention.new_zeros(1, masks.attention.shape[1])
    attention[:, -1:] = True
    return Masks(attention, masks.response.new_zeros(1, masks.response.shape[1]))


def multiple(mesh: Mesh) -> int:
    """The divisor of a packed row's padded length: it gives the ranks slices, or blocks, of equal size, divisible by
    the size of the tensor axis."""
    context = mesh["context"].size
    return mesh["sequence"].size * mesh["tensor"].size * (context * BLOCKS[-1] if context > 1 else 1)


class Own(NamedTuple):
    """The tokens of this rank, out of M tokens of the packed row."""

    numbers: Tensor | slice  # indices among the M tokens
    places: Tensor  # indices among this rank's tokens
    slots: Tensor | None = None  # on several ranks: the index of each of the M among all ranks' own, `width` per rank
    width: int = 0  # the most tokens of a rank

    def on(self, device: torch.device) -> Own:
        """Move the indices to a device."""
        numbers = self.numbers if isinstance(self.numbers, slice) else sent(self.numbers, device)
        slots = None if self.slots is None else sent(self.slots, device)
        return Own(numbers, sent(self.places, device), slots, self.width)


class SharedRow(NamedTuple):
    """A packed row of N distinct tokens, some shared by several rows, and the keys that they see; the rows have R
    tokens."""

    keys: SharedKeys
    reads: Readings  # readings of this rank's tokens before response tokens
    real: Places  # the places of the R tokens of all rows
    places: Tensor  # [R]: the index of each of these in the packed row


@attrs.frozen(eq=False)
class Indices:
    """The indices of the rows' tokens, for a pass that need not wait for the device.

    They belong to rows with these two masks, to a mesh, and to `packed` or padded passes. Tensors are on the rows'
    device.
    """

    attention_mask: Tensor  # [B, S]
    response_mask: Tensor  # [B, T]
    mesh: Mesh
    packed: bool
    real: Places
    responses: Tensor  # [M]: indices of the response tokens in [B * T]
    before: Tensor  # [M]: the index of the token before each, among all ranks' tokens, rank by rank
    own: Own  # the tokens of `before` on this rank
    length: int  # tokens of this rank's slice of the row, between blocks
    dealt: Deal | None  # the deal of the packed row, on a context axis
    shared: SharedRow | None = None  # if rows share tokens; `real` are then the distinct tokens, piece by piece

    def of(self, rows: Masked, mesh: Mesh, packed: bool) -> bool:
        """Whether these indices are those of exactly these `rows`, on this mesh, and packed or not as requested."""
        same = self.attention_mask is rows.attention_mask and self.response_mask is rows.response_mask
        return same and self.mesh == mesh and self.packed == packed


def padded_indices(rows: Masked, mesh: Mesh) -> Indices:
    """Indices of all entries of rows, padding included, for masks that vmap maps over, which cannot be read."""
    (count, width), length, device = rows.attention_mask.shape, rows.response_mask.shape[1], rows.attention_mask.device
    place = torch.arange(count * length, device=device)
    before = (place // max(length, 1) * width + width - length + place % max(length, 1) - 1).clamp(min=0)
    return Indices(
        attention_mask=rows.attention_mask,
        response_mask=rows.response_mask,
        mesh=mesh,
        packed=False,
        real=Places(torch.arange(count * width, device=device), (width,) * count),
        responses=place,
        before=before,
        own=Own(slice(None), before),
        length=count * width,
        dealt=None,
    )


def find_indices(rows: Masked, masks: Masks, model: Model, mesh: Mesh, *, packed: bool) -> Indices:
    """Compute the indices of the tokens of rows with these masks, on the host alone."""
    (count, width), length, device = masks.attention.shape, masks.response.shape[1], rows.attention_mask.device
    index = masks.response.flatten().nonzero().flatten()
    before = index + (index // max(length, 1) + 1) * (width - length) - 1
    real, total, dealt, axis = find_places(masks.attention), count * width, None, mesh.token_axis
    every, alike = real, masks.sorted()
    pieces = None if alike is None else pack_rows(alike, masks.attention)
    if pieces is not None:
        real = Places(pieces.index, tuple(piece.size for piece in pieces.pieces))
    if packed:
        total = -(-sum(real.sizes) // multiple(mesh)) * multiple(mesh)
        order = torch.arange(total) if pieces is None else pieces.places
        if mesh["context"].size > 1:
            sizes = [size for size in (*real.sizes, total - sum(real.sizes)) if size]
            dealt = deal(sizes, axis.size, window=window_of_all(model))
            order = dealt.back
            dealt = dealt._replace(places=tuple(sent(x, device) for x in dealt.places), back=sent(order, device))
        before = order[(masks.attention.flatten().cumsum(0) - 1)[before + 1] - 1]
    own = own_tokens(before, total // axis.size, axis)
    return Indices(
        attention_mask=rows.attention_mask,
        response_mask=rows.response_mask,
        mesh=mesh,
        packed=packed,
        real=real._replace(index=sent(real.index, device)),
        responses=sent(index, device),
        before=sent(before, device),
        own=own.on(device),
        length=total // (axis.size * mesh["tensor"].size),
        dealt=dealt,
        shared=None if pieces is None else _shared(pieces, every, own, total // axis.size, axis, device),
    )


def _shared(
    pieces: PackedPieces, every_token: Places, own: Own, length: int, axis: Axis, device: torch.device
) -> SharedRow:
    """Describe the packed row of `pieces`, whose rows share tokens.

    `every_token` has the places of all rows' tokens, and `own` the tokens before response tokens, out of the `length`
    tokens of this rank. Padding fills the row up to the ranks' equal lengths, as a piece of its own.
    """
    fill = length * axis.size - len(pieces.index)
    return SharedRow(
        keys=share([*pieces.pieces, *([Branch(fill)] if fill else [])], device),
        reads=readings(own.places, length, device),
        real=every_token._replace(index=sent(every_token.index, device)),
        places=sent(pieces.places, device),
    )


class MicroBatch(NamedTuple):
    """The rows of a pass, the indices of their tokens, and their masks on the host (None: unknown there)."""

    rows: Any
    indices: Indices
    masks: Masks | None


def indexed(rows: Masked, masks: Masks, forward: Forward) -> MicroBatch:
    """Compute the indices of the tokens of rows with these masks, for a pass of the forward."""
    find = partial(find_indices, model=forward.model, mesh=forward.mesh, packed=forward.remove_padding)
    found = outside(find, rows, masks)
    if active():  # the rows' own tokens were found with their masks
        found = attrs.evolve(found, attention_mask=rows.attention_mask, response_mask=rows.response_mask)
    return MicroBatch(rows, found, masks)


def indices_of(rows: Masked, known: Indices | None, forward: Forward) -> Indices:
    """The `known` indices of the rows; without them new ones, for which the host may wait."""
    if known is None:
        return indexed(rows, masks_of(rows, forward), forward).indices
    if not known.of(rows, forward.mesh, forward.remove_padding):
        raise ValueError("these indices are of other rows or of another forward: give those of `packed.indexed`")
    return known


def slice_of(packed: Packed, kernels: Kernels, mesh: Mesh, indices: Indices) -> Slice:
    """This rank's tokens of a padded packed row: a slice of it, or on a context axis the blocks that it was dealt."""
    dealt, shared = indices.dealt, indices.shared
    places = torch.arange(len(packed.tokens), device=packed.tokens.device)
    axis = mesh.token_axis
    own: Callable[[Tensor], Tensor] = partial(slice_sequence, axis=axis)
    if dealt is None:
        kernel = kernels.attention if shared is None else shared_attention(kernels.attention, shared.keys)
        attention = ulysses(kernel, axis, kernels.all_to_all)
    else:
        wrap = ring_attention if mesh.ring else partial(gathered_attention, kernels.attention)
        attention, places, numbers = wrap(dealt, axis), dealt.back, dealt.places[axis.rank]
        own = lambda x: x[numbers]  # noqa: E731
    return Slice(own, models.packed_attention(attention, packed.lengths), places)


def places_of_rows(places: Tensor, indices: Indices) -> Tensor:
    """Read `places` [N], one number for each packed token, at every token of the rows, row by row."""
    return places if indices.shared is None else places[indices.shared.places]


def own_tokens(tokens: Tensor, length: int, axis: Axis) -> Own:
    """Select this rank's tokens from `tokens` [M], which are indices among all ranks' tokens, rank by rank. Each rank
    has `length` tokens. A token may occur several times. With several ranks it waits for the device."""
    if axis.size == 1:
        return Own(slice(None), tokens)
    ranks = tokens // length
    counts = ranks.bincount(minlength=axis.size)
    order, most = ranks.argsort(stable=True), max(int(counts.max()), 1)
    begins = counts.cumsum(0) - counts
    slots = torch.empty_like(tokens)
    slots[order] = torch.arange(len(tokens), device=tokens.device) - begins[ranks[order]] + ranks[order] * most
    numbers = (ranks == axis.rank).nonzero().flatten()
    return Own(numbers, tokens[numbers] - axis.rank * length, slots, most)


def gathered(columns: Sequence[Tensor], own: Own, axis: Axis) -> Sequence[Tensor]:
    """Gather `columns` of this rank's tokens `own`, each [m, ...], into columns of all M tokens, [M, ...], in the order
    of the packed row, on every rank, by one collective."""
    if own.slots is None:
        return columns
    flat = [x.flatten(1) if x.dim() > 1 else x[:, None] for x in columns]
    stacked = torch.cat(flat, 1)
    padded = torch.cat([stacked, stacked.new_zeros(own.width - len(stacked), stacked.shape[1])])
    whole = gather_sequence(padded, axis)[own.slots].split([x.shape[1] for x in flat], 1)
    return [x.view(-1, *column.shape[1:]) for x, column in zip(whole, columns, strict=True)]
