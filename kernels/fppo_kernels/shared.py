# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Attention over a packed row that holds common prefixes of sequences once, for any number of continuations.

The row is cut into pieces. A piece follows another one, its parent, or none. A token sees all tokens of the piece's
ancestors, and those before it in its own piece. Prompts as parents of their responses are such a forest, and so are
turns that share a history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fppo_kernels.padding import Lengths, make_lengths, sent
from fppo_kernels.shapes import Float, Int
from fppo_kernels.table import check_key_lengths
from fppo_kernels.transforms import active


class Branch(NamedTuple):
    """A run of tokens of a packed row, and the index of its parent run, -1 for none."""

    size: int
    parent: int = -1


class Readings(NamedTuple):
    """M readings of `total` = N tokens; a token may be read several times, or never."""

    tokens: Int[Tensor, " m"]  # the token of each reading
    total: int  # N
    rounds: tuple[tuple[Int[Tensor, " r"], Int[Tensor, " r"]], ...]  # each: distinct tokens, a reading of each


class SharedKeys(NamedTuple):
    """The M keys that the pieces of a packed row of N tokens see; a token seen by several pieces counts as several."""

    lengths: Lengths  # lengths of the pieces
    key_lengths: Lengths  # lengths of the keys that each piece sees, its own tokens last
    keys: Readings


def share(pieces: Sequence[Branch], device: torch.device | str = "cpu") -> SharedKeys:
    """The keys that the pieces of a row see, with the pieces in this order; computed on the host.

    Raises ValueError for a piece without tokens, or one whose parent does not come before it.
    """
    runs: list[list[tuple[int, int]]] = []  # for each piece, the begin and end of what it sees
    total = 0
    for number, (size, parent) in enumerate(pieces):
        if size < 1 or not -1 <= parent < number:
            raise ValueError(
                f"piece {number} has {size} tokens and follows piece {parent}: give it 1 or more tokens, and a parent "
                "that comes before it, or -1"
            )
        runs.append([*(runs[parent] if parent >= 0 else []), (total, total + size)])
        total += size
    keys = torch.cat([torch.arange(0), *(torch.arange(a, b) for path in runs for a, b in path)])
    return SharedKeys(
        lengths=make_lengths([piece.size for piece in pieces], device),
        key_lengths=make_lengths([sum(b - a for a, b in path) for path in runs], device),
        keys=readings(keys, total, device),
    )


def readings(tokens: Int[Tensor, " m"], count: int, device: torch.device | str = "cpu") -> Readings:
    """Make the readings of `tokens` [M], out of `count` tokens: computed on the host, and copied to `device`."""
    reads = tokens.bincount(minlength=count)
    order = tokens.argsort(stable=True)  # readings of one token are adjacent
    begins = reads.cumsum(0) - reads
    rounds: list[tuple[Tensor, Tensor]] = []
    for number in range(int(reads.max()) if count else 0):
        again = (reads > number).nonzero().flatten()
        rounds.append((sent(again, device), sent(order[begins[again] + number], device)))
    return Readings(sent(tokens, device), count, tuple(rounds))


class _Read(torch.autograd.Function):
    """Index rows, x[tokens], with a gradient that is summed in a fixed order, in float32 or wider, on every device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reads: Readings) -> Tensor:
        ctx.reads = reads
        return x.index_select(0, reads.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        reads, grad = ctx.reads, grads[0]
        wide = torch.promote_types(grad.dtype, torch.float32)
        if reads.rounds and len(reads.rounds[0][0]) == reads.total:
            total, rounds = grad.index_select(0, reads.rounds[0][1]).to(wide), reads.rounds[1:]
        else:
            total, rounds = grad.new_zeros((reads.total, *grad.shape[1:]), dtype=wide), reads.rounds
        for tokens, places in rounds:  # no token twice, so sums have a fixed order
            total.index_add_(0, tokens, grad.index_select(0, places).to(wide))
        return total.to(grad.dtype), None


def read(x: Float[Tensor, " n *k"], reads: Readings) -> Float[Tensor, " m *k"]:
    """Index rows, x[tokens] of the readings, with a gradient that is summed in a fixed order, in float32 or wider, on
    every device."""
    return x.index_select(0, reads.tokens) if active() else _Read.apply(x, reads)  # type: ignore[return-value]


def shared_attention(kernel: Callable[..., Tensor], shared: SharedKeys) -> Callable[..., Tensor]:
    """Adapt an attention kernel to a packed row [N, H, D] of pieces: one gather of keys and values, and one call.

    `kernel` gets N queries and M keys: the queries of a piece are the last tokens of the keys that it sees. The result
    takes the lengths of the pieces. Raises ValueError for a kernel without `key_lengths`.
    """
    check_key_lengths(kernel, "shared prompts need: a response's queries are the last tokens of the keys that it sees")

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
        if lengths.lengths != shared.lengths.lengths:
            raise ValueError(
                f"lengths are those of {len(lengths.lengths)} sequences of {sum(lengths.lengths)} tokens, and the row "
                f"has {len(shared.lengths.lengths)} pieces of {sum(shared.lengths.lengths)}"
            )
        return kernel(
            query,
            read(key, shared.keys),
            read(value, shared.keys),
            lengths=shared.lengths,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            key_lengths=shared.key_lengths,
        )

    return attend
