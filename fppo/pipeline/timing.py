"""How long stages take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.profiler import record_function

from fppo import metrics

P = ParamSpec("P")
R = TypeVar("R", bound=tuple[Any, ...])


def timed(name: str, stage: Callable[P, R]) -> Callable[P, R]:
    """The stage, with its seconds as `timing_s/name` in the metrics that it returns last; profiles show its name."""

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        start = now()
        with record_function(name):
            *result, report = stage(*args, **kwargs)
        return cast(R, (*result, report | {f"timing_s/{name}": metrics.total(now() - start)}))

    return wrapped


def now() -> float:
    """Seconds on a clock that only rises, once the accelerator has done what it was asked to."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
