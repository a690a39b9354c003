"""Copies of a run's checkpoints, samples and records at a remote address, and a run that goes on from there.

checkpoints/step_00000100    a checkpoint's files and, in `run`, the run's records as they were then
samples/000100.parquet       sampled rows, up to the step of the newest checkpoint
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from fppo._errors import printable, words_of
from fppo.runs import sample_files
from fppo.runs.sample_files import SAMPLES
from fppo.runs.starts import CHECKPOINTS
from fppo.runtime import checkpoint
from fppo.runtime.checkpoint import begin_aside
from fppo.runtime.exports import sync
from fppo.runtime.mesh import AXES, Mesh, any_rank, ranks_on
from fppo.runtime.remote import Files, Remote, RemoteError, digest_of
from fppo.settings import files

# what a run needs beside a checkpoint to go on as it was: files and directories in its output_dir
RECORDS = (
    *(files.SETTINGS, files.STARTS, "configs", "metrics.jsonl", "digests.jsonl"),
    *("wandb_id", "trackio_id", "mlflow_id", "swanlab_id"),
)
_FOLDER = re.compile(r"step_(\d{8})")
_RECORD = "run/"  # in a remote checkpoint, the prefix of the names of records
_MANIFEST = "state.json"
PAUSE = 0.1  # seconds between two meetings of the ranks


def checkpoints(remote: Remote) -> dict[int, Files | None]:
    """The checkpoints at a remote address by step, ascending, each with its files; None for an incomplete one."""
    found = ((_FOLDER.fullmatch(name), listed) for name, listed in remote.folders(CHECKPOINTS).items())
    return dict(sorted((int(match[1]), listed) for match, listed in found if match))


def complete(remote: Remote) -> dict[int, Files]:
    """The complete checkpoints at a remote address by step, ascending, each with its files."""
    return {step: listed for step, listed in checkpoints(remote).items() if listed is not None}


def _folder(step: int) -> str:
    return f"{CHECKPOINTS}/{checkpoint.path_of(Path(), step).name}"


def copy(directory: Path, remote: Remote, step: int, *, keep: int) -> int:
    """Copy the checkpoint of a step, its run's records and the rows sampled until then, unless they are copied already.
    Then remove all but the newest `keep` remote checkpoints. Returns the number of bytes.

    Complete checkpoints stay so until the new one is. Raises RemoteError, also if another run's checkpoint is in the
    way.
    """
    path, found, sent = checkpoint.place_of(directory / CHECKPOINTS, step), checkpoints(remote), 0
    whole = {at: listed for at, listed in found.items() if listed is not None}
    if step in whole and not _is_copy(whole[step], path):
        raise RemoteError(f"{remote.address}: it holds another run's checkpoint of step {step}; give another address")
    for at in found.keys() - whole.keys():
        remote.remove_folder(_folder(at))
    if step not in whole:
        sent += _copy_samples(directory / SAMPLES, remote, step, known=max(whole, default=0))
        contents: dict[str, Path | bytes] = {file.name: file for file in sorted(path.iterdir())}
        contents |= {f"{_RECORD}{name}": content for name, content in _records(directory).items()}
        sent += remote.put_folder(_folder(step), contents)
    for at in sorted({*whole, step})[:-keep]:
        remote.remove_folder(_folder(at))
    return sent


def _is_copy(listed: Files, path: Path) -> bool:
    """Whether a remote checkpoint's files are those of the local one at `path`, by its manifest."""
    return listed.get(_MANIFEST, (0, ""))[1] == digest_of(path / _MANIFEST)


def _records(directory: Path) -> dict[str, bytes]:
    """The contents of a run's records by their names in its directory."""
    named = [directory / name for name in RECORDS]
    inside = [file for place in named for file in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in inside if file.is_file()}


def _copy_samples(directory: Path, remote: Remote, step: int, *, known: int) -> int:
    """Make the remote files of sampled rows those of the directory until a step; the remote ones until step `known`
    are whole. Returns the number of bytes that were copied."""
    own = {path.name: path for at, path in sample_files.files(directory).items() if at <= step}
    held, sent = remote.sizes(SAMPLES), 0
    for name, path in own.items():
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # left out meanwhile, since the files exceed log.samples_gb
            continue
        if held.get(name) != len(content) or int(path.stem) > known:
            remote.put(f"{SAMPLES}/{name}", content)
            sent += len(content)
    for name in held.keys() - own.keys():
        if sample_files.step_of(name) is not None:
            remote.remove(f"{SAMPLES}/{name}")
    return sent


def fetch(remote: Remote, directory: Path, step: int, listed: Files) -> int:
    """Download the files `listed` of a complete checkpoint, its run's records among them, into a directory.

    The checkpoint gets its name once all files are checked. Returns the number of bytes. Raises RemoteError.
    """
    final = checkpoint.path_of(directory / CHECKPOINTS, step)
    draft = final.with_name(f".{final.name}.fetched")

    def target(name: str) -> Path:
        return directory / name.removeprefix(_RECORD) if name.startswith(_RECORD) else draft / name

    settings = f"{_RECORD}{files.SETTINGS}"
    kept = {settings} if target(settings).exists() else set()  # it may be the user's own
    draft.mkdir(parents=True, exist_ok=True)
    received = remote.get_folder(_folder(step), {name: listed[name] for name in listed if name not in kept}, target)
    sync(draft)
    draft.rename(final)
    sync(final.parent)
    return received


def fetch_newest(directory: Path, remote: Remote, *, resume: str) -> None:
    """Fetch a run's newest complete remote checkpoint into a directory without checkpoints, with its records and
    samples.

    Raises ValueError if the address holds another run's checkpoint, or one of a later step than the directory, and if
    `resume` is "never". Raises RemoteError.
    """
    held = complete(remote)
    place, newest = directory / CHECKPOINTS, max(held, default=0)
    own, named = checkpoint.steps(place), f"checkpoint.remote = {remote.address!r}"
    if not held:
        return
    if own and newest > own[-1]:
        raise ValueError(
            f"{named}: it holds the checkpoint of step {newest}, and {place} none after step {own[-1]}: remove these "
            f"to go on from step {newest}, or give another address"
        )
    if newest in own and not _is_copy(held[newest], checkpoint.place_of(place, newest)):
        raise ValueError(f"{named}: it holds another run's checkpoint of step {newest}; give another address")
    if not own and resume == "never":
        raise ValueError(
            f"{named}: it holds the checkpoint of step {newest}, and resume = 'never': give another address, or "
            "resume = 'auto' to go on from there"
        )
    if not own:
        start = time.monotonic()
        received = _fetch_samples(directory / SAMPLES, remote, newest) + fetch(remote, directory, newest, held[newest])
        took = f"{received / 1e6:,.1f} MB in {time.monotonic() - start:.1f} s"
        print(f"fetched the checkpoint of step {newest} from {remote.address}: {took}", file=sys.stderr, flush=True)


def _fetch_samples(directory: Path, remote: Remote, until: int) -> int:
    """Download the rows that were sampled until a step, and return the number of bytes."""
    held = {
        name: size for name, size in remote.sizes(SAMPLES).items() if (sample_files.step_of(name) or until + 1) <= until
    }
    for name, size in held.items():
        remote.get(f"{SAMPLES}/{name}", directory / name, size)
    return sum(held.values())


@contextlib.contextmanager
def run_at(place: str, step: int | None) -> Iterator[Path]:
    """A context with the directory of the run at `place`: that path or, for an address, a temporary directory with its
    checkpoint of `step` (None: the newest) and its records. Raises RemoteError if the address has no such checkpoint.
    """
    if "://" not in place:
        yield Path(place)
        return
    remote = Remote.at(place)
    held = complete(remote)
    chosen = max(held, default=0) if step is None else step
    if chosen not in held:
        raise RemoteError(f"{remote.address} holds no complete checkpoint of step {step}; there are those of {[*held]}")
    with tempfile.TemporaryDirectory(prefix="fppo_") as directory:
        fetch(remote, Path(directory), chosen, held[chosen])
        yield Path(directory)


class Copies:
    """Copy the checkpoints of a run to a remote address, one at a time, in a thread.

    One that is written during a copy waits, and of several only the newest is copied. A failure is said on standard
    error, and the next checkpoint is another try. `finish` ends the work. It is a context, which does so after an error
    too.
    """

    def __init__(self, directory: Path, remote: Remote, keep: int) -> None:
        self._directory, self._remote, self._keep = directory, remote, keep
        self._waiting: int | None = None  # the step of the checkpoint to copy next
        self._copying: tuple[int, Future[dict[str, float]]] | None = None
        self._copied: int | None = None

    def written(self, path: Path) -> None:
        """Copy this checkpoint next, and remove all but the newest `keep` local ones and the one that is being
        copied."""
        self._waiting = checkpoint.step_of(path)
        self._begin()
        spare = [step for step, result in ([] if self._copying is None else [self._copying]) if not result.done()]
        checkpoint.drop_old(path.parent, self._keep, spare=spare)

    def numbers(self) -> dict[str, float]:
        """The seconds and GiB of a copy that has ended since the last call; then the next one begins."""
        numbers: dict[str, float] = {}
        if self._copying is not None and self._copying[1].done():
            with contextlib.suppress(RemoteError):  # it was said
                numbers = self._ended()
        self._begin()
        return numbers

    def finish(self) -> None:
        """Wait for the copy under way, and copy the newest checkpoint if it is another. Raises RemoteError."""
        place = self._directory / CHECKPOINTS
        newest = max(checkpoint.steps(place), default=None)
        self._waiting = newest if newest not in (self._copied, self._copying and self._copying[0]) else None
        failed: RemoteError | None = None
        while self._copying is not None or self._waiting is not None:
            self._begin()
            try:
                self._ended()
            except RemoteError as error:
                failed = error
            checkpoint.drop_old(place, self._keep)
        if failed is not None and newest != self._copied:
            raise RemoteError(
                f"{failed}; the checkpoint of step {newest} is whole in {place}, and the same command copies it later"
            ) from failed

    def __enter__(self) -> Copies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, (Exception, SystemExit)) and not isinstance(error, RemoteError):
            with contextlib.suppress(RemoteError):  # it was said
                self.finish()

    def _begin(self) -> None:
        """Begin to copy the checkpoint that waits, if none is being copied."""
        if self._copying is None and self._waiting is not None:
            step, self._waiting, result = self._waiting, None, Future[dict[str, float]]()
            self._copying = step, result
            begin_aside(partial(self._run, step, result), name=f"copy of step {step}")

    def _ended(self) -> dict[str, float]:
        """Wait for the copy under way, and return its numbers. Raises RemoteError."""
        assert self._copying is not None
        (step, result), self._copying = self._copying, None
        numbers = result.result()
        self._copied = step
        return numbers

    def _run(self, step: int, result: Future[dict[str, float]]) -> None:
        """Copy the checkpoint of a step; set the numbers or the error as `result`."""
        start = time.monotonic()
        try:
            sent = copy(self._directory, self._remote, step, keep=self._keep)
            result.set_result({"perf/copied_gb": sent / 2**30, "perf/copy_seconds": time.monotonic() - start})
        except BaseException as error:
            failed = error if isinstance(error, RemoteError) else RemoteError(words_of(error))
            text = f"the checkpoint of step {step} is not copied to {self._remote.address}: {failed}"
            print(printable(text), file=sys.stderr, flush=True)
            result.set_exception(failed)


def meanwhile(work: Callable[[], None], mesh: Mesh, device: torch.device) -> None:
    """Do the work of this rank while the ranks of the mesh wait for one another, however long it takes: they meet all
    the time, so that no collective waits too long. Every rank calls."""
    if ranks_on(mesh, AXES) == 1:
        return work()
    with ThreadPoolExecutor(1, "meanwhile") as pool:
        done = pool.submit(work)
        while any_rank(not done.done(), mesh, device):
            time.sleep(PAUSE)
        done.result()
