"""One attempt to write a checkpoint: all ranks write into one draft directory, and rank 0 renames it at the end.

The ranks agree on the attempt in the calling thread, by a collective. The rest runs in a thread of each rank and uses
the file system alone, so that it delays no collective. The draft's name has a random token, so leftovers of a crashed
attempt are not mistaken for it. A rank's JSON appears once its tensors are on disk. Rank 0 waits for all of these,
writes the manifest and renames the draft. The other ranks wait for that, or for the file with the reason of a failure.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import attrs
import torch

from fppo.runtime import _checkpoint_files as files
from fppo.runtime._checkpoint_files import CheckpointError, DamagedError
from fppo.runtime.clock import ProcessClock, Unchanged
from fppo.runtime.exports import sync
from fppo.runtime.mesh import AXES, Mesh, gather_objects, place_on, ranks_on

T = TypeVar("T")
NAME = re.compile(r"step_(\d{8})")
FAILED = "failed.txt"
LONGEST_PAUSE = 1.0  # seconds between two looks at the file system


def path_of(directory: Path, step: int) -> Path:
    """The path of a step's checkpoint."""
    return directory / f"step_{step:08d}"


def steps(directory: Path) -> list[int]:
    """The steps of the complete checkpoints, ascending. Leftovers of crashes have other names."""
    return sorted({step for _, step in _entries(directory)})


def place_of(directory: Path, step: int) -> Path:
    """The directory whose manifest has this step, whatever its name."""
    own = path_of(directory, step)
    return next((path for path, held in _entries(directory) if held == step), own)


def step_in(path: Path) -> int:
    """The step of the checkpoint at `path`, a directory named like a checkpoint: from its manifest or, if that is
    damaged, from the directory's name."""
    try:
        return int(files.read_manifest(path)["step"])
    except CheckpointError:
        return int(path.name.removeprefix("step_"))


def misnamed(directory: Path) -> list[str]:
    """Warnings about checkpoints whose names and manifests give different steps."""
    other = [(path, step) for path, step in _entries(directory) if path != path_of(directory, step)]
    return [
        f"{path} holds the checkpoint of step {step}, as its manifest says; its name is wrong" for path, step in other
    ]


def _entries(directory: Path) -> list[tuple[Path, int]]:
    """The complete checkpoints with their steps, ascending; of several of one step the one named after it first."""
    if not directory.is_dir():
        return []
    there = sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name))
    return sorted(((path, step_in(path)) for path in there), key=lambda x: (x[1], x[0] != path_of(directory, x[1])))


def make_way(path: Path) -> None:
    """Free `path`, which is named after a step: a checkpoint of another step there is renamed after its own step.

    A checkpoint in the way of the new name is first moved by this rule. If the other step has a rightly named
    checkpoint already, the moved one gets a name that no run reads. Raises OSError.
    """
    if not path.is_dir() or path == path_of(path.parent, step := step_in(path)):
        return
    beside = path.with_name(f"{path.name}.of_step_{step}")
    path.rename(beside)
    own = path_of(path.parent, step)
    make_way(own)
    if not own.exists():
        beside.rename(own)


@attrs.frozen
class Attempt:
    """One rank's view of an attempt to write a checkpoint. `token` is the random part of the draft's name; None if the
    step had a checkpoint already."""

    directory: Path
    step: int
    token: str | None
    rank: int  # the rank in the whole mesh
    ranks: int
    timeout: float  # seconds to wait without any visible progress

    @property
    def final(self) -> Path:
        return path_of(self.directory, self.step)

    @property
    def draft(self) -> Path:
        return self.directory / f".{self.final.name}.{self.token}"

    def await_draft(self) -> None:
        """Wait until this rank sees the directory that rank 0 created."""
        self._wait(
            lambda: self.draft.is_dir() or None,
            lambda: f"rank {self.rank} cannot see {self.draft}, which rank 0 has made: {self._shared()}",
        )

    def await_shards(self, writers: Sequence[str]) -> None:
        """Wait for the files of all ranks that write; `writers` describes these ranks."""
        missing = list(range(len(writers)))

        def arrived() -> bool | None:
            self.raise_if_failed()
            missing[:] = [rank for rank in missing if not files.about_file(self.draft, rank).exists()]
            return None if missing else True

        def complaint() -> str:
            silent = [rank for rank in missing if not files.data_file(self.draft, rank).exists()]
            if silent:
                names = "; ".join(writers[rank] for rank in silent)
                return f"rank 0 can see nothing written by the ranks at {names}: {self._shared()}"
            names = "; ".join(writers[rank] for rank in missing)
            return f"the ranks at {names} have not finished writing: are they alive?"

        self._wait(arrived, complaint)

    def await_commit(self) -> None:
        """Wait until rank 0 has renamed the draft."""

        def committed() -> bool | None:
            self.raise_if_failed()
            if not (self.final / files.MANIFEST).exists():
                return None
            with contextlib.suppress(DamagedError):  # the directory was listed during the rename
                return True if files.read_manifest(self.final)["attempt"] == self.token else None
            return None

        self._wait(committed, lambda: f"rank 0 has not finished it: is it alive? {self._shared()}")

    def raise_if_failed(self) -> None:
        """Raise CheckpointError with the reason for which another rank gave up, if any."""
        with contextlib.suppress(OSError):
            raise CheckpointError((self.draft / FAILED).read_text())

    def give_up(self, reason: str, shard: int | None) -> None:
        """Publish the `reason` for a failure, unless another rank has published one, and remove this rank's files,
        number `shard` (None: it has none)."""
        if self.ranks == 1:
            shutil.rmtree(self.draft, ignore_errors=True)
            return
        with contextlib.suppress(OSError):
            if shard is not None:
                for path in (files.data_file, files.about_file):
                    path(self.draft, shard).unlink(missing_ok=True)
            if not (self.draft / FAILED).exists():
                failure = self.draft / f".{FAILED}.{self.rank}"
                failure.write_text(reason)
                failure.rename(self.draft / FAILED)

    def _shared(self) -> str:
        return f"is {self.directory} one directory for all nodes?"

    def _wait(self, look: Callable[[], T | None], complaint: Callable[[], str]) -> T:
        """Wait until `look()` returns a result, and return it. Raises CheckpointError with the text of `complaint()`
        once the draft has not changed for `timeout` seconds."""
        clock, unchanged, pause = ProcessClock(2 * LONGEST_PAUSE), Unchanged(), 0.005
        while (seen := look()) is None:
            if unchanged.seconds(_sizes(self.draft), clock.now()) > self.timeout:
                raise CheckpointError(f"for {self.timeout:g} seconds nothing has happened: {complaint()}")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)
        return seen


def _sizes(directory: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                sizes[entry.name] = entry.stat().st_size
    return sizes


def agree(directory: Path, step: int, mesh: Mesh, device: torch.device, timeout: float) -> Attempt:
    """Agree on the attempt that rank 0 begins; all ranks get its token. If rank 0 could not begin, all raise
    CheckpointError.

    All ranks must call before any returns. So no rank still works on an older attempt when rank 0 removes its draft.
    """
    rank, ranks = place_on(mesh, AXES), ranks_on(mesh, AXES)
    answer: dict[str, str | None] = {}
    if rank == 0:
        attempt = Attempt(directory, step, os.urandom(8).hex(), rank, ranks, timeout)
        try:
            make_way(attempt.final)
            if attempt.final.is_dir():
                answer = {"token": None}
            else:
                attempt.draft.mkdir(parents=True)
                answer = {"token": attempt.token}
        except OSError as error:
            answer = {"error": str(error)}
    answer = gather_objects(answer, mesh, AXES, device)[0]
    if error := answer.get("error"):
        raise cannot_write(directory, step, error)
    attempt = Attempt(directory, step, answer["token"], rank, ranks, timeout)
    if rank == 0 and attempt.token is not None:
        _clear_leftovers(attempt)
    return attempt


def cannot_write(directory: Path, step: int, reason: str) -> CheckpointError:
    """The error for a checkpoint that could not be written, with the reason and a remedy."""
    last = steps(directory)
    return CheckpointError(
        f"the checkpoint of step {step} could not be written to {directory}: {reason}. "
        f"{f'The last complete one is of step {last[-1]}.' if last else 'There is none yet.'} "
        "Free some space or choose another output directory, then resume."
    )


def _clear_leftovers(attempt: Attempt) -> None:
    """Remove the drafts of crashed and failed attempts."""
    for old in attempt.directory.glob(".step_*"):
        if old != attempt.draft:
            shutil.rmtree(old, ignore_errors=True)


def commit(attempt: Attempt) -> None:
    """Rename the draft to the checkpoint's name. Raises OSError if that name is taken, so that none is replaced."""
    sync(attempt.draft)
    attempt.draft.rename(attempt.final)
    sync(attempt.directory)


def drop(path: Path) -> None:
    """Rename a checkpoint, then remove it, so that no half-removed directory has a checkpoint's name."""
    doomed = path.with_name(f".{path.name}.dropped")
    with contextlib.suppress(OSError):
        path.rename(doomed)
        shutil.rmtree(doomed)


def drop_old(directory: Path, keep: int | None, *, spare: Sequence[int] = ()) -> None:
    """Drop all but the newest `keep` checkpoints and those of the steps in `spare`."""
    old = {*steps(directory)[: -keep if keep else 0]} - {*spare}
    for path, step in _entries(directory) if old else []:
        if step in old:
            drop(path)
