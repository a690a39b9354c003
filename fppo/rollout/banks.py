"""Storage for the keys and values of rows that come and go. Attention calls of one shape share a tensor (a bank), so
that a row moves in one copy, however many layers there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from fppo.models.seams import AttentionLayer
from fppo.rollout.cache import Layers
from fppo_kernels.padding import sent

CACHE = "keys and values"  # what profiles call the allocation of banks


class Moves(NamedTuple):
    """How rows without a gap close up after some of them left: later rows move to their places."""

    order: np.ndarray[Any, np.dtype[np.int64]]  # by place, the number that its row had before
    holes: Sequence[int]  # places that rows move to
    movers: Sequence[int]  # the numbers of these rows

    @staticmethod
    def of(count: int, leaving: Sequence[int]) -> Moves:
        """The moves of `count` rows of which some are `leaving`."""
        stays = np.ones(count, dtype=bool)
        stays[leaving] = False
        left = count - len(leaving)
        order, holes = np.arange(left), np.flatnonzero(~stays[:left])
        order[holes] = left + np.flatnonzero(stays[left:])
        return Moves(order, holes.tolist(), order[holes].tolist())


# tensors [K, R, H, C, D], or [K, H, C, D] of one row: K keys or values, R rows, C columns
Banks = tuple[Tensor, ...]


@attrs.frozen
class _Bank:
    """The shape and dtype of a bank: `count` keys or values of attention calls, each with `heads` vectors of `width`
    numbers per token."""

    count: int
    heads: int
    width: int
    dtype: torch.dtype


@attrs.frozen
class BankLayout:
    """The places of each attention call's keys, and of its values: the number of a bank, and an index in it.
    `attention_layers` are the calls' other arguments."""

    calls: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    banks: tuple[_Bank, ...]
    device: torch.device
    attention_layers: Sequence[AttentionLayer]

    @staticmethod
    def of_layers(like: Layers, device: torch.device, attention_layers: Sequence[AttentionLayer] = ()) -> BankLayout:
        """Lay out the attention calls in `like`, whose keys and values are [N, H, D] each."""
        places: dict[tuple[int, int, torch.dtype], int] = {}
        counts: list[int] = []

        def placed(x: Tensor) -> tuple[int, int]:
            bank = places.setdefault((x.shape[1], x.shape[2], x.dtype), len(places))
            if bank == len(counts):
                counts.append(0)
            counts[bank] += 1
            return bank, counts[bank] - 1

        calls = tuple((placed(keys), placed(values)) for _, (keys, values) in sorted(like.items()))
        banks = tuple(_Bank(count, *shape) for shape, count in zip(places, counts, strict=True))
        return BankLayout(calls, banks, device, attention_layers)

    def rows(self, rows: int, columns: int) -> Banks:
        """Make banks of zeros for `rows` rows of `columns` columns: a mask is added to the scores of unwritten columns,
        so these must be finite."""
        with record_function(CACHE):
            return tuple(
                torch.zeros(bank.count, rows, bank.heads, columns, bank.width, dtype=bank.dtype, device=self.device)
                for bank in self.banks
            )

    def row(self, columns: int) -> Banks:
        """Make uninitialised banks of `columns` columns for one row, or for rows laid end to end."""
        with record_function(CACHE):
            return tuple(
                torch.empty(bank.count, bank.heads, columns, bank.width, dtype=bank.dtype, device=self.device)
                for bank in self.banks
            )

    def layers(self, banks: Banks) -> Layers:
        """View banks as the keys and values of each attention call, [R, H, C, D] or, for one row, [H, C, D]."""
        return {
            number: (banks[keys[0]][keys[1]], banks[values[0]][values[1]])
            for number, (keys, values) in enumerate(self.calls)
        }


def taken(banks: Banks, row: int, start: int, end: int) -> Banks:
    """Copy the columns from `start` to `end` of row number `row`."""
    return tuple(x[:, row, :, start:end].clone() for x in banks)


def put_(banks: Banks, rows: slice, end: int, own: Banks) -> None:
    """Write the keys and values `own` of one row into each of the `rows`, in the columns that end before `end`."""
    for x, new in zip(banks, own, strict=True):
        x[:, rows, :, end - new.shape[2] : end].copy_(new[:, None])


def put_passed_(layers: Layers, rows: slice, end: int, passed: Layers, spans: Sequence[tuple[int, int]]) -> None:
    """Write keys and values of a pass, [N, H, D] of each attention call, into `rows`, in the columns that end before
    `end`. `spans` are the first token and the number of tokens of each row; the padding before them is finite."""
    starts, lengths = np.array(spans).T
    width = int(lengths.max())
    places = (starts + lengths)[:, None] - width + np.arange(width)
    index = torch.from_numpy(places.clip(0).reshape(-1))
    for number, pair in passed.items():
        index = sent(index, pair[0].device)
        for x, new in zip(layers[number], pair, strict=True):
            own = new.index_select(0, index).unflatten(0, places.shape)
            x[rows, :, end - width : end].copy_(own.transpose(1, 2))


def move_(banks: Banks, moves: Moves, start: int, end: int) -> None:
    """Move rows to the places of others, in the columns from `start` to `end`."""
    for x in banks:
        for hole, mover in zip(moves.holes, moves.movers, strict=True):
            x[:, hole, :, start:end].copy_(x[:, mover, :, start:end])


def move_up_(banks: Banks, row: int, start: int, end: int, by: int) -> None:
    """Move the columns from `start` to `end` of one row `by` columns further on."""
    for x in banks:
        own = x[:, row]
        own[:, :, start + by : end + by].copy_(own[:, :, start:end].clone())


def shift_(banks: Banks, others: Banks, rows: int, start: int, end: int, by: int) -> None:
    """Copy the columns from `start` to `end` of the first `rows` rows into `others`, `by` columns further on. `others`
    may be `banks` itself."""
    for x, other in zip(banks, others, strict=True):
        own = x[:, :rows, :, start:end]
        other[:, :rows, :, start + by : end + by].copy_(own.clone() if x is other else own)


def joined(parts: list[Banks]) -> Banks:
    """Concatenate rows, each [K, H, C, D], along their columns."""
    return tuple(torch.cat(list(each), 2) for each in zip(*parts, strict=True))
