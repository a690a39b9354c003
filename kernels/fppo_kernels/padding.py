"""Remove padding and put it back: rows of different lengths as one packed row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Lengths(NamedTuple):
    """Where the sequences of a packed row begin and end."""

    cu_seqlens: Tensor  # int32 [R + 1]: sequence r is cu_seqlens[r] : cu_seqlens[r + 1]
    lengths: tuple[int, ...]  # the same on the host, each > 0
    max_length: int  # 0 without sequences


class Packed(NamedTuple):
    """The real tokens of a padded batch, one row after the other."""

    tokens: Tensor  # [N]
    positions: Tensor  # int64 [N], from 0 in each row
    lengths: Lengths  # rows without tokens are not in it
    index: Tensor  # int64 [N]: each token's place in the flat [B * S]


def make_lengths(lengths: Sequence[int], device: torch.device | str = "cpu") -> Lengths:
    """The record for sequences of these lengths, in order; empty sequences are left out."""
    kept = tuple(int(n) for n in lengths if n)
    ends = torch.tensor([0, *kept], dtype=torch.int64).cumsum(0).to(torch.int32)
    return Lengths(ends.to(device), kept, max(kept, default=0))


def unpad(tokens: Tensor, attention_mask: Tensor) -> Packed:
    """The tokens [B, S] where `attention_mask` (bool [B, S]) is True, row by row, wherever the padding stands.

    Waits for the device once, to learn the lengths.
    """
    if tokens.shape[:2] != attention_mask.shape:
        raise ValueError(f"attention_mask {tuple(attention_mask.shape)} does not fit tokens {tuple(tokens.shape)}")
    mask = attention_mask.bool()
    index = mask.flatten().nonzero().flatten()
    positions = (mask.long().cumsum(1) - 1).flatten()[index]
    lengths = make_lengths(mask.sum(1).tolist(), tokens.device)
    return Packed(tokens.flatten(0, 1)[index], positions, lengths, index)


def pad(x: Tensor, index: Tensor, shape: Sequence[int]) -> Tensor:
    """The [B, S, ...] tensor with row n of `x` [N, ...] at flat place index[n] and zero elsewhere; shape is (B, S)."""
    batch, width = shape
    flat = x.new_zeros((batch * width, *x.shape[1:])).index_copy(0, index, x)
    return flat.view(batch, width, *x.shape[1:])
