"""Batches made before their step: sampled and scored with the weights of an earlier one while that one trains.

A run that is `ahead` by k trains at step t on what the policy of step t - k sampled, never on older, and its state
holds the k batches that wait. So a batch depends on the state alone, however long anything took, and a run that
resumes goes on bit for bit. Off-policy by k steps: `losses.rollout_correction` weighs it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import attrs
import torch

from fppo import metrics, tree
from fppo.batch import Column, Scored
from fppo.data.cursor import DataCursor
from fppo.metrics import Metrics
from fppo.pipeline.program import Draw, Program, RunState, Waiting
from fppo.pipeline.step import sample
from fppo.pipeline.timing import now
from fppo.tree import replace


@attrs.frozen
class Sampled:
    """Batches for the next steps, the cursor behind their prompts, and what sampling them took."""

    batches: tuple[Waiting, ...]
    cursor: DataCursor
    timings: Metrics

    def joined(self, run: RunState) -> RunState:
        """The run with these batches behind those that wait already."""
        if not self.batches:
            return run
        return replace(run, cursor=self.cursor, ahead=(*run.ahead, *self.batches))


def sample_ahead(run: RunState, count: int, *, program: Program, draw: Draw) -> Sampled:
    """The next `count` batches that `run` lacks, with its weights."""
    batches: list[Waiting] = []
    timings: list[Metrics] = []
    first = run.step + len(run.ahead)
    for step in range(first, first + count):
        run = replace(run, step=step)
        scored, cursor, report = sample(run, program=program, draw=draw)
        run = replace(run, cursor=cursor)
        seconds = {name for name in report if name.startswith("timing_s/")}  # of no state: not the same twice
        timings.append({name: report[name] for name in seconds})
        kept = {name: x for name, x in report.items() if name not in seconds}
        batches.append(Waiting(scored=as_saved(scored), metrics=kept))
    return Sampled(tuple(batches), run.cursor, metrics.merge(*timings))


def check_devices(ahead: int, ranks: int, device: torch.device) -> None:
    """Raises ValueError for batches made ahead on several GPUs.

    Two threads of a rank then call collectives of two groups, in an order that nothing makes the same on all ranks.
    gloo's hold up their own thread alone. NCCL's are kernels, which hold up a GPU until other ranks have begun theirs.
    """
    if ahead > 0 and ranks > 1 and device.type == "cuda":
        raise ValueError(
            f"rollout.ahead = {ahead} on {ranks} GPUs: what samples would wait on one GPU for what trains on another, "
            "and both for good; give rollout.ahead = 0, or one GPU"
        )


def start_sampling(
    run: RunState, count: int, *, program: Program, draw: Draw, beside: torch.cuda.Stream | None = None
) -> Callable[[], Sampled]:
    """Starts `sample_ahead` in a thread; the function waits for its result.

    The weights are kept first (`Program.hold`), so the run may be updated, and its memory given up, at the same time.
    On a GPU the thread works in the stream `beside`, the same each time, which begins after what the caller's stream
    has been given so far; and that goes on, where it waits, after the thread's work.
    """
    if count <= 0:
        return lambda: Sampled((), run.cursor, {})
    run = replace(run, actor=replace(run.actor, params=program.hold(run.actor.params)))
    result: Future[Sampled] = Future()
    if beside is not None:
        _hand_over(run.actor.params, torch.cuda.current_stream(), beside)

    def work() -> None:
        try:
            with contextlib.nullcontext() if beside is None else torch.cuda.stream(beside):
                result.set_result(sample_ahead(run, count, program=program, draw=draw))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)  # a daemon: a process that fails elsewhere ends at once
    thread.start()

    def wait() -> Sampled:
        start = now()
        sampled = result.result()
        thread.join()
        if beside is not None:
            _hand_over([sampled.batches, sampled.timings], beside, torch.cuda.current_stream())
        return attrs.evolve(sampled, timings=sampled.timings | {"timing_s/wait": metrics.spent((start, now() - start))})

    return wait


def _hand_over(values: Any, of: torch.cuda.Stream, to: torch.cuda.Stream) -> None:
    """Lets a stream use what another one makes, and neither have the memory again before it has."""
    to.wait_stream(of)
    for x in tree.tensors(values):
        if x.is_cuda:
            x.record_stream(to)


def as_saved(scored: Scored) -> Scored:
    """The batch as a checkpoint gives it back, with objects as JSON has them.

    Raises ValueError for objects that do not fit JSON.
    """
    columns = {f.name: getattr(scored, f.name) for f in attrs.fields(Scored)}
    return replace(scored, **{name: _as_json(name, x) for name, x in columns.items() if isinstance(x, Column)})


def _as_json(name: str, column: Column) -> Column:
    try:
        return Column(json.loads(json.dumps(list(column))))
    except TypeError as error:
        raise ValueError(f"a batch cannot wait for its step: an object of {name} does not fit JSON: {error}") from error
