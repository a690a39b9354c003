"""Batches made before their step: sampled and scored with the weights of an earlier one while that one trains.

A run that is `ahead` by k trains at step t on what the policy of step t - k sampled, never on older, and its state
holds the k batches that wait. So a batch depends on the state alone, however long anything took, and a run that
resumes goes on bit for bit. Off-policy by k steps: `losses.rollout_correction` weighs it.
"""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import attrs
from torch import Tensor

from fppo import batch as batches
from fppo import metrics, tree
from fppo.batch import Column, Scored
from fppo.data.cursor import DataCursor
from fppo.metrics import Max, Mean, Metrics, Min, Sum
from fppo.pipeline.draw import Draw
from fppo.pipeline.measure import now
from fppo.pipeline.step import Program, RunState

Waiting = dict[str, Tensor | Column]
_REPORT = "report"
_KINDS = {"mean": Mean, "sum": Sum, "max": Max, "min": Min}


def pack(scored: Scored, report: Metrics) -> Waiting:
    """A batch and its metrics as leaves that a checkpoint can hold, whatever their number and shapes."""
    lines: list[Any] = [
        [name, type(metric).__name__.lower(), *(x.item() for x in metric)] for name, metric in report.items()
    ]
    found = {**batches.columns(scored), _REPORT: Column(lines)}
    return {name: _as_json(name, x) if isinstance(x, Column) else x for name, x in found.items()}


def _as_json(name: str, column: Column) -> Column:
    """The column as JSON gives it back. Raises ValueError for objects that do not fit it."""
    try:
        return Column(json.loads(json.dumps(list(column))))
    except TypeError as error:
        raise ValueError(f"a batch cannot wait for its step: an object of {name} does not fit JSON: {error}") from error


def restore(leaves: Mapping[str, Tensor | Column]) -> tuple[Waiting, ...]:
    """`RunState.ahead` from its leaves by their paths in it, as "[0]['tokens']"."""
    found: dict[int, Waiting] = {}
    for path, leaf in leaves.items():
        number, _, name = path.removeprefix("[").removesuffix("]").partition("][")
        found.setdefault(int(number), {})[ast.literal_eval(name)] = leaf
    return tuple(found[number] for number in sorted(found))


def unpack(waiting: Waiting) -> tuple[Scored, Metrics]:
    """What `pack` was given, with the metrics on the host."""
    columns = dict(waiting)
    lines: Any = columns.pop(_REPORT)
    report = {name: _KINDS[kind](*(metrics.total(x).value for x in numbers)) for name, kind, *numbers in lines}
    return batches.record(Scored, columns), report


def sample(
    run: RunState, cursor: DataCursor, *, step: int, program: Program, draw: Draw, params: Mapping[str, Tensor]
) -> tuple[Scored, DataCursor, Metrics]:
    """The batch of a step, by the program's way to sample."""
    return program.sample(
        dict(params),
        cursor,
        draw=draw,
        key=run.key.fold("step", step),
        step=step,
        version=run.actor.step,
        rollout=program.rollout,
        score=program.score,
    )


@attrs.frozen
class Made:
    """Batches for the steps after this one, the cursor behind their prompts, and what making them took."""

    batches: tuple[Waiting, ...]
    cursor: DataCursor
    timings: Metrics


def making(run: RunState, count: int, *, program: Program, draw: Draw) -> Callable[[], Made]:
    """Starts to make the next `count` batches that `run` lacks, with its weights; the function waits for them.

    The weights are copied first, so the run may be updated, and its memory given up, at the same time.
    """
    if count <= 0:
        return lambda: Made((), run.cursor, {})
    params = tree.copy(run.actor.params)
    result: Future[Made] = Future()
    # a daemon: a process that fails elsewhere ends at once
    thread = threading.Thread(target=_make, args=(result, run, params, count, program, draw), daemon=True)
    thread.start()

    def wait() -> Made:
        start = now()
        made = result.result()
        thread.join()
        return attrs.evolve(made, timings=made.timings | {"timing_s/wait": metrics.total(now() - start)})

    return wait


def _make(
    result: Future[Made],
    run: RunState,
    params: Mapping[str, Tensor],
    count: int,
    program: Program,
    draw: Draw,
) -> None:
    try:
        made: list[Waiting] = []
        took: list[Metrics] = []
        cursor = run.cursor
        first = run.step + 1 + len(run.ahead)
        for step in range(first, first + count):
            scored, cursor, report = sample(run, cursor, step=step, program=program, draw=draw, params=params)
            seconds = {name for name in report if name.startswith("timing_s/")}  # of no state: not the same twice
            took.append({name: report[name] for name in seconds})
            made.append(pack(scored, {name: x for name, x in report.items() if name not in seconds}))
        result.set_result(Made(tuple(made), cursor, metrics.merge(*took)))
    except BaseException as error:
        result.set_exception(error)
