"""Rows from files and data sets, each with the place that it came from."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fppo._errors import json_of
from fppo.data.problems import Problems

PathLike = str | os.PathLike[str]
FORMATS = (".jsonl", ".json", ".csv", ".parquet")


@attrs.frozen
class Row:
    """One row and where it stands: a line of a file that has lines, else the number of the row, both from 1."""

    file: str
    line: int
    fields: dict[str, Any]
    source: str  # the file's or data set's name

    @property
    def place(self) -> str:
        """As an editor takes it: file:line."""
        return f"{self.file}:{self.line}"

    @property
    def name(self) -> str:
        """`place` without the file's directory."""
        return f"{Path(self.file).name}:{self.line}"


def read_rows(
    paths: PathLike | Sequence[PathLike], *, split: str = "train", problems: Problems | None = None
) -> list[Row]:
    """The rows of all `paths`, in order.

    A path is a jsonl, json (an array of objects, or lines), csv (its first line names the fields, which are texts) or
    parquet file; a directory that the datasets library saved or can read; or the name of a data set, as
    "openai/gsm8k:main" where it has several configurations. Of the last two, `split` is read. Raises ValueError for
    what cannot be read, naming every malformed line, and for no rows
    at all; with `problems`, malformed lines are noted there instead.
    """
    many = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    noted = Problems() if problems is None else problems
    rows = [row for path in many for row in _read(path, split, noted)]
    if problems is None:
        noted.check("data")
    if not rows and not noted.count:
        raise ValueError(f"the data set is empty: no rows in {', '.join(map(str, many)) or 'no files'}")
    return rows


def rows_of(values: Iterable[Any], name: str, *, problems: Problems | None = None) -> list[Row]:
    """The rows that a function `name` gave, numbered from 1. Raises ValueError for none, and for what is no row."""
    noted = Problems() if problems is None else problems
    rows: list[Row] = []
    for number, value in enumerate(values, start=1):
        if isinstance(value, Mapping):
            rows.append(Row(name, number, dict(value), name))
        else:
            noted.add(f"{name}:{number}: a {type(value).__name__}, not a dict with fields")
    if problems is None:
        noted.check("data")
    if not rows and not noted.count:
        raise ValueError(f"the data set is empty: {name} gave no rows")
    return rows


def _read(path: PathLike, split: str, problems: Problems) -> Iterator[Row]:
    file, text = Path(path), os.fspath(path)
    suffix = file.suffix.lower()
    if file.is_file():
        if suffix == ".parquet":
            return _parquet(file)
        if suffix == ".csv":
            return _csv(file, problems)
        if suffix in (".jsonl", ".json"):
            return _json(file, problems, lines=suffix == ".jsonl")
        raise ValueError(f"{text}: unknown kind of file {suffix!r}; there are {', '.join(FORMATS)}")
    if file.is_dir():
        return _directory(file, split)
    if suffix in FORMATS or text.startswith((".", "/", "~")):
        raise ValueError(f"{text}: no such file")
    return _named(text, split)


def _text(file: Path, problems: Problems) -> str:
    """What is in the file, as its lines end; "" and a problem if that is no UTF-8."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problems.add(f"{file}:{_line_of(file, error.start)}: not UTF-8: {error.reason}")
        return ""


def _csv(file: Path, problems: Problems) -> Iterator[Row]:
    """Rows named by the line that they begin in."""
    reader = csv.reader(io.StringIO(_text(file, problems), newline=""), strict=True)
    names, line = None, 1
    try:
        for cells in reader:
            names = cells if names is None else names
            if cells and len(cells) != len(names):
                problems.add(f"{file}:{line}: {len(cells)} fields, and the first line names {len(names)}")
            elif cells and cells is not names:
                yield Row(str(file), line, dict(zip(names, cells, strict=True)), file.stem)
            line = reader.line_num + 1
    except csv.Error as error:
        problems.add(f"{file}:{line}: not CSV: {error}")


def _json(file: Path, problems: Problems, *, lines: bool) -> Iterator[Row]:
    text = _text(file, problems)
    if not lines and text.lstrip().startswith("["):
        yield from _array(file, text, problems)
        return
    for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), start=1):
        if line.strip():
            yield from _object(file, number, line, problems)


def _line_of(file: Path, position: int) -> int:
    return file.read_bytes()[:position].count(b"\n") + 1


def _object(file: Path, number: int, line: str, problems: Problems) -> Iterator[Row]:
    try:
        value = json_of(line)
    except ValueError as error:
        problems.add(f"{file}:{number}: not JSON: {error}")
        return
    if isinstance(value, dict):
        yield Row(str(file), number, value, file.stem)
    else:
        problems.add(f"{file}:{number}: a {type(value).__name__}, not an object with fields")


def _array(file: Path, text: str, problems: Problems) -> Iterator[Row]:
    try:
        values = json_of(text)
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
            problems.add(f"{file}:{number}: a {type(value).__name__}, not an object with fields")


def _parquet(file: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise ValueError(f"{file}: not a whole parquet file: {error}") from error
    for number, value in enumerate(table.to_pylist(), start=1):
        yield Row(str(file), number, value, file.stem)


def _directory(directory: Path, split: str) -> Iterator[Row]:
    import datasets

    saved = any((directory / name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        if saved:
            loaded = datasets.load_from_disk(str(directory))
        else:
            loaded = datasets.load_dataset(str(directory))
    except Exception as error:
        raise ValueError(f"{directory}: the datasets library cannot read this directory: {error}") from error
    return _rows(_split(loaded, split, str(directory)), f"{directory}[{split}]", directory.name)


def _named(name: str, split: str) -> Iterator[Row]:
    import datasets

    repository, _, configuration = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, configuration or None)
    except Exception as error:  # the library raises its own, the hub's, http's and the file system's
        raise ValueError(
            f"{name}: neither a file nor a data set that could be loaded ({type(error).__name__}): {error}"
        ) from error
    return _rows(_split(loaded, split, name), f"{repository}[{split}]", repository)


def _split(loaded: Any, split: str, name: str) -> Any:
    if not isinstance(loaded, dict):  # a single data set has no splits
        return _undecoded(loaded)
    if split not in loaded:
        raise ValueError(f"{name}: there is no split {split!r}; there are {sorted(loaded)}")
    return _undecoded(loaded[split])


def _undecoded(table: Any) -> Any:
    """The table whose videos are their files, which the library would decode by torchcodec alone, and all frames."""
    import datasets

    for name, kind in table.features.items():
        if isinstance(kind, datasets.Video):
            table = table.cast_column(name, datasets.Video(decode=False))
    return table


def _rows(dataset: Any, file: str, source: str) -> Iterator[Row]:
    for number, value in enumerate(dataset, start=1):
        yield Row(file, number, dict(value), source)
