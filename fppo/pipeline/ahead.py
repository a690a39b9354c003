"""Batches made before their step: sampled and scored with the weights of an earlier step, while that step trains.

A run that is `ahead` by k trains at step t on a batch that the policy of step t - k sampled, never an older one. Its
state holds the k batches that wait. So a batch depends on the state alone, however long anything took, and a resumed
run continues bit for bit. The batches are off-policy by k steps: `losses.rollout_correction` weighs them.

With `Program.interrupts` a step does not wait for batches of later steps, and unfinished generation goes on with the
weights of each update as soon as they exist. Then timing decides which policies sampled a batch, and its
`token_versions` record them. The state holds the finished batches, and a resumed run makes the others anew.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any

import attrs
import torch

from fppo import devices, metrics, tree
from fppo._errors import words_of
from fppo.data.cursor import DataCursor
from fppo.metrics import Metric, Metrics
from fppo.pipeline.program import Draw, Program, RunState
from fppo.pipeline.step import sample
from fppo.pipeline.timing import TIMING, now
from fppo.pipeline.waiting import Waiting
from fppo.steps.train_state import Params
from fppo.tree import replace

QUIET, PATIENCE = 5.0, 120.0  # seconds to wait for generation to end: before and after a warning
_log = logging.getLogger("fppo.pipeline")
WAIT = f"{TIMING}wait"


@attrs.frozen
class Sampled:
    """Batches for the next steps, the cursor after their prompts, and the times of sampling them."""

    batches: tuple[Waiting, ...]
    cursor: DataCursor
    timings: Metrics

    def joined(self, run: RunState) -> RunState:
        """Append these batches to those that wait in the run."""
        if not self.batches:
            return run
        return replace(run, cursor=self.cursor, ahead=(*run.ahead, *self.batches))


def sample_ahead(run: RunState, count: int, *, program: Program, draw: Draw) -> Sampled:
    """Sample the next `count` batches that `run` lacks, with its weights."""
    batches: list[Waiting] = []
    timings: list[Metrics] = []
    first = run.step + len(run.ahead)
    for step in range(first, first + count):
        run = replace(run, step=step)
        scored, cursor, report = sample(run, program=program, draw=draw)
        run = replace(run, cursor=cursor)
        seconds = {name for name in report if name.startswith("timing_s/")}  # not in the state: runs differ in them
        timings.append({name: report[name] for name in seconds})
        kept = {name: x for name, x in report.items() if name not in seconds}
        batches.append(Waiting.of(scored, kept))
    return Sampled(tuple(batches), run.cursor, metrics.merge(*timings))


def check_devices(ahead: int, ranks: int, device: torch.device) -> None:
    """Raise ValueError for batches made ahead on several GPUs.

    Two threads of a rank would call collectives of two groups, in an order that may differ between ranks. With gloo
    only the calling thread waits. NCCL's collectives are kernels, which block a GPU until the other ranks have started
    theirs.
    """
    if ahead > 0 and ranks > 1 and devices.is_accelerator(device):
        raise ValueError(
            f"rollout.ahead = {ahead} on {ranks} GPUs: what samples would wait on one GPU for what trains on another, "
            "and both for good; give rollout.ahead = 0, or one GPU"
        )


def check_interrupts(ahead: int, ranks: int) -> None:
    """Raise ValueError for `Program.interrupts` if no batches are made ahead, or on several ranks of one program, which
    would have to take newer weights at the same time."""
    if ranks > 1:
        raise ValueError(
            f"rollout.interrupt on {ranks} ranks: each would take newer weights at a time of its own; give 0, or place "
            "the roles (placement), whose controller is one process"
        )
    if not ahead:
        raise ValueError("Program.interrupts: nothing is generated while weights change; give ahead = 1 or more")


class Ended(Exception):
    """Raised in a sampling thread to end generation whose results are no longer needed."""


class NewestWeights:
    """The newest weights kept for sampling: generation takes them while later ones are trained."""

    def __init__(self) -> None:
        self._kept: tuple[Params, int] | None = None
        self._ended = False

    def __call__(self) -> tuple[Params, int] | None:
        """Return the weights and their number of updates, or None if there are none yet. Raises Ended after `end`."""
        if self._ended:
            raise Ended
        return self._kept

    def give(self, params: Params, version: int) -> None:
        """Replace the weights by `params` after `version` updates."""
        self._kept = params, version

    def end(self) -> None:
        """End generation when it next asks for weights."""
        self._ended = True


@attrs.frozen(eq=False)
class PendingBatches:
    """Batches that a thread is making, in order."""

    results: deque[Future[Sampled]]  # one batch each
    stream: torch.Stream | None = None

    @property
    def done(self) -> bool:
        """Whether all batches not yet taken are made."""
        return all(result.done() for result in self.results)

    def __call__(self, least: int | None = None) -> Sampled:
        """Wait for the next `least` batches (None: all), and take also those after them that are made already."""
        start = now()
        parts = [self.results.popleft().result() for _ in range(len(self.results) if least is None else least)]
        while self.results and self.results[0].done():
            parts.append(self.results.popleft().result())
        batches = tuple(batch for part in parts for batch in part.batches)
        timings = metrics.merge(*(part.timings for part in parts), {WAIT: metrics.spent((start, now() - start))})
        if self.stream is not None and parts:
            _hand_over([batches, timings], self.stream, torch.accelerator.current_stream())
        return Sampled(batches, parts[-1].cursor if parts else DataCursor(), timings)


def start_sampling(
    run: RunState,
    count: int,
    *,
    program: Program,
    draw: Draw,
    stream: torch.Stream | None = None,
    newest: NewestWeights | None = None,
) -> PendingBatches:
    """Start `sample_ahead` in a thread.

    The weights are kept first (`Program.hold`), so that meanwhile the run may be updated, and its memory given up. On a
    GPU the thread works in `stream`, the same each time. That stream waits for the earlier work of the
    caller's stream, which in turn waits for the thread's work when batches are taken.
    """
    kept = keep(run, program=program, stream=stream, newest=newest)
    run = replace(run, actor=replace(run.actor, params=kept))
    results = [Future[Sampled]() for _ in range(count)]

    def work(run: RunState) -> None:
        try:
            with stream or contextlib.nullcontext():
                for result in results:
                    sampled = sample_ahead(run, 1, program=program, draw=draw)
                    run = sampled.joined(run)
                    result.set_result(sampled)
        except BaseException as error:
            for result in results:
                if not result.done():
                    result.set_exception(error)

    # a daemon: a process that fails elsewhere ends at once
    threading.Thread(target=work, args=(run,), daemon=True).start()
    return PendingBatches(deque(results), stream)


def keep(
    run: RunState, *, program: Program, stream: torch.Stream | None = None, newest: NewestWeights | None = None
) -> Params:
    """Keep the policy's parameters for sampling. If `newest` has them already they are returned; else it gets them."""
    last = None if newest is None else newest()
    if last is not None and last[1] == run.actor.step:
        return last[0]
    kept = program.hold(run.actor.params)
    if stream is not None:
        _hand_over(kept, torch.accelerator.current_stream(), stream)
    if newest is not None:
        newest.give(kept, run.actor.step)  # before they are sent: else generation would send the old ones once more
    program.bring(kept)
    return kept


class AheadSampler:
    """Sample batches beside the steps of a run, up to `ahead` steps before their own."""

    def __init__(self, ahead: int, *, program: Program, draw: Draw, stream: torch.Stream | None = None) -> None:
        self._ahead, self._program, self._draw, self._stream = ahead, program, draw, stream
        self._under_way: PendingBatches | None = None
        self._newest: NewestWeights | None = None
        if program.interrupts:
            self._newest = NewestWeights()
            rollout: Any = program.rollout
            self._program = attrs.evolve(program, rollout=partial(rollout, newer=self._newest), check=False)

    def before(self, run: RunState) -> tuple[RunState, Metrics, Metrics]:
        """Prepare a step: start to sample the batches that are missing, and wait for the step's own. Returns the run
        with that batch, the times spent in this call, and the times of the sampling thread."""
        own: Metrics = {}
        made: Metrics = {}
        if not self._ahead:
            return run, own, made
        if not run.ahead and self._under_way is not None:
            run, own, made = self._joined(run, self._under_way, 1)
        if not run.ahead:  # this step's own batch, so that later ones can be made during the step
            sampled = sample_ahead(run, 1, program=self._program, draw=self._draw)
            run, own = sampled.joined(run), metrics.merge(own, sampled.timings)
        count = self._ahead + 1 - len(run.ahead)
        if self._under_way is None and count > 0:
            self._under_way = start_sampling(
                run, count, program=self._program, draw=self._draw, stream=self._stream, newest=self._newest
            )
        return run, own, made

    def after(self, run: RunState) -> tuple[RunState, Metrics, Metrics]:
        """Finish a step: wait for all batches that are being sampled, unless these may go on with the weights of this
        step's update. Returns the run with the finished batches, the times spent in this call, and the times of the
        sampling thread."""
        if self._under_way is None:
            return run, {}, {}
        if self._newest is None:
            return self._joined(run, self._under_way)
        start, own = now(), dict[str, Metric]()
        if not self._under_way.done:
            keep(run, program=self._program, stream=self._stream, newest=self._newest)
            own = {f"{TIMING}renew": metrics.spent((start, now() - start))}
        run, waited, made = self._joined(run, self._under_way, 0)
        return run, own | waited, made

    def _joined(
        self, run: RunState, under_way: PendingBatches, least: int | None = None
    ) -> tuple[RunState, Metrics, Metrics]:
        sampled = under_way(least)
        self._under_way = under_way if under_way.results else None
        made = {name: x for name, x in sampled.timings.items() if name != WAIT}
        return sampled.joined(run), {WAIT: sampled.timings[WAIT]}, made

    def end(self, error: BaseException | None) -> None:
        """Wait until generation has ended, since an engine must not be closed while it is in use. After `QUIET` seconds
        log the `error` that ended the steps, if any; after `PATIENCE` more give up."""
        if self._newest is not None:
            self._newest.end()
        left = [] if self._under_way is None else list(self._under_way.results)
        if not futures.wait(left, QUIET).not_done:
            return
        ended = "the steps have ended" if error is None else words_of(error)
        _log.warning("%s; waiting for batches that are being made ahead", ended)
        if late := futures.wait(left, PATIENCE).not_done:
            text = "%d batches that are being made ahead do not end within %g s, and are left"
            _log.warning(text, len(late), QUIET + PATIENCE)


def _hand_over(values: Any, source: torch.Stream, target: torch.Stream) -> None:
    """Let the stream `target` use values that the stream `source` computes; their memory is not reused before
    `target` has used them."""
    target.wait_stream(source)
    for x in tree.tensors(values):
        if devices.is_accelerator(x.device):
            x.record_stream(target)
