"""Files of one JSON object per line that survive a kill: flushed line by line, cut back to a step on resuming."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """The value as strict JSON can hold it: nan and infinities become None, what is no JSON its text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value)


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of the file, none if there is no file. A torn last line, as a kill leaves it, is left out.

    Raises ValueError naming file and line if another line is not an object.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline after it: it was never finished
                break
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: holds a {type(record).__name__}, not an object")
        records.append(record)
    return records


class JsonLines:
    """Appends objects to a file; each is on disk, as far as a killed process goes, when `write` returns.

    Lines of step `first_step` or later, and a torn last line, are dropped at the start: a resumed run writes them
    again. The file is replaced as a whole for that, so a kill at that moment loses nothing.
    """

    def __init__(self, path: str | os.PathLike[str], *, first_step: int = 0) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = [record for record in read(path) if record.get("step", 0) < first_step]
            text = "".join(_line(record) for record in kept).encode(errors="backslashreplace")
            if text != path.read_bytes():
                temporary = path.with_name(f".{path.name}.new")
                temporary.write_bytes(text)
                os.replace(temporary, path)
        # a lone surrogate has no UTF-8; its backslash form is what JSON writes for it
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")

    def write(self, *records: Mapping[str, Any]) -> None:
        """Appends the objects."""
        self._file.write("".join(_line(record) for record in records))
        self._file.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one flat object: the step and its metrics."""
        self.write({"step": step, **metrics})

    def close(self) -> None:
        """Closes the file; it can be closed twice."""
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n"
