"""Remove padding and put it back: rows of different lengths as one packed row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fppo_kernels.shapes import Bool, Int, Shaped

IGNORE = -100  # the label of a token that nothing follows


class Lengths(NamedTuple):
    """Where the sequences of a packed row begin and end."""

    cu_seqlens: Int[Tensor, " r"]  # int32: sequence r is cu_seqlens[r] : cu_seqlens[r + 1]
    lengths: tuple[int, ...]  # the same on the host, each > 0
    max_length: int  # 0 without sequences


class Places(NamedTuple):
    """Where the M real tokens of rows [B, S] are, as the host knows it."""

    index: Int[Tensor, " m"]  # pyright: ignore[reportIncompatibleMethodOverride]  # in [B * S], on the rows' device
    sizes: tuple[int, ...]  # of each row
    lengths: Lengths | None = None  # of the rows, which fill the packed row, where they are known


class Packed(NamedTuple):
    """The M real tokens of a padded batch, one row after the other, and N - M more that fill a multiple."""

    tokens: Int[Tensor, " n"]  # the fill is 0
    positions: Int[Tensor, " n"]  # int64, from 0 in each row and in the fill
    labels: Int[Tensor, " n"]  # the next token of the same row, IGNORE at the last token of each row and in the fill
    lengths: Lengths  # rows without tokens are not in it; the fill is one sequence more, the last
    index: Int[Tensor, " m"]  # pyright: ignore[reportIncompatibleMethodOverride]  # each real token's place in [B * S]
    columns: dict[str, Shaped[Tensor, "n ..."]]  # by name; the fill is 0


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device, which the host does not wait for."""
    device = torch.device(device)
    if device.type == "cuda":  # from other memory of the host, a copy may wait
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def make_lengths(lengths: Sequence[int], device: torch.device | str = "cpu") -> Lengths:
    """The record for sequences of these lengths, in order; empty sequences are left out."""
    sizes = tuple(int(n) for n in lengths if n)
    ends = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0).to(torch.int32)
    return Lengths(sent(ends, device), sizes, max(sizes, default=0))


def find_places(attention_mask: Bool[Tensor, "b s"]) -> Places:
    """Where `attention_mask` (bool [B, S]) is True. Waits for the device, if it is on one."""
    mask = attention_mask.bool()
    sizes: list[int] = mask.sum(1).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return Places(mask.flatten().nonzero().flatten(), tuple(sizes))


def unpad(
    tokens: Int[Tensor, "b s"],
    attention_mask: Bool[Tensor, "b s"],
    *,
    columns: Mapping[str, Shaped[Tensor, "b s ..."]] | None = None,
    multiple: int = 1,
    places: Places | None = None,
) -> Packed:
    """The tokens [B, S] where `attention_mask` (bool [B, S]) is True, row by row, wherever the padding stands.

    Labels are the tokens shifted by one on the packed row, never across the end of a row. `columns`, [B, S, ...] each,
    are packed like the tokens, and a gradient passes through them. The length is filled up to the next multiple of
    `multiple`, for sequence parallelism and compiled shapes. `places` are those of the mask: without them it waits for
    the device, to learn the lengths.

    Raises ValueError for shapes that do not fit, or a multiple below 1.
    """
    columns = {} if columns is None else columns
    for name, x in {"tokens": tokens, **columns}.items():
        if x.shape[:2] != attention_mask.shape:
            raise ValueError(f"attention_mask {tuple(attention_mask.shape)} does not fit {name} {tuple(x.shape)}")
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be [B, S], got {list(tokens.shape)}; pass other tensors as columns")
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    mask = attention_mask.bool()
    index, sizes, known = find_places(mask) if places is None else places
    fill = -len(index) % multiple
    lengths = make_lengths([*sizes, fill], tokens.device) if known is None else known
    packed = _fill(tokens.flatten()[index], fill)
    labels = packed.roll(-1)
    labels.index_fill_(0, lengths.cu_seqlens[1:].long() - 1, IGNORE)
    labels[len(index) :] = IGNORE
    positions = (mask.long().cumsum(1) - 1).flatten()[index]
    return Packed(
        tokens=packed,
        positions=torch.cat([positions, torch.arange(fill, device=tokens.device)]),
        labels=labels,
        lengths=lengths,
        index=index,
        columns={name: _fill(x.flatten(0, 1)[index], fill) for name, x in columns.items()},
    )


def _fill(x: Tensor, count: int) -> Tensor:
    return torch.cat([x, x.new_zeros((count, *x.shape[1:]))]) if count else x


def pad(x: Shaped[Tensor, " n *k"], index: Int[Tensor, " m"], shape: Sequence[int]) -> Shaped[Tensor, "b s *k"]:
    """The [B, S, ...] tensor with row n of `x` [N, ...] at flat place index[n] and zero elsewhere; shape is (B, S).

    Rows of `x` beyond the places of `index` [M] are the fill of `unpad`, and dropped. Raises ValueError if N < M.
    """
    batch, width = shape
    if len(x) < len(index):
        raise ValueError(f"{len(x)} rows do not fill the {len(index)} places of index; gather the packed row first")
    flat = x.new_zeros((batch * width, *x.shape[1:])).index_copy(0, index, x[: len(index)])
    return flat.view(batch, width, *x.shape[1:])
