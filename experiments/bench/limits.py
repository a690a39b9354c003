"""Runs under limits of memory, with `token_budget = "auto"`: what they end with, and their time.

    python experiments/bench/limits.py

Each run makes updates of an actor or a critic in float64. Its limit is a share of the bytes that the default budget
keeps alive. Beside it stands the best fixed budget: of those that fit under the same limit, the one that takes least.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fppo import losses, models
from fppo._errors import RunFailed
from fppo.key import Key
from fppo.steps.actor import UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests import tiny
from tests.limited import Limited

BUDGET = 16384  # that of "auto" at first
FIXED = [BUDGET, 2048, 1024, 512, 256, 128, 64]
HEADS: tuple[Literal["lm", "value"], ...] = ("lm", "value")


class Outcome(NamedTuple):
    """What the updates of a run came to."""

    params: dict[str, Tensor]
    seconds: float  # of processor
    peak: int  # bytes alive
    failures: int  # allocations for which there was no memory
    budget: int | None


def run(
    head: Literal["lm", "value"], cut: MicroBatching, limit: float, *, steps: int, width: int, rows: int
) -> Outcome:
    """Make updates, each of two mini-batches, within a limit on the bytes that are alive."""
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": 128}
    model = models.build(tiny.config(**sizes), head=head)
    params = {name: x.double() for name, x in models.init_params(model, Key(0)).items()}
    make = partial(UpdateActor, loss_fn=losses.ppo_clip) if head == "lm" else UpdateCritic
    optimizer = adamw(schedule("constant", 1e-3))
    update = make(forward=Forward(model), optimizer=optimizer, loop=Loop(mini_batch_size=rows // 2, micro_batching=cut))
    state = init_state(params, optimizer, token_budget=cut.halved_from)
    batch = tiny.experience(3, rows, prompt=24, response=40)
    start = time.process_time()
    with Limited(limit) as limited:
        for step in range(steps):
            state, _ = update(state, batch, key=Key(step), donate=step > 0)
    seconds = time.process_time() - start
    return Outcome(state.params, seconds, limited.peak, limited.failures, state.token_budget)


def main(*, limits: int = 10, steps: int = 10, width: int = 128, rows: int = 64) -> None:
    sized = partial(run, steps=steps, width=width, rows=rows)
    columns = (("", 8), ("limit", 7), ("MiB", 8), ("failures", 10), ("budget", 8), ("difference", 12), ("s", 8))
    print("".join(f"{name:>{width}}" for name, width in (*columns, ("best fixed", 12), ("ratio", 7))))
    for head in HEADS:
        sized(head, MicroBatching(token_budget=BUDGET), float("inf"))  # warms up
        fixed = [sized(head, MicroBatching(token_budget=tokens), float("inf")) for tokens in FIXED]
        whole = fixed[0]
        for place in range(limits):
            limit = (0.3 + 0.6 * place / max(limits - 1, 1)) * whole.peak
            line = f"{head:<8}{limit / whole.peak:>7.2f}{limit / 2**20:>8.1f}"
            try:
                found = sized(head, MicroBatching(token_budget=BUDGET, halve_on_oom=True), limit)
            except RunFailed as error:
                print(f"{line}  {error}")
                continue
            difference = max(float((found.params[name] - x).abs().max()) for name, x in whole.params.items())
            best = min((one.seconds for one in fixed if one.peak <= limit), default=float("nan"))
            print(
                f"{line}{found.failures:>10}{found.budget:>8}{difference:>12.1e}{found.seconds:>8.2f}{best:>12.2f}"
                f"{found.seconds / best:>7.2f}"
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
