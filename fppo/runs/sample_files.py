"""The sampled rows of a run, step by step: one Parquet file for each, written in a thread and read by column."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fppo.batch import Experience
from fppo.pipeline.train import StepRecord
from fppo.runs import samples

SAMPLES = "samples"
_FILE = re.compile(r"(\d{6,})\.parquet")


def files(directory: Path) -> dict[int, Path]:
    """The files of a directory by step, in order."""
    found = ((step_of(path.name), path) for path in directory.glob("*.parquet"))
    return dict(sorted((step, path) for step, path in found if step is not None))


def step_of(name: str) -> int | None:
    """The step of a file by its name; None for another file."""
    match = _FILE.fullmatch(name)
    return None if match is None else int(match[1])


class SampleFiles:
    """Write the rows of each step to a file of its own, in a thread, one step behind.

    `count` rows a step are written, None: all. A file has its name only once it is whole. Files of `first_step` and
    later are removed at the start. While the files together exceed `most_bytes`, every second step, then every fourth
    and so on is kept, and the newest. Raises OSError at the next step, or on closing, if a file could not be written.
    """

    def __init__(
        self, directory: Path, tokenizer: Any, *, count: int | None, most_bytes: float, first_step: int = 0
    ) -> None:
        self._directory, self._tokenizer, self._count, self._most = directory, tokenizer, count, most_bytes
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(".*.new"):
            path.unlink()
        for step, path in files(directory).items():
            if step >= first_step:
                path.unlink()
        self._thread = ThreadPoolExecutor(1, "samples")
        self._last: Future[None] | None = None

    def __call__(self, record: StepRecord) -> None:
        """Begin to write the rows of a step, once those of the step before are written."""
        self.wait()
        if record.experience is not None and self._count != 0:
            rows = samples.on_host(samples.spread(record.experience, self._count))
            self._last = self._thread.submit(self._write, rows, record.run.step)

    def wait(self) -> None:
        """Wait until the rows of the last step are written. Raises OSError if they could not be."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, experience: Experience, step: int) -> None:
        table = samples.table_of(experience, self._tokenizer, step)
        draft = self._directory / f".{step:06d}.new"
        pq.write_table(table, draft, compression="zstd")
        os.replace(draft, self._directory / f"{step:06d}.parquet")
        for path in thinned(files(self._directory), self._most):
            path.unlink()


def thinned(files: Mapping[int, Path], most_bytes: float) -> list[Path]:
    """The files to remove, so that the others take at most `most_bytes` together, or only the newest is left.

    The newest step stays, and the multiples of the smallest power of 2 that suffices.
    """
    *older, newest = files
    sizes = {step: path.stat().st_size for step, path in files.items()}
    every = 1
    while True:
        kept = [step for step in older if step % every == 0]
        if not kept or sum(sizes[step] for step in (*kept, newest)) <= most_bytes:
            return [files[step] for step in older if step not in kept]
        every *= 2


def read(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The table of a file, float16 widened to float32. `columns` that it lacks are left out; None: all.

    Raises ValueError for a damaged file, which names it.
    """
    try:
        file = pq.ParquetFile(path)
        table = file.read([name for name in file.schema_arrow.names if columns is None or name in columns])
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise ValueError(f"{path}: damaged: {error}") from error
    for place, field in enumerate(table.schema):
        if field.type == pa.list_(pa.float16()):
            table = table.set_column(place, field.name, table.column(place).cast(pa.list_(pa.float32())))
    return table
