"""Generalised advantage estimates of 512 rows: our scan and our loop beside verl's loop over time, without whitening.

    python experiments/bench/gae.py

verl's own `compute_gae_advantage_return` where verl is installed (with its whitening taken out), else the same
recurrence, written here. Rows end at random; "holes" takes one token in ten out of the mask, besides. float32, medians
of repeated calls, which find the memory of the call before; "fresh" is the ratio when every call must get its memory
from the system, where ours mostly waits for the pages of its results.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from bench_tools import once
from torch import Tensor

from fppo_kernels.gae.loop import loop
from fppo_kernels.gae.scan import scan

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


def repeated(fn: Callable[[], object], repeats: int) -> float:
    """The median seconds of calls after the first."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def fresh(fn: Callable[[], object], repeats: int) -> float:
    """The same with an empty heap before every call."""
    return statistics.median(once(fn, per=False).seconds for _ in range(repeats))


def main(rows: int, lengths: list[int], repeats: int, threads: int) -> None:
    torch.set_num_threads(threads)
    name, loop_over_time = peer()
    print(f"[{rows}, T], {threads} threads, torch {torch.__version__}; the peer is {name}")
    header = ("peer, ms", "loop, ms", "scan, ms", "peer / scan", "fresh", "apart")
    print(f"{'T':>6} {'mask':<7}" + "".join(f"{x:>{n}}" for x, n in zip(header, (11, 11, 11, 13, 9, 10), strict=True)))
    for length in lengths:
        for holes in (False, True):
            rewards, values, mask = draw(rows, length, holes)
            weights = mask.float()
            theirs = partial(loop_over_time, rewards, values, weights, GAMMA, LAM)
            ours = partial(scan, rewards, values, mask, gamma=GAMMA, lam=LAM)
            slow = partial(loop, rewards, values, mask, gamma=GAMMA, lam=LAM)
            apart = (theirs()[0].where(mask, 0.0) - ours()[0]).abs().max().item()
            times = [repeated(fn, repeats) for fn in (theirs, slow, ours)]
            columns = "".join(f"{1e3 * x:>11.1f}" for x in times)
            ratios = times[0] / times[2], fresh(theirs, repeats) / fresh(ours, repeats)
            columns += f"{ratios[0]:>13.1f}{ratios[1]:>9.1f}{apart:>10.1e}"
            print(f"{length:>6} {'holes' if holes else 'ragged':<7}{columns}", flush=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, default=512)
    arguments.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()
    main(options.rows, options.lengths, options.repeats, options.threads)
