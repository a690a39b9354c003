"""Passes that run out of memory: they are cut in half and repeated, which changes no result."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import attrs
import torch
import torch.distributed as dist

from fppo import batch as batches
from fppo import devices
from fppo._errors import RunFailed, printable
from fppo.runtime.mesh import Mesh, all_reduce
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.outputs import Forward
from fppo.steps.packed import Masks, MicroBatch, blank_masks, indexed
from fppo.steps.ranks import blank, largest
from fppo_kernels.collectives import Calls

R = TypeVar("R")
_log = logging.getLogger("fppo.steps")
FAILURES = (RuntimeError, MemoryError)  # the kinds of errors that say so
# in errors of the host, oneDNN and MPS
_WORDS = (
    "not enough memory",
    "can't allocate memory",
    "bad_alloc",
    "could not create a primitive",
    "backend out of memory",
)

_APART = ("replicate", "shard")  # the axes whose ranks have rows of their own, and exchange parameters at most


def out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, had no memory for an allocation."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(text in str(error) for text in _WORDS)


def released() -> None:
    """Give back what a pass that failed has left to the allocators."""
    gc.collect()
    if devices.in_use() is not None:
        torch.accelerator.empty_cache()


def check_repeatable(mesh: Mesh) -> None:
    """Raise ValueError for a mesh whose ranks exchange what they compute of rows within a pass: if one ran out of
    memory there, the others would wait for ever."""
    waiting = [f"{name} = {axis.size}" for name, axis in mesh.axes.items() if axis.size > 1 and name not in _APART]
    if waiting:
        raise ValueError(
            f"ranks of a mesh with {', '.join(waiting)} exchange what they compute within a pass, so none can repeat "
            'it after running out of memory: give token_budget as a number, not as "auto"'
        )


def remembered(micro_batching: MicroBatching, budget: int | None, mesh: Mesh) -> MicroBatching:
    """The micro-batching to begin an update with, where a state remembers a token budget that fitted. Raises ValueError
    for passes that cannot be repeated on the mesh."""
    if not micro_batching.halve_on_oom:
        return micro_batching
    check_repeatable(mesh)
    assert micro_batching.token_budget is not None
    return attrs.evolve(
        micro_batching, token_budget=min(budget or micro_batching.token_budget, micro_batching.token_budget)
    )


def agreed(budget: int, device: torch.device, mesh: Mesh, axes: Sequence[str] = _APART) -> int:
    """The least token budget of the ranks of these axes."""
    least = torch.tensor(budget, device=device)
    for name in axes:
        least = all_reduce(least, mesh[name], dist.ReduceOp.MIN)
    return int(least)


@contextmanager
def lack_noted(*, repeat: bool) -> Iterator[list[str]]:
    """End a block early that runs out of memory, with the error's message in the list, if it may be repeated; the error
    itself would hold what the block had."""
    found: list[str] = []
    try:
        yield found
    except FAILURES as error:
        if not repeat or not out_of_memory(error):
            raise
        found.append(str(error))


def tokens_of(masks: Masks) -> int:
    """The number of tokens that a pass over rows with these masks computes: what rows share counts once."""
    return sum(masks.lengths) - sum(masks.depths)


def halved(budget: int, masks: Masks, micro_batches: Sequence[Sequence[int]], name: str, error: str) -> int:
    """The token budget to try next: `budget` halved until it cuts the largest of these micro-batches (row indices of
    `masks`) that has several rows. Raises RunFailed if each has one; `name` is the stage in messages."""
    sizes = [(len(rows) > 1, tokens_of(batches.rows(masks, rows))) for rows in micro_batches]
    several, tokens = max(sizes)
    if not several:
        raise alone(name, tokens, error)
    budget //= 2
    while budget >= tokens:
        budget //= 2
    _log.warning("%s: passes do not fit into memory; they have at most %d tokens from now on", name, budget)
    return budget


def alone(name: str, tokens: int, error: str) -> RunFailed:
    """The failure of a stage whose pass over one row of so many tokens does not fit."""
    found = printable(error.partition("\n")[0], 300)
    return RunFailed(
        f"{name}: one row of {tokens} tokens does not fit into memory by itself ({found}); shorten rows "
        "(rollout.max_tokens, data.max_prompt_tokens), or set model.checkpoint_layers, "
        "model.mlp_slice_tokens, model.offload or model.lora: "
        "docs/guides/memory.md"
    )


class _SomeRows(NamedTuple):
    """Some rows of a micro-batch. `place` is the index of the first among the rows of all micro-batches."""

    place: int
    micro: MicroBatch
    rows: range

    def taken(self, forward: Forward) -> MicroBatch:
        """These rows as a micro-batch."""
        assert self.micro.masks is not None
        if len(self.rows) == len(self.micro.masks.lengths):
            return self.micro
        return indexed(batches.rows(self.micro.rows, self.rows), batches.rows(self.micro.masks, self.rows), forward)

    def tokens(self) -> int:
        assert self.micro.masks is not None
        return tokens_of(batches.rows(self.micro.masks, self.rows))

    def cut(self, budget: int) -> list[_SomeRows]:
        """Parts of at most so many tokens, or of one row."""
        if len(self.rows) == 1 or self.tokens() <= budget:
            return [self]
        middle = len(self.rows) // 2
        first, second = self._replace(rows=self.rows[:middle]), self._replace(rows=self.rows[middle:])
        return first.cut(budget) + second._replace(place=self.place + middle).cut(budget)


def _as_parts(micro_batches: Iterable[MicroBatch]) -> Iterator[_SomeRows]:
    """Yield each micro-batch as one part."""
    place = 0
    for one in micro_batches:
        assert one.masks is not None
        yield _SomeRows(place, one, range(len(one.masks.lengths)))
        place += len(one.masks.lengths)


def in_rounds(
    run: Callable[[MicroBatch, Forward], R], micro_batches: Iterable[MicroBatch], *, forward: Forward, name: str
) -> list[R]:
    """Run passes that do not depend on each other; those that did not fit again in smaller parts, in further rounds.
    Results are in the order of the rows.

    Ranks that gather parameters together make equally many passes in each round: a rank makes one that did not fit
    again over no rows, and further ones where others have more. Raises RunFailed for a single row that does not fit;
    `name` is the stage in its message.
    """
    check_repeatable(forward.mesh)
    results: dict[int, R] = {}
    todo: Iterable[_SomeRows | None] = _as_parts(micro_batches)
    nothing: MicroBatch | None = None
    device = torch.device("cpu")
    budget = 0
    while True:
        left: list[_SomeRows] = []
        for part in todo:
            if part is None:
                assert nothing is not None  # a first round has parts alone
                run(nothing, forward)
                continue
            if nothing is None and forward.mesh.sharded:
                rows, masks = part.micro.rows, part.micro.masks
                assert masks is not None
                nothing, device = indexed(blank(rows), blank_masks(masks), forward), rows.tokens.device
            if budget and len(part.cut(budget)) > 1:
                left.append(part)
                if nothing is not None:
                    run(nothing, forward)
                continue
            calls = Calls()
            with lack_noted(repeat=True) as errors:
                results[part.place] = run(part.taken(forward), counted(forward, calls))
            if errors:
                released()
                if nothing is not None:
                    run(nothing, counted(forward, Calls(skipped=calls.begun)))
                if len(part.rows) == 1:
                    raise alone(name, part.tokens(), errors[0])
                budget = max(part.tokens() // 2, 1)
                left.append(part)
        todo = [piece for part in left for piece in part.cut(budget)]
        todo += [None] * (largest([len(todo)], forward.mesh, device)[0] - len(todo))
        if not todo:
            return [results[place] for place in sorted(results)]


def counted(forward: Forward, calls: Calls) -> Forward:
    """Passes like these that count their collectives of sharded parameters, if there are any, in `calls`."""
    return attrs.evolve(forward, mesh=forward.mesh.counted(calls)) if forward.mesh.sharded else forward
