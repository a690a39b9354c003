"""Rows with common prefixes: their distinct tokens, and how such rows are cut, distributed and packed.

Sorted by their tokens, rows with common prefixes are adjacent. A row's depth is the number of first tokens that it
shares with the row before it. The rows form trees: a prompt and its responses, or turns that share a history.
Everything is computed on the host, from token ids alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fppo.shapes import Mask
from fppo.steps.micro_batching import MicroBatching, balance, fit
from fppo_kernels.shapes import Int
from fppo_kernels.shared import Branch

STEP = 16  # beyond a prompt rows share a multiple of this many tokens, so that no piece is short


class SortedRows(NamedTuple):
    """Rows sorted so that those with common prefixes are adjacent."""

    order: list[int]  # their indices in the batch
    lengths: list[int]  # the number of tokens of each, in this order
    depths: list[int]  # the number of first tokens that each shares with the row before it, in this order

    @property
    def tokens(self) -> int:
        """The number of tokens, with shared ones counted once."""
        return sum(self.lengths) - sum(self.depths)

    @property
    def saved(self) -> float:
        """The fraction of tokens that sharing saves."""
        return sum(self.depths) / max(sum(self.lengths), 1)

    def apart(self) -> SortedRows:
        """Make all depths 0, as if the rows shared no tokens."""
        return self._replace(depths=[0] * len(self.depths))

    def part(self, rows: Sequence[int]) -> SortedRows:
        """Select some rows; neighbours then share the tokens that all rows between them share."""
        chosen, own, depth = {*rows}, list[tuple[int, int, int]](), 0
        for row, length, shared in zip(*self, strict=True):
            depth = min(depth, shared)
            if row in chosen:
                own.append((row, length, depth))
                depth = length
        return SortedRows(*([each[i] for each in own] for i in range(3)))

    def split(self, start: int, stop: int, depth: int) -> list[tuple[int, int]]:
        """Split the places `start` to `stop` of the order, whose rows share at least `depth` tokens, into runs (start,
        stop) of rows that share more."""
        cuts = (place for place in range(start + 1, stop) if self.depths[place] == depth)
        return list(itertools.pairwise([start, *cuts, stop]))

    def trees(self) -> list[tuple[int, int]]:
        """The runs (start, stop) of places whose rows share tokens, sorted by the smallest row index in each."""
        runs = self.split(0, len(self.order), 0) if self.order else []
        return sorted(runs, key=lambda run: min(self.order[slice(*run)]))


class PackedPieces(NamedTuple):
    """Rows [B, S] as a packed row of N distinct tokens: first all pieces without a parent, then children, and so on."""

    pieces: list[Branch]
    index: Int[Tensor, " n"]  # pyright: ignore[reportIncompatibleMethodOverride]  # in [B * S], of each token
    places: Int[Tensor, " r"]  # the index in the packed row of each of the R real tokens of the rows, row by row


def sort_rows(tokens: Int[Tensor, "b s"], attention_mask: Mask, width: int, *, step: int = STEP) -> SortedRows:
    """Sort rows [B, S], whose prompts are in the first `width` columns, by their real tokens.

    Rows with equal prompts share them; rows with a common prefix of `step` tokens share a multiple of `step`.
    """
    mask = attention_mask.bool()
    sizes: list[int] = mask.sum(1).tolist()
    prompts: list[int] = mask[:, :width].sum(1).tolist()
    ends = np.cumsum([0, *sizes])
    every = tokens[mask].numpy()
    rows = [every[a:b] for a, b in itertools.pairwise(ends.tolist())]
    order = sorted(range(len(rows)), key=lambda row: (rows[row].tobytes(), row))
    depths = [0] * len(order)
    for place, (a, b) in enumerate(itertools.pairwise(order), start=1):
        alike = _common(rows[a], rows[b])
        base = prompts[a] if prompts[a] == prompts[b] <= alike else 0
        same = alike == sizes[a] == sizes[b]
        depths[place] = alike if same else base + (alike - base) // step * step
    return SortedRows(order, [sizes[row] for row in order], depths)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the common prefix of two arrays."""
    length = min(len(a), len(b))
    other = np.flatnonzero(a[:length] != b[:length])
    return int(other[0]) if len(other) else length


def pack_rows(rows: SortedRows, attention_mask: Mask) -> PackedPieces:
    """Pack rows with this mask [B, S] so that each distinct token occurs once."""
    mask = attention_mask.bool()
    flat = torch.arange(mask.numel()).view(mask.shape)
    own = [flat[row][mask[row]] for row in rows.order]
    place = torch.zeros(mask.numel(), dtype=torch.int64)
    pieces, index, begin = list[Branch](), [flat.new_zeros(0)], 0
    waiting = deque([(0, len(own), 0, -1)] if own else [])
    while waiting:  # runs of rows that share `depth` tokens, the last of which are the piece `parent`
        start, stop, depth, parent = waiting.popleft()
        end = min(rows.depths[start + 1 : stop], default=rows.lengths[start])
        if end > depth:
            for tokens in own[start:stop]:
                place[tokens[depth:end]] = torch.arange(begin, begin + end - depth)
            index.append(own[start][depth:end])
            pieces.append(Branch(end - depth, parent))
            parent, begin = len(pieces) - 1, begin + end - depth
        if stop - start > 1:
            waiting.extend((a, b, end, parent) for a, b in rows.split(start, stop, end))
    return PackedPieces(pieces, torch.cat(index), place[flat[mask]])


def cut_runs(rows: SortedRows, limit: float, cost: Callable[[int], float] = float) -> list[tuple[list[int], float]]:
    """Cut the trees into few runs of rows that cost at most `limit`, and keep shared tokens together where that fits.
    Returns each run's rows and cost.

    The first n tokens of a row cost `cost(n)`; those shared with the row before it cost nothing. A run of a single row
    may cost more than the limit.
    """
    work = [cost(length) for length in rows.lengths]
    spared = [cost(depth) for depth in rows.depths]

    def total(start: int, stop: int) -> float:
        return sum(work[start:stop]) - sum(spared[start + 1 : stop])

    def within(start: int, stop: int) -> list[tuple[int, int]]:
        if stop - start == 1 or total(start, stop) <= limit:
            return [(start, stop)]
        depth = min(rows.depths[start + 1 : stop])
        found: list[tuple[int, int]] = []
        for a, b in (run for part in rows.split(start, stop, depth) for run in within(*part)):
            if found and total(found[-1][0], b) <= limit:
                a = found.pop()[0]
            found.append((a, b))
        return found

    runs = [run for tree in rows.trees() for run in within(*tree)]
    return [(sorted(rows.order[a:b]), total(a, b)) for a, b in runs]


def partition_shared(rows: SortedRows, micro_batching: MicroBatching) -> list[list[int]]:
    """Partition rows as `micro_batching.partition` does, where rows of a micro-batch share tokens.

    With a budget, a micro-batch exceeds it in distinct tokens only if it is a single sequence.
    """
    if micro_batching.size is not None:
        order, size = [row for run in rows.trees() for row in rows.order[slice(*run)]], micro_batching.size
        return [sorted(order[i : i + size]) for i in range(0, len(order), size)]
    assert micro_batching.token_budget is not None
    runs = cut_runs(rows, micro_batching.token_budget)
    groups = fit([round(tokens) for _, tokens in runs], micro_batching.token_budget)
    return [sorted(row for number in group for row in runs[number][0]) for group in groups]


def deal_shared(rows: SortedRows, ranks: int, cost: Callable[[int], float]) -> list[list[int]]:
    """The row indices of each rank's share, of nearly equal cost; rows that share tokens stay together.

    The first n tokens of a row cost `cost(n)`. A tree that costs more than a share is cut.
    """
    whole = sum(map(cost, rows.lengths)) - sum(map(cost, rows.depths))
    runs = cut_runs(rows, whole / ranks, cost)
    groups = balance([round(work) for _, work in runs], min(ranks, len(runs))) if runs else []
    dealt = [sorted(row for number in group for row in runs[number][0]) for group in groups]
    return dealt + [[] for _ in range(ranks - len(groups))]


def distinct_inputs(tokens: Int[Tensor, "b s"], inputs: Sequence[object | None] | None) -> Int[Tensor, "b s"]:
    """Replace tokens [B, S] by numbers that also differ between rows with different images; rows of one prompt have the
    same object of `inputs`."""
    if inputs is None:
        return tokens
    numbers: dict[int, int] = {}
    own = torch.tensor([0 if x is None else numbers.setdefault(id(x), len(numbers) + 1) for x in inputs])
    return tokens + (own << 32)[:, None]
