"""The loop around `ppo_step`: prompts in, steps out to observers, until the steps are done or a stop is requested."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import torch
from torch.profiler import record_function

from fppo import devices, metrics
from fppo.batch import Experience
from fppo.metrics import Metrics
from fppo.pipeline.ahead import AheadSampler, check_devices, check_interrupts
from fppo.pipeline.measure import memory_metrics
from fppo.pipeline.program import Draw, Program, RunState
from fppo.pipeline.step import ppo_step
from fppo.pipeline.timing import TIMING, StageSpan, covered, now, spans
from fppo.runtime.mesh import AXES, LOCAL, Mesh, any_rank, device_of, ranks_on
from fppo.runtime.offload import copied
from fppo.tree import replace


@attrs.frozen(kw_only=True)
class StepRecord:
    """The result of one step: the state after it, its batch (None for the evaluation before the first; of a supervised
    run `Demonstrations`), its numbers, and the times of its stages, with the whole step as "step"."""

    run: RunState
    experience: Any
    metrics: dict[str, float]
    spans: tuple[StageSpan, ...] = ()


Observe = Callable[[StepRecord], Mapping[str, float] | None]  # what it returns joins the numbers: see `train`
Evaluate = Callable[[RunState], Metrics]
StepsOf = Generator[tuple[RunState, Any, Metrics], None, None]  # the run after each step, its batch, and its metrics


@attrs.frozen
class Evaluation:
    """A measurement of the policy beside its training, and the steps at which it is made."""

    evaluate: Evaluate
    every: int = 0  # steps from one to the next; 0: only before the first step and after the last
    before: bool = True  # also before the first step

    def is_due(self, step: int, last: int) -> bool:
        """Whether the policy is measured after `step`, in a run whose last step is `last`."""
        return step >= last or (self.every > 0 and step % self.every == 0)


@attrs.frozen(kw_only=True)
class Watching:
    """Observers and evaluations of a run's steps, and their end: step `steps`, or a step after which `stop` returns
    True. See `train`."""

    steps: int
    observers: Sequence[Observe] = ()
    evaluation: Evaluation | None = None
    stop: Callable[[], bool] = lambda: False


def iterate(
    run: RunState,
    *,
    program: Program,
    draw: Draw,
    ahead: int = 0,
    mesh: Mesh = LOCAL,
    donate: bool = False,
    watching: Watching | None = None,
) -> Generator[tuple[RunState, Experience, Metrics], None, None]:
    """Iterate over steps, without end unless they are watched. With `donate` a step takes over the last state's memory:
    use that before.

    With `ahead` above 0 a thread makes the batches of the next `ahead` steps while a step trains, and they wait in the
    state: see `pipeline.ahead`, which refuses several GPUs. With `program.interrupts` some may be unfinished when a
    step ends, and are made until the iterator is closed. perf/throughput is in tokens per second and rank,
    timing_s/outside is the part of timing_s/step outside all other times.
    """
    device = device_of(run.actor.params)
    check_devices(ahead, ranks_on(mesh, AXES), device)
    if program.interrupts:
        check_interrupts(ahead, ranks_on(mesh, AXES))
    stream = torch.Stream(device) if ahead and devices.kind_of(device).streams else None
    beside = AheadSampler(ahead, program=program, draw=draw, stream=stream)
    step = partial(ppo_step, program=program, draw=draw, donate=donate)
    return repeated(step, run, beside=beside, mesh=mesh, watching=watching)


def repeated(
    step: Callable[..., tuple[RunState, Any, Metrics]],
    run: RunState,
    *,
    beside: AheadSampler | None = None,
    mesh: Mesh = LOCAL,
    watching: Watching | None = None,
) -> StepsOf:
    """Iterate over the states that `step(run)` makes of a run, with the times of each step as metrics. `beside` samples
    batches of later steps meanwhile; steps that are watched end as `watching` says, else they have no end."""
    ranks, device = ranks_on(mesh, AXES), device_of(run.actor.params)
    evaluation = watching and watching.evaluation
    if watching is not None and evaluation is not None and evaluation.before and run.step == 0:
        _observe(watching.observers, run, None, _evaluated(evaluation, run))
    since, carried = now(), _NOTHING
    try:
        while watching is None or not (run.step >= watching.steps or any_rank(watching.stop(), mesh, device)):
            start = now()
            run, first, early = (run, {}, {}) if beside is None else beside.before(run)
            run, batch, report = step(run)
            run, last, late = (run, {}, {}) if beside is None else beside.after(run)
            report = metrics.merge(first, report, last)
            stages = covered(spans(report))  # without those of a thread beside this one
            report = metrics.merge(report, early, late)
            tokens = report["perf/total_num_tokens"]
            assert isinstance(tokens, metrics.Mean)
            report |= times_of(now() - start, stages, float(tokens.total) / ranks)
            if watching is not None:
                if evaluation is not None and evaluation.is_due(run.step, watching.steps):
                    report |= _evaluated(evaluation, run)
                since, carried = _observe(
                    watching.observers, run, batch, report, since=since, carried=carried, ranks=ranks
                )
            yield run, batch, report
    except (Exception, SystemExit, GeneratorExit) as error:
        if beside is not None:
            beside.end(error)
        raise
    if beside is not None:
        beside.end(None)


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
    """Train until step `steps`, or until `stop` returns True after a step; return the run.

    Every step's record goes to each of `observers`, in order, and the next step takes over its memory; the metrics of
    an evaluation that is due join those of its step. Numbers that an observer returns join those for later observers,
    and those of the last one join the next step's. The times of a step are taken when an observer is called, and the
    next step begins when the last one is called, so that all the time of a run belongs to some step.

    On a mesh all ranks must call this, and one rank's stop stops all. `ahead` is that of `iterate`. `donate` gives up
    the memory of `run` too; without it actor and critic are copied first.
    """
    watching = Watching(steps=steps, observers=observers, evaluation=evaluation, stop=stop)
    if not donate and run.step < steps:
        run = replace(run, actor=copied(run.actor), critic=copied(run.critic))
    for after, _, _ in iterate(run, program=program, draw=draw, ahead=ahead, mesh=mesh, donate=True, watching=watching):
        run = after
    return run


def _evaluated(evaluation: Evaluation, run: RunState) -> Metrics:
    start = now()
    with torch.no_grad(), record_function("testing"):
        report = evaluation.evaluate(run)
    return report | {"timing_s/testing": metrics.spent((start, now() - start))}


class _Carried(NamedTuple):
    """The numbers from the last observer of a step, and when it ran: both are recorded with the next step."""

    numbers: Mapping[str, float] = MappingProxyType({})
    spans: tuple[StageSpan, ...] = ()


_NOTHING = _Carried()


def _observe(
    observers: Sequence[Observe],
    run: RunState,
    experience: Any,
    report: Metrics,
    *,
    since: float = 0.0,
    carried: _Carried = _NOTHING,
    ranks: int = 1,
) -> tuple[float, _Carried]:
    """Pass the record of a step that began at `since` to the observers, with the numbers `carried` over from the
    previous step's last observer. Returns when this step's last observer was called, and the numbers that it
    returned."""
    numbers = metrics.report(report) | memory_metrics() | {"training/global_step": float(run.step), **carried.numbers}
    ran, own = [*carried.spans, *spans(report)], ()
    stages = numbers.get("timing_s/step", 0.0) - numbers.get("timing_s/outside", 0.0)
    stages += numbers.get("timing_s/testing", 0.0) + _in_stages(carried.numbers)
    called, added = now(), {}
    for observe in observers:
        called = now()
        times, whole = {}, ()
        if experience is not None:
            times = _times(called - since, stages, numbers["perf/total_num_tokens"] / ranks)
            whole = (StageSpan("step", since, called - since),)
        record = StepRecord(run=run, experience=experience, metrics=numbers | times, spans=(*whole, *ran))
        added = observe(record) or {}
        stages += _in_stages(added)
        numbers |= added
        own = tuple(
            StageSpan(name.removeprefix(TIMING), called, x) for name, x in added.items() if name.startswith(TIMING)
        )
        ran += own
    return called, _Carried(added, own)


def _times(seconds: float, stages: float, tokens: float) -> dict[str, float]:
    """Metrics of a step's time and throughput: it took `seconds`, of which `stages` seconds were spent in stages, for
    `tokens` tokens on each rank."""
    return {
        "timing_s/step": seconds,
        "timing_s/outside": seconds - stages,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds,
    }


def times_of(seconds: float, stages: float, tokens: float) -> Metrics:
    """Metrics of a step's time and throughput, where no observer adds time: it took `seconds`, of which `stages`
    seconds were spent in stages, for `tokens` tokens on each rank."""
    times = _times(seconds, stages, tokens)
    return {name: metrics.mean(x) if "perf/" in name else metrics.total(x) for name, x in times.items()}


def _in_stages(numbers: Mapping[str, float]) -> float:
    """The sum of the seconds of all stages, the numbers whose names begin with timing_s/."""
    return sum(x for name, x in numbers.items() if name.startswith("timing_s/"))
