"""What a run writes of its steps for replays and for resuming: digests, dumps of updates that were not finite,
checkpoints."""

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
PATIENCE = 60.0  # seconds that a rank which fails waits for what others still write of a checkpoint


def skipped(record: StepRecord) -> bool:
    """Whether an update of the step was not finite."""
    return any(record.metrics.get(f"{role}/skipped", 0.0) for role in ("actor", "critic"))


@attrs.frozen(kw_only=True)
class Digests:
    """Writes the digests of every so many steps, and of those whose checkpoints or batches are kept."""

    directory: Path  # of the run
    lines: JsonLines | None  # of the first rank
    every: int  # 0: of no others
    kept: Callable[[int], bool]  # whether a step has a checkpoint
    line: Callable[[StepRecord], dict[str, Any]]
    last: list[StepRecord] = attrs.field(factory=list)  # that was left out

    def __call__(self, record: StepRecord) -> Mapping[str, float]:
        if record.experience is None:
            return {}
        self.last.clear()
        step = record.run.step
        if not (self.kept(step) or skipped(record) or (self.every and step % self.every == 0)):
            self.last.append(record)
            return {}
        start = now()
        with record_function("digests"):
            self.write(record)
        return {"timing_s/digests": now() - start}

    def write(self, record: StepRecord) -> None:
        """Writes the line of a step, and its batch if an update was not finite. All ranks must call."""
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
        """Writes the last step's line, which has a checkpoint, if that is not there yet."""
        while self.last:
            self.write(self.last.pop())


@attrs.frozen(kw_only=True)
class Checkpoints:
    """Saves the state after steps, one while the next is made."""

    kept: Callable[[int], bool]
    begin: Callable[[RunState], Pending]
    ranks: int  # that have a part in them
    pending: list[Pending] = attrs.field(factory=list)
    begun: list[int] = attrs.field(factory=list)  # the step of the last one

    def __call__(self, record: StepRecord) -> Mapping[str, float]:
        if record.experience is None:
            return {}
        start = now()
        if self.pending and self.pending[-1].done():
            self.wait()  # at every step: one that failed is not to be found out at the next one
        if not self.kept(record.run.step):
            return {}
        with record_function("save_checkpoint"):
            self.save(record.run)
        return {"timing_s/save_checkpoint": now() - start}

    def save(self, run: RunState) -> None:
        """Begins to write the checkpoint of a state, once the one before is written."""
        self.wait()
        self.pending.append(self.begin(run))
        self.begun[:] = [run.step]

    def end(self, run: RunState) -> None:
        """Returns when the state that the run ends with is written, which a step may have begun."""
        if self.begun != [run.step]:
            self.save(run)
        self.wait()

    def wait(self) -> None:
        """Returns when what was begun is written. Raises CheckpointError if it could not be."""
        while self.pending:
            self.pending.pop().wait()

    def leave(self, *, alone: bool) -> None:
        """After an error: returns when what was begun is written, or failed. Other ranks, which it takes, wait for this
        one and go on writing meanwhile, if they are not gone: if this one is not `alone`."""
        if self.ranks > 1 and alone:
            return
        with contextlib.suppress(CheckpointError, TimeoutError):
            while self.pending:
                self.pending.pop().wait(None if self.ranks == 1 else PATIENCE)
