"""How long stages take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch.profiler import record_function

from fppo import metrics
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
    """The stage, with when it ran as `timing_s/name` in the metrics that it returns last; profiles show its name."""

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        start = now()
        with record_function(name):
            *result, report = stage(*args, **kwargs)
        return cast(R, (*result, report | {f"{TIMING}{name}": metrics.spent((start, now() - start))}))

    return wrapped


def spans(report: Mapping[str, Metric]) -> list[StageSpan]:
    """When each stage ran of which the metrics tell that, in order."""
    found = [
        StageSpan(name.removeprefix(TIMING), *row)
        for name, metric in report.items()
        if isinstance(metric, metrics.Spent)
        for row in metric.spans.tolist()
    ]
    return sorted(found, key=lambda span: span.start)


def covered(ran: Iterable[StageSpan]) -> float:
    """The seconds in which at least one of them ran."""
    total, end = 0.0, float("-inf")
    for span in sorted(ran, key=lambda span: span.start):
        last = span.start + span.seconds
        total += max(last - max(span.start, end), 0.0)
        end = max(end, last)
    return total


def now() -> float:
    """Seconds on a clock that only rises, once the accelerator has done what this thread's stream was asked to.

    It does not wait for the whole device: other threads may sample, or record what they do as a CUDA graph, meanwhile.
    """
    if torch.cuda.is_initialized():  # a controller of ranks elsewhere never uses it
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()
