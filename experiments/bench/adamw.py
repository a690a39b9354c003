"""One step on 110 M float32 parameters: ours, donated, beside torch.optim.AdamW(fused=True) + clip_grad_norm_.

    python experiments/bench/adamw.py

Each side runs in processes of its own, in turn; seconds are the median of all steps after the first of each process,
memory is the high-water mark (VmHWM) of the whole process, with parameters, gradients and moments.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from fppo.steps.optimizers import adamw
from fppo.steps.train_state import Params, init_state, optimizer_step


def parameters(layers: int, width: int, vocabulary: int) -> Params:
    """Random tensors in the shapes of a decoder."""
    shapes = {"embed": (vocabulary, width)}
    for i in range(layers):
        shapes |= {f"{i}.{name}": (width, width) for name in "qkvo"}
        shapes |= {f"{i}.gate": (8 * width // 3, width), f"{i}.up": (8 * width // 3, width)}
        shapes |= {f"{i}.down": (width, 8 * width // 3), f"{i}.norm_1": (width,), f"{i}.norm_2": (width,)}
    return {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}


def gradients(params: Params) -> Params:
    return {name: torch.full_like(p, 1e-3) for name, p in params.items()}


def ours(params: Params) -> Iterator[Callable[[], object]]:
    """A step at a time; what stands before the yield is not timed."""
    optimizer = adamw(lambda step: 1e-4)
    state = init_state(params, optimizer)
    while True:
        grads = gradients(state.params)

        def step(grads: Params = grads) -> None:
            nonlocal state
            state, _ = optimizer_step(state, grads, optimizer=optimizer, donate=True)

        yield step


def torchs(params: Params) -> Iterator[Callable[[], object]]:
    """The same with torch alone."""
    leaves: list[Tensor] = [p.requires_grad_() for p in params.values()]
    optimizer = torch.optim.AdamW(leaves, lr=1e-4, fused=True)
    while True:
        for leaf, grad in zip(leaves, gradients(params).values(), strict=True):
            leaf.grad = grad.detach()

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(leaves, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)  # a donated step gives its gradients back, too

        yield step


def run(side: str, sizes: tuple[int, int, int], steps: int, threads: int, results: Connection) -> None:
    """Sends (number of parameters, seconds of each step but the first, VmHWM in MiB)."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    params, seconds = parameters(*sizes), []
    count = sum(p.numel() for p in params.values())
    iterator = (ours if side == "ours" else torchs)(params)
    for _ in range(steps + 1):
        step = next(iterator)
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        del step
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    results.send((count, seconds[1:], int(status["VmHWM"].split()[0]) / 1024))


def measure(sizes: tuple[int, int, int], steps: int, rounds: int, threads: int) -> dict[str, tuple[int, float, float]]:
    """(Parameters, median seconds, median MiB) of each side."""
    context, runs = multiprocessing.get_context("spawn"), {"ours": [], "torch": []}
    for side in [*runs] * rounds:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(side, sizes, steps, threads, sender))
        process.start()
        runs[side].append(receiver.recv())
        process.join()
    return {
        side: (
            results[0][0],
            statistics.median(s for _, seconds, _ in results for s in seconds),
            statistics.median(memory for _, _, memory in results),
        )
        for side, results in runs.items()
    }


def main(sizes: tuple[int, int, int] = (12, 768, 32000), steps: int = 7, rounds: int = 3, threads: int = 1) -> None:
    results = measure(sizes, steps, rounds, threads)
    (count, time_ours, memory_ours), (_, time_torch, memory_torch) = results["ours"], results["torch"]
    print(f"{count / 1e6:.1f} M parameters, {threads} thread(s), torch {torch.__version__}")
    print(f"{'':<14}{'ours':>12}{'torch':>12}{'ours / torch':>15}")
    print(f"{'step, ms':<14}{1e3 * time_ours:>12.1f}{1e3 * time_torch:>12.1f}{time_ours / time_torch:>15.3f}")
    print(f"{'peak, MiB':<14}{memory_ours:>12.0f}{memory_torch:>12.0f}{memory_ours / memory_torch:>15.3f}")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--steps", type=int, default=7)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=1, help="more than one only on idle cores")
    options = arguments.parse_args()
    main((options.layers, 768, 32000), options.steps, options.rounds, options.threads)
