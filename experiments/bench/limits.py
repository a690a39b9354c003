"""Runs under limits of memory, with `token_budget = "auto"`: what they end with, what failures cost, and their time.

    python experiments/bench/limits.py

Each run makes updates of an actor or a critic in float64. Its limit is a share of the bytes that the default budget
keeps alive. What fits is found in the first update; later ones take what an update of the budget found takes, which is
timed without limits, in turn with all fixed budgets: medians of processor time. Beside it stands the best fixed budget:
of those that fit under the same limit, the one that takes least. The last column is the ratio of whole runs of `--run`
updates, with what the failures cost: the first update, less one that knows its budget, both under the limit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import attrs
import torch
from torch import Tensor

from fppo import losses, models, tree
from fppo._errors import RunFailed
from fppo.key import Key
from fppo.steps.actor import UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import TrainState, init_state
from tests import tiny
from tests.limited import Limited

BUDGET = 16384  # that of "auto" at first
FIXED = [BUDGET, 2048, 1024, 512, 256, 128, 64]
AUTO = MicroBatching(token_budget=BUDGET, halve_on_oom=True)
HEADS: tuple[Literal["lm", "value"], ...] = ("lm", "value")
Update = Callable[..., tuple[TrainState, Any]]


class Task(NamedTuple):
    """Updates of two mini-batches each, by how they are cut, from one state."""

    update: Callable[[MicroBatching], Update]
    state: TrainState
    batch: Any


class Outcome(NamedTuple):
    """What the updates of a run came to."""

    params: dict[str, Tensor]
    seconds: list[float]  # of processor, for each update
    peak: int  # bytes alive
    failures: int  # allocations for which there was no memory
    budget: int | None


def task_of(head: Literal["lm", "value"], *, width: int, rows: int) -> Task:
    """Updates of a model with this head over so many rows."""
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": 128}
    model = models.build(tiny.config(**sizes), head=head)
    params = {name: x.double() for name, x in models.init_params(model, Key(0)).items()}
    make = partial(UpdateActor, loss_fn=losses.ppo_clip) if head == "lm" else UpdateCritic
    optimizer = adamw(schedule("constant", 1e-3))

    def update(cut: MicroBatching) -> Update:
        loop = Loop(mini_batch_size=rows // 2, micro_batching=cut)
        return make(forward=Forward(model), optimizer=optimizer, loop=loop)

    return Task(update, init_state(params, optimizer), tiny.experience(3, rows, prompt=24, response=40))


def run(task: Task, cut: MicroBatching, limit: float, *, steps: int, budget: int | None = None) -> Outcome:
    """Make updates within a limit on the bytes that are alive. `budget` is what an earlier update found."""
    update, seconds = task.update(cut), []
    state = tree.replace(tree.copy(task.state), token_budget=budget or cut.halved_from)
    with Limited(limit) as limited:
        for step in range(steps):
            start = time.process_time()
            state, _ = update(state, task.batch, key=Key(step), donate=step > 0)
            seconds.append(time.process_time() - start)
    return Outcome(state.params, seconds, limited.peak, limited.failures, state.token_budget)


def timed(task: Task, cuts: Sequence[MicroBatching], repeats: int) -> list[float]:
    """Seconds of a processor for an update with each cut: medians of updates in turn, after one of each."""
    updates = [task.update(cut) for cut in cuts]
    found: list[list[float]] = [[] for _ in cuts]
    for number in range(1 + repeats):
        for own, update in zip(found, updates, strict=True):
            start = time.process_time()
            update(task.state, task.batch, key=Key(0))
            own += [time.process_time() - start] if number else []
    return [statistics.median(own) for own in found]


def measure(head: Literal["lm", "value"], options: argparse.Namespace) -> None:
    """Print the lines of a head."""
    task = task_of(head, width=options.width, rows=options.rows)
    fixed = [MicroBatching(token_budget=tokens) for tokens in FIXED]
    peaks = [run(task, cut, float("inf"), steps=1).peak for cut in fixed]
    whole = run(task, fixed[0], float("inf"), steps=options.steps)
    shares = [0.3 + 0.6 * place / max(options.limits - 1, 1) for place in range(options.limits)]
    runs: dict[float, Outcome] = {}
    for share in shares:
        try:
            runs[share] = run(task, AUTO, share * whole.peak, steps=options.steps)
        except RunFailed as error:
            print(f"{head:<8}{share:>7.2f}  {error}")
    budgets = sorted({x.budget for x in runs.values() if x.budget is not None})
    seconds = timed(task, [*fixed, *(attrs.evolve(AUTO, token_budget=x) for x in budgets)], options.repeats)
    later = dict(zip(budgets, seconds[len(fixed) :], strict=True))
    for share, found in runs.items():
        assert found.budget is not None
        limit = share * whole.peak
        difference = max(float((found.params[name] - x).abs().max()) for name, x in whole.params.items())
        cost = found.seconds[0] - statistics.median(found.seconds[1:])
        best, tokens = min((s, t) for s, t, peak in zip(seconds, FIXED, peaks, strict=False) if peak <= limit)
        own = later[found.budget]
        print(
            f"{head:<8}{share:>7.2f}{limit / 2**20:>8.1f}{found.failures:>10}{found.budget:>8}{difference:>12.1e}"
            f"{cost:>9.2f}{own:>9.3f}{best:>9.3f}{tokens:>7}{own / best:>7.2f}"
            f"{(options.run * own + cost) / (options.run * best):>7.2f}",
            flush=True,
        )


def main() -> None:
    """Prints a line for each head and limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="updates under a limit")
    parser.add_argument("--repeats", type=int, default=7, help="timed updates of each budget")
    parser.add_argument("--run", type=int, default=100, help="updates of the run whose ratio is the last column")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = (("", 8), ("limit", 7), ("MiB", 8), ("failures", 10), ("budget", 8), ("difference", 12), ("cost, s", 9))
    columns += (("later, s", 9), ("fixed, s", 9), ("best", 7), ("ratio", 7), ("run", 7))
    print("".join(f"{name:>{width}}" for name, width in columns), flush=True)
    for head in HEADS:
        measure(head, options)


if __name__ == "__main__":
    main()
