"""The sampled rows of a run, step by step: one Parquet file for each, written in a thread and read by column."""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fppo.batch import Experience
from fppo.pipeline.train import StepRecord
from fppo.runs import samples
from fppo.runs.jsonl import plain

SAMPLES = "samples"
_FILE = re.compile(r"(\d{6,})\.parquet")


def files(directory: Path) -> dict[int, Path]:
    """The files of a directory by step, in order."""
    found = ((_FILE.fullmatch(path.name), path) for path in directory.glob("*.parquet"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


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


def thinned(found: Mapping[int, Path], most_bytes: float) -> list[Path]:
    """The files to remove, so that together they take `most_bytes`, or only the newest is left.

    The newest step stays, and the multiples of the smallest power of 2 that suffices.
    """
    *older, newest = found
    sizes = {step: path.stat().st_size for step, path in found.items()}
    every = 1
    while True:
        kept = [step for step in older if step % every == 0]
        if not kept or sum(sizes[step] for step in (*kept, newest)) <= most_bytes:
            return [found[step] for step in older if step not in kept]
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


def rows(table: pa.Table, numbers: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
    """The rows at `numbers` (None: all) as JSON objects for the report.

    `log_probs`, `advantages` and `values` have one entry for each of the `tokens`, which are pieces of text; None for
    tokens that are not trained on and numbers that are not finite. `values` is None without a critic. `images` are data
    URIs, for a video the list of its frames'; a prompt without any lacks the key.
    """
    shown = _images(table)
    for number in range(table.num_rows) if numbers is None else numbers:
        row = table.slice(number, 1).to_pylist()[0]
        prompt = row["step"], row["group"]
        lists = {name: _trained(row.get(name), row["mask"]) for name in ("old_log_probs", "advantages", "values")}
        yield {
            **{name: row[name] for name in ("step", "id", "row_id", "source", "prompt", "response", "finish")},
            "tokens": row["pieces"],
            "log_probs": lists.pop("old_log_probs"),
            **lists,
            "score": plain(row["score"]),
            "named_scores": {name[6:]: plain(x) for name, x in row.items() if name.startswith("score.")},
            "ground_truth": row["ground_truth"],
            **({"images": shown[prompt]} if prompt in shown else {}),
        }


def _trained(numbers: Sequence[float] | None, mask: Sequence[bool]) -> list[float | None] | None:
    """The numbers of trained tokens, None elsewhere."""
    if numbers is None:
        return None
    return [round(x, 6) if kept and math.isfinite(x) else None for x, kept in zip(numbers, mask, strict=True)]


def _images(table: pa.Table) -> dict[tuple[int, int], list[str | list[str]]]:
    """The images of each (step, group) that has any, as data URIs."""
    if "images" not in table.column_names:
        return {}
    columns = zip(*(table.column(name).to_pylist() for name in ("step", "group", "images")), strict=True)
    return {(step, group): [_uris(x) for x in images] for step, group, images in columns if images is not None}


def _uris(frames: Sequence[bytes]) -> str | list[str]:
    uris = [f"data:image/png;base64,{base64.b64encode(frame).decode()}" for frame in frames]
    return uris[0] if len(uris) == 1 else uris
