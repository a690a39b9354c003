# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Attention over a packed row whose tokens are dealt to the ranks of an axis (context parallelism).

Each rank has equally many tokens, whose queries see about equally many keys, and gathers the keys of all ranks
(`fppo_kernels.ring` hands them around instead). Heads are not cut, so there may be more ranks than heads. Each rank's
gradients of parameters are its share: their sum over the axis is the gradient.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fppo_kernels.collectives import Axis, all_gather
from fppo_kernels.padding import Lengths, make_lengths, sent
from fppo_kernels.shapes import Float, Int
from fppo_kernels.table import check_key_lengths

BLOCKS = (1, 2, 4, 8)  # numbers of blocks per rank that `deal` tries
EVEN = 1.05  # `deal` takes the first with which no rank has more than this times the mean work


class Piece(NamedTuple):
    """Tokens `start` to `stop` - 1 of the sequence that begins at token `begin` of the packed row."""

    begin: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Deal(NamedTuple):
    """The tokens of each of c ranks, out of a packed row of N: runs of consecutive tokens, in the row's order."""

    runs: tuple[tuple[tuple[Piece, ...], ...], ...]  # by rank, each run as pieces of sequences
    places: tuple[Int[Tensor, " r"], ...]  # by rank, the tokens' indices in the row [N / c]
    back: Int[Tensor, " n"]  # for each token of the row, its index among all ranks' tokens, rank by rank
    work: tuple[int, ...]  # by rank, the number of visible (query, key) pairs

    @property
    def uneven(self) -> float:
        """The most work of a rank relative to the mean."""
        return max(self.work) * len(self.work) / max(1, sum(self.work))


def deal(
    lengths: Sequence[int],
    ranks: int,
    *,
    blocks: int | None = None,
    window: int | None = None,
    device: torch.device | str = "cpu",
) -> Deal:
    """Cut a row of sequences with these lengths into `blocks` equal blocks per rank, and deal the blocks out, most work
    first: one to each rank in order, then one to each in reverse order, and so on. With one sequence and two blocks per
    rank, rank r gets block r from the start and block r from the end ("zig-zag").

    Without `blocks` it takes the smallest of 1, 2, 4 and 8 that makes the work even. Raises ValueError if the row
    cannot be cut into equal blocks.
    """
    if blocks is None:
        for few in BLOCKS[:-1]:
            dealt = deal(lengths, ranks, blocks=few, window=window, device=device)
            if dealt.uneven <= EVEN:
                return dealt
        blocks = BLOCKS[-1]
    total = sum(lengths)
    if total % (ranks * blocks):
        raise ValueError(
            f"a row of {total} tokens does not divide into {blocks} blocks for each of {ranks} ranks: pad it to a "
            f"multiple of {ranks * blocks}"
        )
    size = total // (ranks * blocks)
    costs = [_work(_pieces(lengths, i * size, (i + 1) * size), window) for i in range(ranks * blocks)]
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    turns = [order[i : i + ranks][:: -1 if i // ranks % 2 else 1] for i in range(0, len(order), ranks)]
    own = [sorted(line) for line in zip(*turns, strict=True)]
    places = tuple(torch.cat([torch.arange(i * size, (i + 1) * size) for i in line]) for line in own)
    return Deal(
        runs=tuple(tuple(_pieces(lengths, a * size, b * size) for a, b in _runs(line)) for line in own),
        places=tuple(sent(x, device) for x in places),
        back=sent(torch.cat(places).argsort(), device),
        work=tuple(sum(costs[i] for i in line) for line in own),
    )


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The first number and the end (one past the last) of each run of consecutive numbers."""
    cuts = [0, *(i for i in range(1, len(numbers)) if numbers[i] > numbers[i - 1] + 1), len(numbers)]
    return [(numbers[a], numbers[b - 1] + 1) for a, b in itertools.pairwise(cuts)]


def _pieces(lengths: Sequence[int], first: int, last: int) -> tuple[Piece, ...]:
    """Tokens `first` to `last` of the row, split by sequence."""
    found, begin = [], 0
    for length in lengths:
        start, stop = max(first - begin, 0), min(last - begin, length)
        if start < stop:
            found.append(Piece(begin, start, stop))
        begin += length
    return tuple(found)


def _work(pieces: Sequence[Piece], window: int | None) -> int:
    """The number of visible (query, key) pairs with queries in these pieces, with a `window` those within it."""

    def up_to(n: int) -> int:
        width = n if window is None else min(n, window)
        return width * (width + 1) // 2 + (n - width) * width

    return sum(up_to(piece.stop) - up_to(piece.start) for piece in pieces)


class _Seen(NamedTuple):
    """A run of a rank's tokens, and the keys that it sees: tokens `first` to `last` of the packed row."""

    lengths: Lengths
    first: int
    last: int
    key_lengths: Lengths


def _seen(run: Sequence[Piece], window: int | None, device: torch.device) -> _Seen:
    """The keys that a run sees. All pieces of a run but the first are the beginnings of their sequences, so the keys
    are consecutive tokens of the row."""
    if not run:
        none = make_lengths([], device)
        return _Seen(none, 0, 0, none)
    skipped = 0 if window is None else max(0, run[0].start - window + 1)
    keys = [run[0].stop - skipped, *(piece.stop for piece in run[1:])]
    return _Seen(
        lengths=make_lengths([piece.size for piece in run], device),
        first=run[0].begin + skipped,
        last=run[-1].begin + run[-1].stop,
        key_lengths=make_lengths(keys, device),
    )


def gathered_attention(kernel: Callable[..., Tensor], deal: Deal, axis: Axis) -> Callable[..., Tensor]:
    """Adapt an attention kernel to a rank's tokens [N / c, H, D] of a dealt row, by one all-gather of keys and values.

    Its backward pass scatters their gradients. `kernel` is called once for each run of the rank's tokens. The result
    takes the lengths of the whole row. Raises ValueError for a kernel without `key_lengths`.
    """
    check_key_lengths(
        kernel,
        "a context axis needs: a rank's queries are the last tokens of the sequences whose keys they see",
    )

    @functools.cache  # layers have one or two different windows
    def runs(window: int | None, device: torch.device) -> list[_Seen]:
        return [_seen(run, window, device) for run in deal.runs[axis.rank]]

    def attend(
        query: Float[Tensor, "n q d"],
        key: Float[Tensor, "n k d"],
        value: Float[Tensor, "n k e"],
        *,
        lengths: Lengths,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Float[Tensor, " q"] | None = None,
    ) -> Float[Tensor, "n q e"]:
        check_dealt(query, lengths, deal, axis)
        row = all_gather(torch.cat([key, value], -1), axis).index_select(0, deal.back)
        keys, values = row.split([key.shape[-1], value.shape[-1]], -1)
        seen = runs(window, query.device)
        queries = query.split([sum(x.lengths.lengths) for x in seen])
        outputs = [
            kernel(
                q,
                keys[x.first : x.last],
                values[x.first : x.last],
                lengths=x.lengths,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                key_lengths=x.key_lengths,
            )
            for q, x in zip(queries, seen, strict=True)
        ]
        return torch.cat(outputs)

    return attend


def check_dealt(query: Tensor, lengths: Lengths, deal: Deal, axis: Axis) -> None:
    """Raise ValueError unless the row's lengths, and a rank's queries [N / c, H, D], have the dealt row's tokens."""
    total, dealt = sum(lengths.lengths), len(deal.back)
    if total != dealt or len(query) * axis.size != dealt:
        raise ValueError(
            f"the row that was dealt has {dealt} tokens, but lengths have {total} tokens, and {axis.size} ranks hold "
            f"{len(query)} each"
        )
