"""Who worked when: of the last steps of a run, when each stage and each call to a pool ran, in a file of each rank."""

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
KEPT = 100  # steps that a file holds at least, of a run that has made so many; at most it holds as many again


class Tracer:
    """Writes a line for each step: when its stages ran, and its calls to pools, in seconds since 1970.

    `calls` are those that nobody has asked for before. What the file holds of `first_step` and later is dropped.
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
        """Closes the file."""
        self._lines.close()


def line(record: StepRecord, calls: Sequence[Call], began: float) -> Mapping[str, Any]:
    """What the file holds of a step, on a clock that was 0 at `began`, in seconds since 1970."""
    return {
        "step": record.run.step,
        "spans": [[span.stage, began + span.start, span.seconds] for span in record.spans],
        "calls": [
            attrs.asdict(call) | {"start": began + call.start, "ranks": [[began + x, y] for x, y in call.ranks]}
            for call in calls
        ],
    }
