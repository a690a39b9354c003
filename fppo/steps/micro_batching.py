"""Grouping of rows into passes of a model. Batch sizes count sequences everywhere."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import attrs
import numpy as np


@attrs.frozen
class MicroBatching:
    """The size of a micro-batch: `size` sequences, or as many as fit into `token_budget` real tokens. With
    `halve_on_oom` a pass that runs out of memory is repeated with half of the tokens."""

    size: int | None = None
    token_budget: int | None = None
    halve_on_oom: bool = False

    def __attrs_post_init__(self) -> None:
        if (self.size is None) == (self.token_budget is None):
            raise ValueError(
                f"micro-batching needs one of size ({self.size}) and token_budget ({self.token_budget}), not both"
            )
        if (self.size or self.token_budget or 0) < 1:
            raise ValueError(f"micro-batching of {self.size or self.token_budget}: give 1 or more")
        if self.halve_on_oom and self.token_budget is None:
            raise ValueError("halve_on_oom halves a token budget: give token_budget in place of size")

    @property
    def halved_from(self) -> int | None:
        """The token budget to begin with, where it may be halved; else None."""
        return self.token_budget if self.halve_on_oom else None


def partition(lengths: Sequence[int], micro_batching: MicroBatching) -> list[list[int]]:
    """The row indices of each micro-batch, ascending within one; every row is in exactly one.

    With a budget, a micro-batch exceeds it only if it is a single sequence.
    """
    if micro_batching.size is not None:
        step = micro_batching.size
        return [list(range(i, min(i + step, len(lengths)))) for i in range(0, len(lengths), step)]
    assert micro_batching.token_budget is not None
    return fit(lengths, micro_batching.token_budget)


def fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Few groups of at most `budget` tokens each, balanced where that fits, else by best fit decreasing."""
    if not len(lengths):
        return []
    bound = max(-(-int(np.sum(lengths)) // budget), 1)
    if int(np.max(lengths)) <= budget:
        balanced = balance(lengths, min(bound, len(lengths)))
        if all(sum(lengths[i] for i in part) <= budget for part in balanced):
            return balanced
    return _best_fit(lengths, budget)


def _best_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Best fit decreasing: each sequence, longest first, goes to the fullest group that still has room."""
    free: list[tuple[int, int]] = []  # (tokens left, group), ascending
    groups: list[list[int]] = []
    values = np.asarray(lengths)
    order = np.argsort(-values, kind="stable").tolist()
    sizes = values.tolist()
    for i in order:
        size = sizes[i]
        at = bisect.bisect_left(free, (size, -1))
        if at < len(free):
            left, group = free.pop(at)
            groups[group].append(i)
        else:
            left, group = budget, len(groups)
            groups.append([i])
        if left - size > 0:
            bisect.insort(free, (left - size, group))
    return [sorted(group) for group in groups]


def balance(lengths: Sequence[int], count: int) -> list[list[int]]:
    """`count` non-empty groups of nearly equal numbers of tokens.

    The longest sequence first, each to the lightest group (LPT: at most 4/3 of the best possible, Graham, 1969); then
    the heaviest and the lightest group trade the two sequences that bring them closest, while that helps. Raises
    ValueError for fewer rows than groups.
    """
    if not 1 <= count <= len(lengths):
        raise ValueError(f"cannot share {len(lengths)} sequences among {count} groups")
    values = np.asarray(lengths)
    order = np.argsort(-values, kind="stable").tolist()
    sizes = values.tolist()
    groups: list[list[int]] = [[i] for i in order[:count]]
    heap = [(sizes[i], k) for k, i in enumerate(order[:count])]
    heapq.heapify(heap)
    for i in order[count:]:
        load, k = heap[0]
        groups[k].append(i)
        heapq.heapreplace(heap, (load + sizes[i], k))
    loads = np.zeros(count, dtype=values.dtype)
    for load, k in heap:
        loads[k] = load
    for _ in range(count):
        if not _trade_(groups, loads, values):
            break
    return [sorted(group) for group in groups]


def _trade_(groups: list[list[int]], loads: np.ndarray, values: np.ndarray) -> bool:
    """Trade two sequences between the groups of the greatest and the least of `loads`, all in place, by the sequences'
    `values`; return whether a trade helped."""
    heavy, light = int(loads.argmax()), int(loads.argmin())
    gap = int(loads[heavy] - loads[light])
    if gap < 2:
        return False
    moves = values[groups[heavy]][:, None] - values[groups[light]][None, :]
    distance = np.abs(2 * moves - gap)
    a, b = np.unravel_index(int(distance.argmin()), distance.shape)
    if distance[a, b] >= gap:
        return False
    moved = int(moves[a, b])
    groups[heavy][a], groups[light][b] = groups[light][b], groups[heavy][a]
    loads[heavy] -= moved
    loads[light] += moved
    return True
