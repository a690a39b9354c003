"""Rows that begin alike: which of their tokens are distinct, and how such rows are cut, dealt and packed.

Sorted by their tokens, rows that begin alike stand together, and each shares so many tokens, its depth, with the one
before it. That makes trees of them: a prompt and its responses, or turns that share a history. All of it is work on the
host, by token ids alone.
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

STEP = 16  # beyond a common prompt rows share a multiple of so many tokens, or every piece would be a few tokens long


class SortedRows(NamedTuple):
    """Rows in an order in which those that begin alike stand together."""

    order: list[int]  # their numbers
    lengths: list[int]  # the tokens of each, in this order
    depths: list[int]  # how many of its first tokens each shares with the one before it, in this order

    @property
    def tokens(self) -> int:
        """The number of distinct tokens."""
        return sum(self.lengths) - sum(self.depths)

    @property
    def saved(self) -> float:
        """The share of tokens that need not be computed."""
        return sum(self.depths) / max(sum(self.lengths), 1)

    def apart(self) -> SortedRows:
        """These rows, each with tokens of its own."""
        return self._replace(depths=[0] * len(self.depths))

    def part(self, rows: Sequence[int]) -> SortedRows:
        """Select the rows of some numbers, which share no more than the rows between them do."""
        chosen, own, depth = {*rows}, list[tuple[int, int, int]](), 0
        for row, length, shared in zip(*self, strict=True):
            depth = min(depth, shared)
            if row in chosen:
                own.append((row, length, depth))
                depth = length
        return SortedRows(*([each[i] for each in own] for i in range(3)))

    def split(self, start: int, stop: int, depth: int) -> list[tuple[int, int]]:
        """Places `start` to `stop`, whose rows share at least `depth` tokens, as runs that share more than that."""
        cuts = (place for place in range(start + 1, stop) if self.depths[place] == depth)
        return list(itertools.pairwise([start, *cuts, stop]))

    def trees(self) -> list[tuple[int, int]]:
        """Runs of places whose rows begin alike, by the least number of a row in each."""
        runs = self.split(0, len(self.order), 0) if self.order else []
        return sorted(runs, key=lambda run: min(self.order[slice(*run)]))


class PackedPieces(NamedTuple):
    """Rows [B, S] as a packed row of N distinct tokens: all pieces that follow none, then those that follow these."""

    pieces: list[Branch]
    index: Int[Tensor, " n"]  # pyright: ignore[reportIncompatibleMethodOverride]  # in [B * S], of each token
    places: Int[Tensor, " r"]  # in the packed row, of each of the R real tokens of the rows, one row after the other


def sort_rows(tokens: Int[Tensor, "b s"], attention_mask: Mask, width: int) -> SortedRows:
    """Sort rows [B, S], whose prompts are in the first `width` columns, by their real tokens.

    Rows of one prompt share it, and rows with a common beginning of `STEP` tokens do so in steps of that.
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
        depths[place] = alike if same else base + (alike - base) // STEP * STEP
    return SortedRows(order, [sizes[row] for row in order], depths)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """The number of first elements that two arrays have in common."""
    length = min(len(a), len(b))
    other = np.flatnonzero(a[:length] != b[:length])
    return int(other[0]) if len(other) else length


def pack_rows(rows: SortedRows, attention_mask: Mask) -> PackedPieces:
    """Pack rows with this mask [B, S] so that each of their distinct tokens is there once."""
    mask = attention_mask.bool()
    flat = torch.arange(mask.numel()).view(mask.shape)
    own = [flat[row][mask[row]] for row in rows.order]
    place = torch.zeros(mask.numel(), dtype=torch.int64)
    pieces, index, begin = list[Branch](), [flat.new_zeros(0)], 0
    waiting = deque([(0, len(own), 0, -1)] if own else [])
    while waiting:  # runs of rows that share `depth` tokens, of which the last are the piece `parent`
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
    """Cut the trees into runs of rows of at most `limit`, as few as leave shared tokens together; with what each costs.

    The first n tokens of a row cost `cost(n)`, and those that it shares with the row before it nothing. A run of one
    row may cost more.
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
    """`micro_batching.partition` of rows that share tokens with those of their micro-batch.

    With a budget, no micro-batch has more distinct tokens than it unless one sequence alone does.
    """
    if micro_batching.size is not None:
        order, size = [row for run in rows.trees() for row in rows.order[slice(*run)]], micro_batching.size
        return [sorted(order[i : i + size]) for i in range(0, len(order), size)]
    assert micro_batching.token_budget is not None
    runs = cut_runs(rows, micro_batching.token_budget)
    groups = fit([round(tokens) for _, tokens in runs], micro_batching.token_budget)
    return [sorted(row for number in group for row in runs[number][0]) for group in groups]


def deal_shared(rows: SortedRows, ranks: int, cost: Callable[[int], float]) -> list[list[int]]:
    """The rows that each of some ranks takes: rows that share tokens together, in parts of nearly equal cost.

    The first n tokens of a row cost `cost(n)`. A tree that costs more than a rank's part is cut.
    """
    whole = sum(map(cost, rows.lengths)) - sum(map(cost, rows.depths))
    runs = cut_runs(rows, whole / ranks, cost)
    groups = balance([round(work) for _, work in runs], min(ranks, len(runs))) if runs else []
    dealt = [sorted(row for number in group for row in runs[number][0]) for group in groups]
    return dealt + [[] for _ in range(ranks - len(groups))]


def distinct_inputs(tokens: Int[Tensor, "b s"], inputs: Sequence[object | None] | None) -> Int[Tensor, "b s"]:
    """Tokens [B, S] as numbers that differ where rows have other images; rows of one prompt have the same object."""
    if inputs is None:
        return tokens
    numbers: dict[int, int] = {}
    own = torch.tensor([0 if x is None else numbers.setdefault(id(x), len(numbers) + 1) for x in inputs])
    return tokens + (own << 32)[:, None]
