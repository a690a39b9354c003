"""Rows from files and data sets, each with its file and line."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fppo._errors import json_of
from fppo.data.plain import TwiceError, irregular, once, twice
from fppo.data.problems import Problems

PathLike = str | os.PathLike[str]
FORMATS = (".jsonl", ".json", ".csv", ".parquet")
_BATCH = 256  # rows of a parquet file that are decoded at a time
_ROW = 400  # bytes of a row in memory, besides its values
UNPACKED = 4_000_000_000  # bytes that the rows of any parquet file may take
_RATIO = 100  # and those of a large one, per byte of the file


@attrs.frozen
class Row:
    """One row with its origin: the line in a file of lines, else the number of the row, both from 1."""

    file: str
    line: int
    fields: dict[str, Any]
    source: str  # the file's or data set's name
    filled: bool = False  # nested nulls may be Arrow's filling for fields of other rows

    @property
    def place(self) -> str:
        """The row's origin in the form that editors open, file:line."""
        return f"{self.file}:{self.line}"

    @property
    def name(self) -> str:
        """`place` without the file's directory."""
        return f"{Path(self.file).name}:{self.line}"


def read_rows(
    paths: PathLike | Sequence[PathLike],
    *,
    split: str = "train",
    stream: int | None = None,
    max_rows: int | None = None,
    problems: Problems | None = None,
) -> list[Row]:
    """Read the rows of all `paths`, in order, or the first `max_rows` of them.

    A path is a jsonl, json (an array of objects, or lines), csv (its first line names the fields, which are texts) or
    parquet file; a directory that the datasets library saved or can read; or the name of a data set, as
    "openai/gsm8k:main" where it has several configurations. Of the last two, `split` is read; with `stream` only that
    many first rows of a named data set are downloaded. Raises ValueError for unreadable paths, for malformed lines,
    naming all, and for no rows at all; with `problems`, malformed lines are noted in it instead.
    """
    many = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    noted = Problems() if problems is None else problems
    rows = [*itertools.islice((row for path in many for row in _read(path, split, stream, noted)), max_rows)]
    if problems is None:
        noted.check("data")
    if not rows and not noted.count:
        raise ValueError(f"the data set is empty: no rows in {', '.join(map(str, many)) or 'no files'}")
    return rows


def rows_of(values: Iterable[Any], name: str, *, problems: Problems | None = None) -> list[Row]:
    """The rows returned by the function `name`, numbered from 1. Raises ValueError for none, and for other values."""
    noted = Problems() if problems is None else problems
    rows: list[Row] = []
    for number, value in enumerate(values, start=1):
        if isinstance(value, Mapping):
            rows.append(Row(name, number, dict(value), name, filled=True))
        else:
            noted.add(f"a {type(value).__name__}, not a dict with fields", at=f"{name}:{number}")
    if problems is None:
        noted.check("data")
    if not rows and not noted.count:
        raise ValueError(f"the data set is empty: {name} gave no rows")
    return rows


def _read(path: PathLike, split: str, stream: int | None, problems: Problems) -> Iterator[Row]:
    file, text = Path(path), os.fspath(path)
    if (wrong := irregular(file)) is not None:
        raise ValueError(f"{text if text.isprintable() else repr(text)}: {wrong}")
    if file.is_file():
        return _file(file, problems)
    if file.is_dir():
        return _directory(file, split, problems)
    if file.suffix.lower() in FORMATS or text.startswith((".", "/", "~")):
        raise ValueError(f"{text}: no such file")
    return _named(text, split, stream)


def _file(file: Path, problems: Problems) -> Iterator[Row]:
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return _parquet(file)
    if suffix == ".csv":
        return _csv(file, problems)
    if suffix in (".jsonl", ".json"):
        return _json(file, problems, lines=suffix == ".jsonl")
    raise ValueError(f"{file}: unknown kind of file {suffix!r}; there are {', '.join(FORMATS)}")


def _text(file: Path, problems: Problems) -> str:
    """The file's text with its line ends kept; "" and a problem if it is not UTF-8."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problems.add(f"{file}:{_line_of(file, error.start)}: not UTF-8: {error.reason}")
        return ""


def _csv(file: Path, problems: Problems) -> Iterator[Row]:
    """The rows of a CSV file, each with its first line."""
    names: list[str] | None = None
    for line, cells in _cells(file, problems):
        if names is None:
            names = cells
            if more := twice(names):
                problems.add(f"the first line names {more} more than once; leave one of each", at=f"{file}:{line}")
                return
        elif cells and len(cells) != len(names):
            problems.add(f"{len(cells)} fields, and the first line names {len(names)}", at=f"{file}:{line}")
        elif cells:
            yield Row(str(file), line, dict(zip(names, cells, strict=True)), file.stem)


def _cells(file: Path, problems: Problems) -> list[tuple[int, list[str]]]:
    """The fields of each record, with its first line. Fields may have any length: the csv module's process-wide limit
    is lifted while the file is read."""
    reader = csv.reader(io.StringIO(_text(file, problems), newline=""), strict=True)
    records: list[tuple[int, list[str]]] = []
    line, limit = 1, csv.field_size_limit(sys.maxsize)
    try:
        for cells in reader:
            records.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        problems.add(f"not CSV: {error}", at=f"{file}:{line}")
    finally:
        csv.field_size_limit(limit)
    return records


def _json(file: Path, problems: Problems, *, lines: bool) -> Iterator[Row]:
    if not lines and (text := _text(file, problems)).lstrip().startswith("["):
        yield from _array(file, text, problems)
        return
    try:
        with file.open(encoding="utf-8-sig") as opened:
            for number, line in enumerate(opened, start=1):
                if line.strip():
                    yield from _object(file, number, line.removesuffix("\n"), problems)
    except UnicodeDecodeError:
        _text(file, problems)


def _line_of(file: Path, position: int) -> int:
    return file.read_bytes()[:position].count(b"\n") + 1


def _object(file: Path, number: int, line: str, problems: Problems) -> Iterator[Row]:
    try:
        value = json_of(line, pairs=once)
    except TwiceError as error:
        problems.add(str(error), at=f"{file}:{number}")
        return
    except ValueError as error:
        problems.add(f"not JSON: {error}", at=f"{file}:{number}")
        return
    if isinstance(value, dict):
        yield Row(str(file), number, value, file.stem)
    else:
        problems.add(f"a {type(value).__name__}, not an object with fields", at=f"{file}:{number}")


def _array(file: Path, text: str, problems: Problems) -> Iterator[Row]:
    try:
        values = json_of(text, pairs=once)
    except TwiceError as error:
        problems.add(f"{file}: {error}")
        return
    except json.JSONDecodeError as error:
        problems.add(f"{file}:{error.lineno}: not JSON: {error.msg} (column {error.colno})")
        return
    except ValueError as error:
        problems.add(f"{file}: not JSON: {error}")
        return
    for number, value in enumerate(values, start=1):
        if isinstance(value, dict):
            yield Row(str(file), number, value, file.stem)
        else:
            problems.add(f"a {type(value).__name__}, not an object with fields", at=f"{file}:{number}")


def _parquet(file: Path) -> Iterator[Row]:
    import pyarrow.parquet

    size = file.stat().st_size
    bound, rows, taken = max(UNPACKED, _RATIO * size), 0, 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            more, taken = twice(opened.schema_arrow.names), opened.metadata.num_rows * _ROW
            for batch in [] if more or taken > bound else opened.iter_batches(_BATCH):
                taken += batch.nbytes
                if taken > bound:
                    break
                for value in batch.to_pylist():
                    rows += 1
                    yield Row(str(file), rows, value, file.stem, filled=True)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise ValueError(f"{file}: not a whole parquet file: {error}") from error
    if more:
        raise ValueError(f"{file}: it has the columns {more} more than once; leave one of each")
    if taken > bound:
        text = f"its rows take more than {bound / 1e9:.3g} GB of memory, and the file has {size:,} bytes"
        raise ValueError(f"{file}: {text}: it was packed to fill a memory, or repeats itself; give other rows")


def _directory(directory: Path, split: str, problems: Problems) -> Iterator[Row]:
    import datasets

    try:
        if any((directory / name).is_file() for name in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(str(directory))
        else:
            files = _data_files(directory)
            if files is not None:  # read as single files are: the library would turn texts into numbers and dates
                rows = (_file(file, problems) for file in _split(files, split, str(directory)))
                return (attrs.evolve(row, source=directory.name) for each in rows for row in each)
            loaded = datasets.load_dataset(str(directory))
    except _SplitError:
        raise
    except Exception as error:
        raise ValueError(f"{directory}: the datasets library cannot read this directory: {error}") from error
    return _rows(_undecoded(_split(loaded, split, str(directory))), f"{directory}[{split}]", directory.name)


def _data_files(directory: Path) -> dict[str, list[Path]] | None:
    """The files of each split as the datasets library finds them; None unless all are of `FORMATS`."""
    import datasets

    found = datasets.load_dataset_builder(str(directory)).config.data_files
    if not isinstance(found, dict):
        return None
    files = {str(split): [Path(file) for file in each] for split, each in found.items()}
    every = [file for each in files.values() for file in each]
    known = all(file.suffix.lower() in FORMATS and file.is_file() for file in every)
    return files if every and known else None


def _named(name: str, split: str, stream: int | None) -> Iterator[Row]:
    import datasets

    repository, _, configuration = name.partition(":")
    try:
        if stream is not None:
            streamed = datasets.load_dataset(repository, configuration or None, split=split, streaming=True)
            return iter(list(_rows(_undecoded(streamed.take(stream)), f"{repository}[{split}]", repository)))
        loaded = datasets.load_dataset(repository, configuration or None)
    except Exception as error:  # errors of the library, the hub, http and the file system
        raise ValueError(
            f"{name}: neither a file nor a data set that could be loaded ({type(error).__name__}): {error}"
        ) from error
    return _rows(_undecoded(_split(loaded, split, name)), f"{repository}[{split}]", repository)


class _SplitError(ValueError):
    """Raised for an unknown split."""


def _split(loaded: Any, split: str, name: str) -> Any:
    if not isinstance(loaded, dict):  # a single data set has no splits
        return loaded
    if split not in loaded:
        raise _SplitError(f"{name}: unknown split {split!r}; there are {sorted(loaded)}")
    return loaded[split]


def _undecoded(table: Any) -> Any:
    """A data set with videos left as undecoded files, since the datasets library would decode all frames, and needs
    torchcodec for it."""
    import datasets

    for name, kind in (table.features or {}).items():  # a stream may not know its features before it is read
        if isinstance(kind, datasets.Video):
            table = table.cast_column(name, datasets.Video(decode=False))
    return table


def _rows(dataset: Any, file: str, source: str) -> Iterator[Row]:
    for number, value in enumerate(dataset, start=1):
        yield Row(file, number, dict(value), source, filled=True)
