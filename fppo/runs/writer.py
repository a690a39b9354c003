"""Files of a run's steps for replays and resuming: digests, dumps of updates that were not finite, checkpoints."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from torch.profiler import record_function

from fppo.pipeline import replay
from fppo.pipeline.program import RunState
from fppo.pipeline.timing import now
from fppo.pipeline.train import StepRecord
from fppo.runs.jsonl import JsonLines
from fppo.runtime.checkpoint import CheckpointError, Pending

DUMPS = "dumps"
PATIENCE = 60.0  # seconds that a failing rank waits for the others' parts of a checkpoint


def skipped(record: StepRecord) -> bool:
    """Whether an update of the step was skipped, as not finite."""
    return any(record.metrics.get(f"{role}/skipped", 0.0) for role in ("actor", "critic", "supervised"))


@attrs.frozen(kw_only=True)
class Digests:
    """Write the digests of every `every`th step, and of steps whose checkpoint or batch is kept."""

    directory: Path  # of the run
    lines: JsonLines | None  # on the first rank
    every: int  # 0: kept steps alone
    is_saved: Callable[[int], bool]  # whether a step has a checkpoint
    line: Callable[[StepRecord], dict[str, Any]]
    last: list[StepRecord] = attrs.field(factory=list)  # the newest step, if it was left out

    def __call__(self, record: StepRecord) -> Mapping[str, float]:
        if record.experience is None:
            return {}
        self.last.clear()
        step = record.run.step
        if not (self.is_saved(step) or skipped(record) or (self.every and step % self.every == 0)):
            self.last.append(record)
            return {}
        start = now()
        with record_function("digests"):
            self.write(record)
        return {"timing_s/digests": now() - start}

    def write(self, record: StepRecord) -> None:
        """Write the line of a step, and its batch if an update was not finite. All ranks must call."""
        line = self.line(record)
        if self.lines is None:
            return
        self.lines.write(line)
        if skipped(record):
            path, step = replay.dump(record, line, self.directory / DUMPS), record.run.step
            print(
                f"step {step}: an update was not finite and was skipped; its batch is in {path}; "
                f"fppo replay {self.directory} --step {step} computes it again",
                file=sys.stderr,
            )

    def end(self) -> None:
        """Write the line of the last step, which has a checkpoint, if it was left out."""
        while self.last:
            self.write(self.last.pop())


@attrs.frozen(kw_only=True)
class Checkpoints:
    """Save the states after steps, each while the next step is computed."""

    is_saved: Callable[[int], bool]
    begin: Callable[[RunState], Pending]
    ranks: int  # ranks that write a part of a checkpoint
    written: Callable[[Path], None] = lambda path: None  # called once a checkpoint is written
    pending: list[Pending] = attrs.field(factory=list)
    begun: list[int] = attrs.field(factory=list)  # the step of the last checkpoint

    def __call__(self, record: StepRecord) -> Mapping[str, float]:
        if record.experience is None:
            return {}
        start = now()
        if self.pending and self.pending[-1].done():
            self.wait()  # at every step, so that a failed save is raised before the next one
        if not self.is_saved(record.run.step):
            return {}
        with record_function("save_checkpoint"):
            self.save(record.run)
        return {"timing_s/save_checkpoint": now() - start}

    def save(self, run: RunState) -> None:
        """Begin to write the checkpoint of a state, once the one before is written."""
        self.wait()
        self.pending.append(self.begin(run))
        self.begun[:] = [run.step]

    def end(self, run: RunState) -> None:
        """Wait until the run's last state is written; save it if that has not begun."""
        if self.begun != [run.step]:
            self.save(run)
        self.wait()

    def wait(self) -> None:
        """Wait until pending checkpoints are written. Raises CheckpointError if one could not be."""
        while self.pending:
            self.written(self.pending.pop().wait())

    def leave(self, *, alone: bool) -> None:
        """After an error, wait until pending checkpoints are written or have failed. They need all ranks, so nothing is
        waited for if `alone`: the other ranks are gone."""
        if self.ranks > 1 and alone:
            return
        with contextlib.suppress(CheckpointError, TimeoutError):
            while self.pending:
                self.written(self.pending.pop().wait(None if self.ranks == 1 else PATIENCE))
