"""How long stages take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from torch.profiler import record_function

from fppo import devices, metrics
from fppo.metrics import Metric

TIMING = "timing_s/"  # before the name of a stage among metrics
P = ParamSpec("P")
R = TypeVar("R", bound=tuple[Any, ...])


class StageSpan(NamedTuple):
    """When a stage ran: its start by `now`, and its seconds."""

    stage: str
    start: float
    seconds: float


def timed(name: str, stage: Callable[P, R]) -> Callable[P, R]:
    """Wrap a stage that returns its metrics last, so that they have its start and seconds as timing_s/`name`. Profiles
    show the stage under that name."""

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        start = now()
        with record_function(name):
            *result, report = stage(*args, **kwargs)
        return cast(R, (*result, report | {f"{TIMING}{name}": metrics.spent((start, now() - start))}))

    return wrapped


def spans(report: Mapping[str, Metric]) -> list[StageSpan]:
    """The start and seconds of all timed stages in the metrics, in order of their starts."""
    found = [
        StageSpan(name.removeprefix(TIMING), *row)
        for name, metric in report.items()
        if isinstance(metric, metrics.Spent)
        for row in metric.spans.tolist()
    ]
    return sorted(found, key=lambda span: span.start)


def covered(ran: Iterable[StageSpan]) -> float:
    """The seconds in which at least one of the stages ran."""
    total, end = 0.0, float("-inf")
    for span in sorted(ran, key=lambda span: span.start):
        last = span.start + span.seconds
        total += max(last - max(span.start, end), 0.0)
        end = max(end, last)
    return total


def now() -> float:
    """Seconds on a monotonic clock, once the accelerator has finished the work in this thread's stream.

    It does not wait for the whole device: other threads may sample, or record CUDA graphs, meanwhile.
    """
    if (device := devices.in_use()) is not None:  # a controller of ranks elsewhere never uses it
        devices.synchronize(device)
    return time.perf_counter()
