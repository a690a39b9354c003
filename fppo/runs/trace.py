"""Traces of a run's last steps: start and duration of each stage and each call to a pool, in a file of each rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fppo.fleet import Call
from fppo.pipeline.train import StepRecord
from fppo.runs.jsonl import JsonLines

TRACE = "trace"
KEPT = 100  # the newest steps that a file keeps when it is truncated, at twice as many


class Tracer:
    """Write a line for each step: the spans of its stages and its calls to pools, in seconds since 1970.

    `calls()` returns the calls since its last call. Lines of `first_step` and later are dropped at the start.
    """

    def __init__(self, path: Path, calls: Callable[[], Sequence[Call]], *, first_step: int = 0) -> None:
        self._path, self._calls = path, calls
        self._began = time.time() - time.perf_counter()
        self._lines, self._room = JsonLines(path, first_step=first_step, newest=KEPT), KEPT

    def __call__(self, record: StepRecord) -> None:
        step = record.run.step
        if not self._room:
            self._lines.close()
            self._lines, self._room = JsonLines(self._path, first_step=step, newest=KEPT), KEPT
        self._room -= 1
        self._lines.write(line(record, self._calls(), self._began))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def line(record: StepRecord, calls: Sequence[Call], began: float) -> Mapping[str, Any]:
    """The line of a step, in seconds since 1970; the record's clock was 0 at `began`."""
    return {
        "step": record.run.step,
        "spans": [[span.stage, began + span.start, span.seconds] for span in record.spans],
        "calls": [
            attrs.asdict(call) | {"start": began + call.start, "ranks": [[began + x, y] for x, y in call.ranks]}
            for call in calls
        ],
    }
