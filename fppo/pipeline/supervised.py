"""Steps of a supervised run: a batch of demonstrations, and the policy's update on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import attrs
from torch import Tensor

from fppo import metrics
from fppo.data.cursor import DataCursor
from fppo.metrics import Metrics
from fppo.pipeline.passes import PolicyFn, required
from fppo.pipeline.program import RunState
from fppo.pipeline.step import check_updates
from fppo.pipeline.timing import timed
from fppo.pipeline.train import StepsOf, Watching, repeated
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.steps.clock import at_step, between
from fppo.steps.supervised import Demonstrations
from fppo.tree import replace

DrawDemonstrations = Callable[[DataCursor], tuple[Demonstrations, DataCursor]]
NLL = "nll_loss"


@attrs.frozen(kw_only=True)
class Imitation:
    """The constants of a supervised run: how batches are drawn, and the update on one."""

    draw: DrawDemonstrations
    update: Any  # an `UpdateSupervised`, or a stage around one
    steps: int  # of the whole run, for a state with a clock


def imitate_step(
    run: RunState, *, imitation: Imitation, donate: bool = False
) -> tuple[RunState, Demonstrations, Metrics]:
    """Run the next step: update the policy on demonstrations drawn from `run.cursor`.

    `donate` gives up the memory of the policy's state. Raises RunFailed if all first updates were skipped.
    """
    batch, cursor = imitation.draw(run.cursor)
    state = run.actor
    if state.clock is not None:
        state = replace(state, clock=at_step(state.clock, run.step, imitation.steps))
    key = run.key.fold("step", run.step).fold("actor")
    after, report = timed("update_actor", imitation.update)(state, batch, key=key, donate=donate)
    if after.clock is not None:
        after = replace(after, clock=between(after.clock))
    done = replace(run, actor=after, cursor=cursor, step=run.step + 1)
    check_updates("supervised", run.actor.step, done, report)
    return done, batch, report | lengths_of(batch)


def lengths_of(batch: Demonstrations) -> Metrics:
    """Metrics of a batch: lengths of its rows in tokens, and numbers of imitated tokens."""
    attended, imitated = batch.attention_mask.sum(1), batch.response_mask.sum(1)
    every = attended > 0
    return {
        "perf/total_num_tokens": metrics.mean(batch.attention_mask.sum()),
        "row_length/mean": metrics.masked_mean(attended, every),
        "row_length/max": metrics.masked_max(attended, every),
        "response_length/mean": metrics.masked_mean(imitated, every),
    }


def imitate_steps(
    run: RunState,
    *,
    imitation: Imitation,
    mesh: Mesh = LOCAL,
    donate: bool = False,
    watching: Watching | None = None,
) -> StepsOf:
    """Iterate over steps, without end unless they are watched. With `donate` each step takes over the memory of the
    state before."""
    step = partial(imitate_step, imitation=imitation, donate=donate)
    return repeated(step, run, mesh=mesh, watching=watching)


@attrs.frozen(kw_only=True)
class EvaluateLoss:
    """The mean negative log-likelihood of held-out demonstrations per imitated token, by source, in nats."""

    batches: Callable[[], Iterable[tuple[Demonstrations, list[str]]]]  # with the source of each row
    policy: PolicyFn

    def __call__(self, run: RunState) -> Metrics:
        """The losses under the policy of `run`."""
        found: Metrics = {}
        for batch, sources in self.batches():
            log_probs = required(self.policy(run.actor.params, batch, outputs=("log_probs",)).log_probs)
            for source in dict.fromkeys(sources):
                part = batch.response_mask & _rows_of(source, sources, batch.response_mask)
                name = f"val-core/{source}/{NLL}/mean@1"
                found = metrics.merge(found, {name: metrics.masked_mean(-log_probs, part)})
        return found


def _rows_of(source: str, sources: list[str], mask: Tensor) -> Tensor:
    """Whether each row comes from `source`, bool [B, 1] on the device of `mask`."""
    return mask.new_tensor([x == source for x in sources])[:, None]
