"""Random keys as values. A draw depends on its key path (purpose, step, row), never on earlier draws."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
import torch
from torch import Tensor

_Integers = TypeVar("_Integers", Tensor, "np.ndarray[Any, np.dtype[np.int64]]")

_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), on a Python integer."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _mixed_each(x: _Integers) -> _Integers:
    """Apply `_mix` to each number of an int64 tensor or array: products wrap, and the arithmetic shifts are masked to
    logical ones."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _of_64_bits(key: object, field: object, seed: int) -> None:
    del key, field
    if not 0 <= seed <= _MASK:
        raise ValueError(f"seed = {seed}: must be 0 to 2**64 - 1; seeds beyond would give the draws of another seed")


@attrs.frozen
class Key:
    """A 64-bit seed as a value. Raises ValueError for a larger or negative one."""

    seed: int = attrs.field(validator=_of_64_bits)

    def fold(self, *data: int | str) -> Key:
        """Derive a key; each of `data` names one level below this key."""
        x = self.seed & _MASK
        for item in data:
            if isinstance(item, str):
                item = int.from_bytes(hashlib.blake2b(item.encode(), digest_size=8).digest(), "little")
            x = _mix(x ^ _mix(item & _MASK))
        return Key(x)

    def generator(self) -> torch.Generator:
        """A fresh torch generator on the CPU, seeded by this key."""
        return torch.Generator().manual_seed(self.seed & (_MASK >> 1))

    def uniform(self, rows: Tensor, columns: int | Tensor) -> Tensor:
        """Numbers in [0, 1), float64 [B, T]: number (i, j) depends on this key, rows[i] and columns[j] alone.

        `rows` is int64 [B]; `columns` is int64 [T], or T for 0 .. T - 1, or [B, T] if they differ between rows.
        Counter-based (Salmon et al., 2011).
        """
        if isinstance(columns, int):
            columns = torch.arange(columns, device=rows.device)
        return _uniform(rows ^ _signed(_mixed(self)), columns)


def uniforms(keys: Sequence[Key], rows: Sequence[int], columns: Tensor) -> Tensor:
    """Numbers in [0, 1), float64 [B, T]: row i is `keys[i].uniform` of rows[i] and columns[i] (int64 [B, T], on the
    host)."""
    mixed = [_signed((row & _MASK) ^ _mixed(key)) for key, row in zip(keys, rows, strict=True)]
    return torch.as_tensor(_bits(np.array(mixed, dtype=np.int64), columns.numpy()) * 2.0**-53)  # NumPy is quicker


def _mixed(key: Key) -> int:
    return _mix(key.seed & _MASK)  # unmixed, keys 0 and 1 would draw the same numbers, in other rows


def _uniform(rows: Tensor, columns: Tensor) -> Tensor:
    return _bits(rows, columns).double() * 2.0**-53


def _bits(rows: _Integers, columns: _Integers) -> _Integers:
    """53 random bits for each row and column."""
    return (_mixed_each(_mixed_each(rows)[:, None] ^ columns) >> 11) & ((1 << 53) - 1)
