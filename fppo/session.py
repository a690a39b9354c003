"""A run on disk: what is written to its directory, when, and how it goes on after a stop."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import attrs

from fppo import config, jsonl, loggers, models
from fppo.assembly import Assembled
from fppo.jsonl import JsonLines
from fppo.pipeline import replay
from fppo.pipeline.run import RunState
from fppo.pipeline.train import Observe, StepRecord, train
from fppo.runtime import checkpoint
from fppo.settings import TrainSettings

CHECKPOINTS, MODEL, DUMPS, SETTINGS = "checkpoints", "model", "dumps", "settings.toml"


def restore(settings: TrainSettings, fresh: RunState) -> RunState:
    """The state to start from: `_found`'s, if it is a state of this run. Raises ValueError for another seed's."""
    run = _found(settings, fresh)
    if run.key != fresh.key:
        raise ValueError(
            f"seed = {settings.seed}, but the checkpoint in {settings.output_dir} is of a run with another seed: "
            "give that seed to go on with it, or another output_dir to start anew"
        )
    return run


def _found(settings: TrainSettings, fresh: RunState) -> RunState:
    """By `settings.resume`: the newest checkpoint's state, a named one's, or the fresh one."""
    directory = Path(settings.output_dir) / CHECKPOINTS
    found = checkpoint.steps(directory)
    match settings.resume:
        case "never":
            if found:
                raise ValueError(
                    f"resume = 'never', but {directory} holds the checkpoint of step {found[-1]}: "
                    "give another output_dir, or resume = 'auto' to go on from there"
                )
            return fresh
        case "auto" | "must":
            if not found and settings.resume == "must":
                raise ValueError(f"resume = 'must', but there is no checkpoint in {directory}")
            return checkpoint.load(fresh, directory, found[-1]) if found else fresh
        case _:
            path = Path(settings.resume)
            return checkpoint.load(fresh, path.parent, checkpoint.step_of(path))


@contextlib.contextmanager
def asked_to_stop() -> Iterator[list[str]]:
    """A list that is not empty once ctrl-C or SIGTERM has asked for a stop; a second ctrl-C interrupts at once."""
    asked: list[str] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if asked:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)
        print("\nfinishing this step; ctrl-C again abandons it", file=sys.stderr, flush=True)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@attrs.frozen(kw_only=True)
class _Writer:
    """Writes what replay and resuming need: digests, dumps of updates that were not finite, checkpoints."""

    directory: Path
    lines: JsonLines
    every: int
    keep: int
    steps: int

    def __call__(self, record: StepRecord) -> None:
        if record.experience is None:
            return
        line = replay.record_line(record)
        self.lines.write(line)
        skipped = sum(record.metrics.get(f"{role}/skipped", 0.0) for role in ("actor", "critic"))
        if skipped:
            path = replay.dump(record, line, self.directory / DUMPS)
            print(
                f"step {record.run.step}: an update was not finite and was skipped; its batch is in {path}; "
                f"fppo replay {self.directory} --step {record.run.step} computes it again",
                file=sys.stderr,
            )
        step = record.run.step
        if step == self.steps or (self.every and step % self.every == 0):
            self.save(record.run)

    def save(self, run: RunState) -> None:
        """Writes the checkpoint of a state."""
        checkpoint.save(run, self.directory / CHECKPOINTS, run.step, keep=self.keep)


def run_training(settings: TrainSettings, assembled: Assembled) -> RunState:
    """Trains from where the run stands to its last step, or until asked to stop, writing as it goes."""
    directory = Path(settings.output_dir)
    run = restore(settings, assembled.run)
    first = run.step + 1 if run.step else 0
    directory.mkdir(parents=True, exist_ok=True)
    config.save(settings, directory / SETTINGS)
    opened = loggers.open_loggers(
        settings.log.loggers,
        directory,
        steps=settings.steps,
        first_step=first,
        project=settings.log.project,
        settings=config.to_dict(settings),
    )
    samples = JsonLines(directory / loggers.SAMPLES, first_step=first)
    digests = JsonLines(directory / replay.DIGESTS, first_step=first)
    writer = _Writer(
        directory=directory,
        lines=digests,
        every=settings.checkpoint.every,
        keep=settings.checkpoint.keep,
        steps=settings.steps,
    )
    logged = loggers.observer(
        opened, samples=samples, tokenizer=assembled.tokenizer, count=settings.log.samples_per_step
    )
    observers: list[Observe] = [logged, writer]
    try:
        with asked_to_stop() as asked:
            run = train(
                run,
                program=assembled.program,
                draw=assembled.draw,
                steps=settings.steps,
                observers=observers,
                evaluate=assembled.evaluate,
                evaluate_every=settings.eval.every,
                evaluate_before=settings.eval.before,
                stop=lambda: bool(asked),
            )
            writer.save(run)
    finally:
        loggers.close([*opened, samples, digests])
    if run.step < settings.steps:
        print(f"stopped after step {run.step}; to go on: fppo train {directory / SETTINGS}", file=sys.stderr)
    return run


def export(assembled: Assembled, run: RunState, target: Path) -> None:
    """Writes the policy as a Hugging Face directory."""
    models.save(assembled.model, run.actor.params, target, tokenizer=assembled.tokenizer)


def recorded(directory: Path) -> dict[int, dict]:
    """The digests of a run's steps."""
    return {line["step"]: line for line in jsonl.read(directory / replay.DIGESTS)}
