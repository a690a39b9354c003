"""Files of one JSON object per line that survive a kill: flushed line by line, truncated to a step on resuming."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from fppo._errors import json_of
from fppo.runtime.exports import write_whole


def plain(value: Any) -> Any:
    """Convert a value to strict JSON: nan and infinities to None, other types to their text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value)


def read(path: str | os.PathLike[str], *, on_damage: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """The objects of a file, none if it is missing. An incomplete last line, as a kill leaves it, is left out.

    Raises ValueError naming file and line for another line that is not an object; with `on_damage` such lines are left
    out, and the message is passed to it.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(_object(line))
        except ValueError as error:
            if number == len(lines):  # no newline after it: incomplete
                break
            if on_damage is None:
                raise ValueError(f"{path}, line {number}: {error}") from error
            on_damage(f"{path}, line {number}: {error}")
    return records


def _object(line: bytes) -> dict[str, Any]:
    try:
        record = json_of(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"holds a {type(record).__name__}, not an object")
    if isinstance(step := record.get("step", 0), bool) or not isinstance(step, int):
        raise ValueError("its step is not an integer")
    return record


def gone(path: str | os.PathLike[str], first: int, last: int, *, every: int = 1) -> list[str]:
    """Messages on a file's damaged lines, and on the steps `first` to `last` without a line (`missing`)."""
    damaged: list[str] = []
    present = {record.get("step") for record in read(path, on_damage=damaged.append)}
    return damaged + missing(path, present, first, last, every=every)


def missing(
    path: str | os.PathLike[str], present: Collection[int | None], first: int, last: int, *, every: int = 1
) -> list[str]:
    """A list with a message on the steps `first` to `last` that are not `present` in a file; empty without such steps.

    With `every` only its multiples are expected; 0: no steps are.
    """
    due = [step for step in range(first, last + 1) if every and step % every == 0]
    lost = [step for step in due if step not in present]
    return [f"{path} holds nothing of step {spans(lost, every=every)}"] if lost else []


def spans(steps: Collection[int], *, every: int = 1) -> str:
    """Steps as text, such as "1 to 3, 7", where steps that are `every` apart are one span; "none" without any."""
    known = set(steps)
    starts = sorted(step for step in known if step - every not in known)
    ends = sorted(step for step in known if step + every not in known)
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)) or "none"


class JsonLines:
    """Append objects to a file; each survives a kill of the process once `write` returns.

    Lines of step `first_step` or later, and an incomplete last line, are dropped at the start: a resumed run writes
    them again. The file is replaced atomically for that, so a kill at that moment loses nothing; a file with damaged
    lines is copied to a name ending in `.damaged`. Of the others the `newest` lines are kept (None: all).
    """

    def __init__(self, path: str | os.PathLike[str], *, first_step: int = 0, newest: int | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            damaged: list[str] = []
            kept = [record for record in read(path, on_damage=damaged.append) if record.get("step", 0) < first_step]
            kept = kept if newest is None else kept[-newest:]
            if damaged:
                shutil.copy(path, path.with_name(f"{path.name}.damaged"))
            text = "".join(_line(record) for record in kept).encode(errors="backslashreplace")
            if text != path.read_bytes():
                write_whole(path, text)
        # a lone surrogate has no UTF-8; its backslash form is valid JSON
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")

    def write(self, *records: Mapping[str, Any]) -> None:
        """Append objects."""
        self._file.write("".join(_line(record) for record in records))
        self._file.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one flat object: the step and its metrics."""
        self.write({"step": step, **metrics})

    def close(self) -> None:
        """Close the file; it can be closed twice."""
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n"
