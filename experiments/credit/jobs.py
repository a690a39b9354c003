"""Runs in processes of one thread each, whose results stand in files as soon as they are there."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

J = TypeVar("J")
Say = Callable[[J], Mapping[str, Any]]  # all that a job's result depends on, as JSON has it


def results(
    jobs: Sequence[J], run: Callable[[J], Any], *, say: Say[J], workers: int, directory: Path
) -> Iterator[tuple[J, Any]]:
    """Each job with what `run` makes of it (JSON): first of those that `directory` has, then as they come.

    A run is kept in a file of its own, which is there whole or not at all, so that whoever is stopped goes on from
    there. Runs that raise stop no other; they are named at the end, with SystemExit.
    """
    directory.mkdir(parents=True, exist_ok=True)
    places = [directory / f"{named(say(job))}.json" for job in jobs]
    missing = []
    for number, place in enumerate(places):
        if place.exists():
            yield jobs[number], json.loads(place.read_text())["result"]
        else:
            missing.append((number, jobs[number], place))
    failed: list[str] = []
    for number, error in each(missing, partial(_keep, run=run, say=say), workers=workers):
        if error:
            failed.append(places[number].stem)
            print(f"\n{failed[-1]}\n{error}", file=sys.stderr, flush=True)
        else:
            yield jobs[number], json.loads(places[number].read_text())["result"]
    if failed:
        sys.exit(f"{len(failed)} of {len(jobs)} runs failed; the same command tries them again: {', '.join(failed)}")


def each(jobs: Sequence[J], run: Callable[[J], Any], *, workers: int) -> Iterator[Any]:
    """What `run` makes of the jobs, as they come; with one worker here and in order."""
    if workers == 1 or not jobs:
        yield from map(run, jobs)
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by which the pool ends its processes
    try:
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(min(workers, len(jobs)), partial(torch.set_num_threads, 1)) as pool:
            yield from pool.imap_unordered(run, jobs)
    finally:
        signal.signal(signal.SIGTERM, before)


def command(main: Callable[..., Any]) -> None:
    """Calls `main` with the flags of the command line, which are its arguments, in one thread."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name, x in inspect.signature(main).parameters.items():
        if x.default is False:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=type(x.default), default=x.default)
    torch.set_num_threads(1)
    main(**vars(parser.parse_args()))


def _keep(job: tuple[int, J, Path], *, run: Callable[[J], Any], say: Say[J]) -> tuple[int, str]:
    """Runs a job and keeps its result: its number, and what was raised."""
    number, own, place = job
    try:
        write(place, json.dumps({"job": dict(say(own)), "result": run(own)}, indent=1).encode())
        return number, ""
    except Exception:
        return number, traceback.format_exc()


def write(path: Path, content: bytes) -> None:
    """The file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    beside.write_bytes(content)
    beside.replace(path)


def named(said: Mapping[str, Any]) -> str:
    """A file's name for what is said of a job, which no other has: its first words, and a digest of all."""
    words = [str(x) for x in said.values() if isinstance(x, str | int | float)][:4]
    plain = "".join(c if c.isalnum() or c in "-." else "_" for c in "-".join(words))
    return f"{plain}-{hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]}"
