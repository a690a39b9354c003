"""Generalised advantage estimates of 512 rows: our kernels beside verl's loop over time, without whitening.

    python experiments/bench/gae.py

verl's own `compute_gae_advantage_return` where verl is installed (with its whitening taken out), else the same
recurrence, written here. Rows end at random; "holes" takes one token in ten out of the mask, besides. float32, seconds
of all threads' time on the processor, medians of repeated calls, which find the memory of the call before; "fresh" is
the peer's time over ours when every call must get its memory from the system, where ours mostly clears pages for its
results.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from bench_tools import empty_heap
from torch import Tensor

from fppo_kernels import table

GAMMA, LAM = 1.0, 0.95


def time_loop(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """verl's recurrence; `mask` is float [B, T]."""
    with torch.no_grad():
        following = carry = torch.zeros(())
        reversed_columns = []
        for t in reversed(range(rewards.shape[1])):
            delta = rewards[:, t] + gamma * following - values[:, t]
            ahead = delta + gamma * lam * carry
            following = values[:, t] * mask[:, t] + (1 - mask[:, t]) * following
            carry = ahead * mask[:, t] + (1 - mask[:, t]) * carry
            reversed_columns.append(carry)
        advantages = torch.stack(reversed_columns[::-1], dim=1)
        return advantages, advantages + values


def peer() -> tuple[str, Callable[..., tuple[Tensor, Tensor]]]:
    """The name of the loop that stands for the peer, and the loop."""
    try:
        from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]
    except ImportError:
        return "verl's recurrence", time_loop

    def without_whitening(*arguments: Tensor | float) -> tuple[Tensor, Tensor]:
        with mock.patch.object(core_algos.verl_F, "masked_whiten", lambda x, mask: x):
            return core_algos.compute_gae_advantage_return(*arguments)

    return "verl", without_whitening


def draw(rows: int, length: int, holes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and a mask [B, T]."""
    generator = torch.Generator().manual_seed(length)
    rewards, values = torch.randn(2, rows, length, generator=generator).unbind()
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    return rewards, values, mask & (torch.rand(rows, length, generator=generator) < 0.9) if holes else mask


def repeated(fn: Callable[[], object], repeats: int, *, fresh: bool) -> float:
    """The median seconds of calls after the first, with an empty heap before each or as the one before left it."""
    seconds = []
    for _ in range(repeats + 1):
        if fresh:
            empty_heap()
        start = time.process_time()
        fn()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[1:])


def main(rows: int, lengths: list[int], repeats: int, threads: int) -> None:
    torch.set_num_threads(threads)
    name, loop_over_time = peer()
    kernels = [each for each, reason in table.available("gae").items() if reason is None]
    print(f"[{rows}, T], {threads} threads, torch {torch.__version__}; the peer is {name}")
    print(f"{'T':>6} {'mask':<8}{'kernel':<8}{'peer, ms':>10}{'ours, ms':>10}{'times':>8}{'fresh':>8}{'apart':>10}")
    for length in lengths:
        for holes in (False, True):
            rewards, values, mask = draw(rows, length, holes)
            theirs = partial(loop_over_time, rewards, values, mask.float(), GAMMA, LAM)
            slow, slow_fresh = (repeated(theirs, repeats, fresh=fresh) for fresh in (False, True))
            for kernel in kernels:
                ours = partial(table.get("gae", kernel), rewards, values, mask, gamma=GAMMA, lam=LAM)
                apart = (theirs()[0].where(mask, 0.0) - ours()[0]).abs().max().item()
                fast, fast_fresh = (repeated(ours, repeats, fresh=fresh) for fresh in (False, True))
                print(
                    f"{length:>6} {'holes' if holes else 'ragged':<8}{kernel:<8}{1e3 * slow:>10.1f}{1e3 * fast:>10.1f}"
                    f"{slow / fast:>8.1f}{slow_fresh / fast_fresh:>8.1f}{apart:>10.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, default=512)
    arguments.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()
    main(options.rows, options.lengths, options.repeats, options.threads)
