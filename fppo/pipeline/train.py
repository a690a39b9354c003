"""The loop around `ppo_step`: prompts in, steps out to observers, until the steps are done or a stop is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch

from fppo import metrics
from fppo.batch import Experience
from fppo.metrics import Metrics
from fppo.pipeline.ahead import check_devices, sample_ahead, start_sampling
from fppo.pipeline.measure import memory_metrics
from fppo.pipeline.program import Draw, Program, RunState
from fppo.pipeline.step import ppo_step
from fppo.pipeline.timing import now
from fppo.runtime.mesh import AXES, LOCAL, Mesh, any_rank, device_of, ranks_on
from fppo.runtime.offload import copied
from fppo.tree import replace


@attrs.frozen(kw_only=True)
class StepRecord:
    """What one step was: the state after it, its batch (None for the evaluation before the first), its numbers."""

    run: RunState
    experience: Experience | None
    metrics: dict[str, float]


Observe = Callable[[StepRecord], None]
Evaluate = Callable[[RunState], Metrics]


@attrs.frozen
class Evaluation:
    """What measures the policy beside its training, and when."""

    evaluate: Evaluate
    every: int = 0  # steps from one to the next; 0: only before the first step and after the last
    before: bool = True  # the first step


def iterate(
    run: RunState, *, program: Program, draw: Draw, ahead: int = 0, mesh: Mesh = LOCAL, donate: bool = False
) -> Iterator[tuple[RunState, Experience, Metrics]]:
    """Steps without end. With `donate` each state is given up to the next step: use it before asking for that.

    With `ahead` above 0 the batches of the next so many steps are made while this one trains, by a thread, and wait in
    the state: see `pipeline.ahead`, which refuses several GPUs. perf/throughput is in tokens per second and rank.
    """
    check_devices(ahead, ranks_on(mesh, AXES), device_of(run.actor.params))
    beside = torch.cuda.Stream() if ahead and torch.cuda.is_initialized() else None
    while True:
        start = now()
        first: Metrics = {}
        if ahead and not run.ahead:  # this step's own batch, so that those behind it can be made beside the step
            sampled = sample_ahead(run, 1, program=program, draw=draw)
            run, first = sampled.joined(run), sampled.timings
        wait = start_sampling(
            run, ahead + 1 - len(run.ahead) if ahead else 0, program=program, draw=draw, beside=beside
        )
        try:
            run, experience, report = ppo_step(run, program=program, draw=draw, donate=donate)
        except Exception:
            with contextlib.suppress(Exception):
                wait()  # an engine is not closed under those who use it
            raise
        sampled = wait()
        run = sampled.joined(run)
        report = metrics.merge(first, report, sampled.timings)
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
    evaluation: Evaluation | None = None,
    stop: Callable[[], bool] = lambda: False,
    ahead: int = 0,
    mesh: Mesh = LOCAL,
    donate: bool = False,
) -> RunState:
    """The run after step `steps`, or after the step in which `stop` became true.

    Every step's record goes to each of `observers`, in order, and its memory is given up to the next step; the metrics
    of an evaluation that is due join those of its step. On a mesh all ranks come here, and a stop that one asks for
    stops all. `ahead` is `iterate`'s. `donate` gives up the memory of `run` too; without it actor and critic are copied
    first.
    """

    def stopped() -> bool:
        return any_rank(stop(), mesh, device_of(run.actor.params))

    if evaluation is not None and evaluation.before and run.step == 0:
        _observe(observers, run, None, _evaluated(evaluation, run))
    if run.step >= steps or stopped():
        return run
    if not donate:
        run = replace(run, actor=copied(run.actor), critic=copied(run.critic))
    for after, experience, report in iterate(run, program=program, draw=draw, ahead=ahead, mesh=mesh, donate=True):
        run = after
        last = run.step >= steps
        if evaluation is not None and (last or (evaluation.every > 0 and run.step % evaluation.every == 0)):
            report = report | _evaluated(evaluation, run)
        _observe(observers, run, experience, report)
        if last or stopped():
            return run
    raise AssertionError("iterate has no end")


def _evaluated(evaluation: Evaluation, run: RunState) -> Metrics:
    start = now()
    with torch.no_grad():
        report = evaluation.evaluate(run)
    return report | {"timing_s/testing": metrics.total(now() - start)}


def _observe(observers: Sequence[Observe], run: RunState, experience: Experience | None, report: Metrics) -> None:
    numbers = metrics.report(report) | memory_metrics() | {"training/global_step": float(run.step)}
    record = StepRecord(run=run, experience=experience, metrics=numbers)
    for observe in observers:
        observe(record)
