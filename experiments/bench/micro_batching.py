"""Sharing 8,192 sequences of log-normal lengths: micro-batches under a token budget, and 64 equal parts.

    python experiments/bench/micro_batching.py

Beside the ratios to the bound stand those of the usual simple ways: in the order of the rows, and by equal counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fppo.steps.micro_batching import MicroBatching, balance, partition

COUNT, BUDGET, PARTS = 8192, 16384, 64


def log_normal(seed: int) -> list[int]:
    """Lengths with a median of 490, between 16 and 4,096."""
    draws = np.random.default_rng(seed).lognormal(math.log(490), 0.8, COUNT)
    return np.clip(draws, 16, 4096).astype(int).tolist()


def in_order(lengths: list[int], budget: int) -> list[list[int]]:
    """The simple way: fill a micro-batch with the rows as they come, until the next does not fit."""
    groups, room = [], 0
    for i, length in enumerate(lengths):
        if length > room or not groups:
            groups.append([])
            room = budget
        groups[-1].append(i)
        room -= length
    return groups


def by_count(lengths: list[int], count: int) -> list[list[int]]:
    """The simple way: as many rows to each."""
    return [list(range(k, len(lengths), count)) for k in range(count)]


def timed(fn: Callable[..., Any], *args: Any, repeats: int = 7) -> tuple[Any, float]:
    """What `fn` gives, and the median of its seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = fn(*args)
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def loads(groups: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in part) for part in groups]


def main(seeds: int = 5) -> None:
    print(f"{COUNT} sequences; budget {BUDGET} tokens; ratios: micro-batches / bound, heaviest / mean of {PARTS} parts")
    print(f"{'seed':<6}{'bound':>7}{'ours':>7}{'ratio':>8}{'ms':>8}{'in order':>10} |"
          f"{'balance':>10}{'ms':>8}{'by count':>10}")  # fmt: skip
    for seed in range(seeds):
        lengths = log_normal(seed)
        bound = -(-sum(lengths) // BUDGET)
        groups, seconds = timed(partition, lengths, MicroBatching(token_budget=BUDGET))
        assert max(loads(groups, lengths)) <= BUDGET
        even, even_seconds = timed(balance, lengths, PARTS)
        mean = sum(lengths) / PARTS
        print(
            f"{seed:<6}{bound:>7}{len(groups):>7}{len(groups) / bound:>8.4f}{1e3 * seconds:>8.1f}"
            f"{len(in_order(lengths, BUDGET)) / bound:>10.4f} |{max(loads(even, lengths)) / mean:>10.6f}"
            f"{1e3 * even_seconds:>8.1f}{max(loads(by_count(lengths, PARTS), lengths)) / mean:>10.6f}"
        )


if __name__ == "__main__":
    main()
