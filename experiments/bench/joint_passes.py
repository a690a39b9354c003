"""Gradients of eight runs over one base in joint passes, beside one run after the other, and one run with all rows.

    python experiments/bench/joint_passes.py 1M 13M --rows 2 --length 16

Processor seconds of one thread, medians of rounds in turn, in one process; importance_sampling, adapters of rank 8,
with and without one on the vocabulary head.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from shared_prompts import SIZES, spent
from tinker_speed import base_of

from fppo.serve.tinker.data import Datum
from fppo.serve.tinker.losses import Loss
from fppo.serve.tinker.runs import Adapters, create_run, forward_backward, forward_backward_together

RUNS = 8


def data_of(count: int, length: int, vocabulary: int, generator: torch.Generator) -> list[Datum]:
    """Random tokens, the second half of which counts."""
    made: list[Datum] = []
    for _ in range(count):
        tokens = torch.randint(0, vocabulary, (length + 1,), generator=generator)
        advantages = torch.randn(length, generator=generator).where(torch.arange(length) >= length // 2, 0.0)
        made.append(Datum(tokens[:-1], tokens[1:], {"logprobs": torch.full((length,), -3.0), "advantages": advantages}))
    return made


def compare(size: str, rows: int, length: int, unembed: bool, rounds: int) -> str:
    """The time of joint passes over that of the runs alone; and of one run's pass over the rows of all, the least that
    sharing can reach."""
    base, generator = base_of(size, "sdpa"), torch.Generator().manual_seed(0)
    runs = [create_run(base, Adapters(8, seed=number, unembed=unembed)) for number in range(RUNS)]
    loss = Loss("importance_sampling")
    asked = [(run, data_of(rows, length, SIZES[size][3], generator), loss) for run in runs]
    works: tuple[Callable[[], object], ...] = (
        lambda: forward_backward_together(asked),
        lambda: [forward_backward(*each) for each in asked],
        lambda: forward_backward(runs[0], [datum for _, data, _ in asked for datum in data], loss),
    )
    times = [[spent(work) for work in works] for _ in range(rounds + 1)][1:]
    joint, alone, one = (statistics.median(each) for each in zip(*times, strict=True))
    head = "with the head's adapter" if unembed else "without the head's"
    shares = f"{joint / alone:.2f}, one run with all rows {one / alone:.2f}"
    return f"{size} {RUNS} runs of {rows} x {length} tokens, {head}: {shares} of {alone:.2f} s"


def main() -> None:
    """Prints a line for each size and shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="+", choices=list(SIZES))
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in options.sizes:
        for unembed in (False, True):
            print(compare(size, options.rows, options.length, unembed, options.rounds), flush=True)


if __name__ == "__main__":
    main()
