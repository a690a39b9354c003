"""The loop around `ppo_step`: prompts in, steps out to observers, until the steps are done or a stop is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch

from fppo import metrics
from fppo.batch import Experience
from fppo.metrics import Metrics
from fppo.pipeline.ahead import making, sample, unpack
from fppo.pipeline.draw import Draw
from fppo.pipeline.measure import memory_metrics, now
from fppo.pipeline.step import Program, RunState, learn
from fppo.runtime.mesh import AXES, LOCAL, Mesh, any_rank, ranks_on
from fppo.tree import replace


@attrs.frozen(kw_only=True)
class StepRecord:
    """What one step was: the state after it, its batch (None for the evaluation before the first), its numbers."""

    run: RunState
    experience: Experience | None
    metrics: dict[str, float]


Observe = Callable[[StepRecord], None]
Evaluate = Callable[[RunState], Metrics]


def iterate(
    run: RunState, *, program: Program, draw: Draw, ahead: int = 0, mesh: Mesh = LOCAL, donate: bool = True
) -> Iterator[tuple[RunState, Experience, Metrics]]:
    """Steps without end. With `donate` each state is given up to the next step: use it before asking for that.

    With `ahead` above 0 the batches of the next so many steps are made while this one trains, by a thread, and wait in
    the state: see `pipeline.ahead`. perf/throughput is in tokens per second and rank.
    """
    while True:
        start = now()
        if run.ahead:
            scored, sampled = unpack(run.ahead[0])
            run = replace(run, ahead=run.ahead[1:])
        else:
            scored, cursor, sampled = sample(
                run, run.cursor, step=run.step, program=program, draw=draw, params=run.actor.params
            )
            run = replace(run, cursor=cursor)
        wait = making(run, ahead - len(run.ahead), program=program, draw=draw)
        try:
            run, experience, learned = learn(run, scored, program=program, donate=donate)
        except Exception:
            with contextlib.suppress(Exception):
                wait()  # an engine is not closed under those who use it
            raise
        made = wait()
        run = replace(run, cursor=made.cursor, ahead=(*run.ahead, *made.batches))
        report = metrics.merge(sampled, learned, made.timings)
        seconds = now() - start
        tokens = report["perf/total_num_tokens"]
        assert isinstance(tokens, metrics.Mean)
        report |= {
            "timing_s/step": metrics.total(seconds),
            "perf/time_per_step": metrics.mean(seconds),
            "perf/throughput": metrics.mean(tokens.total / seconds / ranks_on(mesh, AXES)),
        }
        yield run, experience, report


def train(
    run: RunState,
    *,
    program: Program,
    draw: Draw,
    steps: int,
    observers: Sequence[Observe] = (),
    evaluate: Evaluate | None = None,
    evaluate_every: int = 0,
    evaluate_before: bool = True,
    stop: Callable[[], bool] = lambda: False,
    gauges: Callable[[], dict[str, float]] = memory_metrics,
    ahead: int = 0,
    mesh: Mesh = LOCAL,
    donate: bool = True,
) -> RunState:
    """The run after step `steps`, or after the step in which `stop` became true.

    Every step's record goes to each of `observers`, in order. `evaluate` runs before the first step of all (unless
    `evaluate_before` is False), after every `evaluate_every` steps (0: never) and after the last; its metrics join
    that step's, as do `gauges`, which are read at its end. On a mesh all ranks come here, and a stop that one asks for
    stops all. `ahead` and `donate` are `iterate`'s; the memory of the state that comes in is given up too.
    """

    def stopped() -> bool:
        return any_rank(stop(), mesh, run.actor.opt.count.device)

    if evaluate is not None and evaluate_before and run.step == 0:
        _observe(observers, run, None, _evaluated(evaluate, run), gauges)
    if run.step >= steps or stopped():
        return run
    for after, experience, report in iterate(run, program=program, draw=draw, ahead=ahead, mesh=mesh, donate=donate):
        run = after
        last = run.step >= steps
        due = last or (evaluate_every > 0 and run.step % evaluate_every == 0)
        if evaluate is not None and due:
            report = report | _evaluated(evaluate, run)
        _observe(observers, run, experience, report, gauges)
        if last or stopped():
            return run
    raise AssertionError("iterate has no end")


def _evaluated(evaluate: Evaluate, run: RunState) -> Metrics:
    start = now()
    with torch.no_grad():
        report = evaluate(run)
    return report | {"timing_s/testing": metrics.total(now() - start)}


def _observe(
    observers: Sequence[Observe],
    run: RunState,
    experience: Experience | None,
    report: Metrics,
    gauges: Callable[[], dict[str, float]],
) -> None:
    numbers = metrics.report(report) | gauges() | {"training/global_step": float(run.step)}
    record = StepRecord(run=run, experience=experience, metrics=numbers)
    for observe in observers:
        observe(record)
