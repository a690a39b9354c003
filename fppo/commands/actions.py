"""What the commands do, once their arguments are read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch
from transformers.utils import logging as transformers_logging

from fppo import quickstart as task
from fppo.assembly.program import ROLLOUTS
from fppo.assembly.run import Assembled, assembled
from fppo.metrics import report as numbers_of
from fppo.pipeline import replay as replays
from fppo.report import write as report
from fppo.runs import sampling as session_rollout
from fppo.runs import session
from fppo.runtime import checkpoint
from fppo.runtime.mesh import LOCAL, Mesh, is_first
from fppo.runtime.watch import Watch
from fppo.settings import files
from fppo.settings.train import TrainSettings


@attrs.frozen
class Here:
    """Where a command runs: this process' place among others, and its device (None: the one that settings name)."""

    mesh: Mesh = LOCAL
    device: torch.device | None = None
    watch: Watch | None = None  # of what goes over the mesh
    sampling: Mesh | None = None  # the same ranks in other groups, for what samples while others train


ALONE = Here()


def train(settings: TrainSettings, here: Here = ALONE) -> int:
    """Trains, exports the policy and writes the report; 130 if it was stopped before its last step."""
    session.check_output(settings)
    with _assembled(settings, here) as parts:
        run = session.run_training(settings, parts, here.watch)
        directory = Path(settings.output_dir)
        if run.step < settings.steps:
            return 130
        session.export(parts, run, directory / session.MODEL)
    if is_first(here.mesh) and "jsonl" in settings.log.loggers:
        page = report.write_report(directory)
        print(f"model: {directory / session.MODEL}\nreport: {page}")
    return 0


def quickstart(directory: Path, seed: int, run: Callable[[TrainSettings], int] = train) -> int:
    """Warms a small model up on flawed demonstrations, then trains it by PPO; goes on where it was stopped.

    `run` trains as the settings say, in this process or in others.
    """
    if not (directory / task.MODEL).exists():
        print("warming up on demonstrations that forget the carry more often than not")
        task.prepare(directory, seed, on_step=lambda step, loss: print(f"  warm-up step {step}  loss {loss:.3f}"))
    status = run(task.settings(directory, seed))
    if status == 0:
        before, after = report.held_out_change(directory)
        print(f"held-out exact match: {before:.1%} before PPO, {after:.1%} after")
    return status


def evaluate(settings: TrainSettings, here: Here = ALONE) -> int:
    """Prints the held-out metrics of a run's checkpoint."""
    with _assembled(settings, here) as parts:
        if parts.evaluate is None:
            raise ValueError("data.eval_path is not set: there are no held-out prompts; give --data.eval-path FILE")
        run = session.restore(settings, parts)
        found = sorted(numbers_of(parts.evaluate(run)).items())
        if is_first(here.mesh):
            print("\n".join([f"step {run.step}", *(f"{name}  {value:.4f}" for name, value in found)]))
    return 0


def rollout(settings: TrainSettings, here: Here = ALONE) -> int:
    """Only samples and scores, and writes what comes; 130 if it was stopped before the last batch."""
    if settings.rollout.from_ is not None or settings.rollout.save:
        raise ValueError("rollout.from and rollout.save are for training; fppo rollout always samples, and saves")
    session.check_output(settings)
    with _assembled(settings, here) as parts:
        done = session_rollout.run_sampling(settings, parts)
    if is_first(here.mesh):
        directory = Path(settings.output_dir) / ROLLOUTS
        print(f"to train on them: fppo train FILE.toml --rollout.from {directory} --steps {done}")
    return 0 if done == settings.steps else 130


def settings_of(directory: Path) -> TrainSettings:
    """The settings that a run wrote, to compute parts of it again: what it saved of rollouts stays as it is.

    Raises ValueError if the directory holds none.
    """
    path = directory / session.SETTINGS
    if not path.exists():
        raise ValueError(f"{path}: there is no such file; give the output_dir of a run")
    return files.replace(files.load(path), {"rollout.save": False})


def nearest_checkpoint(directory: Path, step: int | None) -> int | None:
    """The newest checkpoint's step, at or before `step` if that is given; None if there is none."""
    found = [s for s in checkpoint.steps(directory / session.CHECKPOINTS) if step is None or s <= step]
    return found[-1] if found else None


def export(directory: Path, target: Path, step: int | None) -> int:
    """Writes the policy of a run's checkpoint as a Hugging Face directory."""
    found = nearest_checkpoint(directory, step)
    if found is None or (step is not None and found != step):
        steps = checkpoint.steps(directory / session.CHECKPOINTS)
        raise ValueError(f"{directory} holds no checkpoint of step {step}; there are those of {steps}")
    with _assembled(settings_of(directory), ALONE) as parts:
        run = session.load(parts, directory / session.CHECKPOINTS, found)
        session.export(parts, run, target)
    print(target)
    return 0


def replay(directory: Path, step: int, here: Here = ALONE) -> int:
    """Computes the steps from the nearest checkpoint to `step` again; 1 if a number differs from the record.

    Only the mesh of the run gives its bits.
    """
    recorded = session.recorded(directory)
    say = print if is_first(here.mesh) else _nothing
    settings = settings_of(directory)
    with _assembled(settings, here) as parts:
        found = nearest_checkpoint(directory, step - 1)
        run = parts.run if found is None else session.load(parts, directory / session.CHECKPOINTS, found)
        say(f"from {'the start' if found is None else f'the checkpoint of step {found}'}")
        steps = replays.replay(
            run,
            program=parts.program,
            draw=parts.draw,
            recorded=recorded,
            until=step,
            ahead=settings.rollout.ahead,
            mesh=here.mesh,
        )
        for number, difference in steps:
            if difference is not None:
                say(f"step {number}: {difference.part} differs first in {difference.leaf}")
                return 1
            say(f"step {number}: equal, bit for bit")
    return 0


@contextlib.contextmanager
def _assembled(settings: TrainSettings, here: Here) -> Iterator[Assembled]:
    """What `assembled` gives, without bars of transformers between a command's own lines."""
    transformers_logging.disable_progress_bar()
    with assembled(settings, mesh=here.mesh, sampling_mesh=here.sampling, device=here.device) as parts:
        yield parts


def _nothing(*_: object) -> None:
    pass
