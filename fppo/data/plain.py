"""Conversion of rows' values to what JSON can hold, and checks of values and paths."""

from __future__ import annotations

import base64
import binascii
import datetime
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fppo._errors import check_depth, printable, shown


class BadField(Exception):
    """A fault of one field of one row."""


def plain(value: Any) -> Any:
    """Convert a value to what a round trip through JSON gives: nan becomes None, a date text, a tuple a list. Raises
    ValueError for values that do not fit JSON."""
    return _plain(check_depth(value))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat() if value == value else None  # pandas' missing date does not equal itself
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return _plain(value.tolist())
    raise ValueError(f"a {type(value).__name__} does not fit JSON")


def missing_in(value: Any, path: str = "") -> Iterator[str]:
    """The paths within a value ("" for itself) of nan, pandas' missing value, and of infinities, which JSON lacks."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from missing_in(inner, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from missing_in(inner, f"{path}[{number}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield path
    elif isinstance(value, (datetime.date, datetime.time)):
        if value != value:
            yield path
    elif hasattr(value, "tolist"):
        yield from missing_in(value.tolist(), path)


class TwiceError(ValueError):
    """Duplicate keys in a JSON object."""


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these key-value pairs, for `json_of(..., pairs=once)`. Raises TwiceError for duplicate keys."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise TwiceError(f"{twice([name for name, _ in pairs])} more than once in an object; leave one of each")
    return value


def twice(names: Sequence[str]) -> list[str]:
    """The names that occur more than once in a list."""
    return sorted({name for name in names if names.count(name) > 1})


def irregular(path: Path) -> str | None:
    """The reason to refuse a path: it is a pipe, socket or device, readable once or without an end, or holds NUL; None
    for files, directories and missing paths."""
    if "\0" in str(path):
        return "it holds a NUL character, which no path has"
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    kinds = {"a FIFO": stat.S_ISFIFO, "a socket": stat.S_ISSOCK, "a device": stat.S_ISCHR, "a disk": stat.S_ISBLK}
    kind = next((name for name, test in kinds.items() if test(mode)), None)
    return kind and f"it is {kind}, not a file that can be read again; write it to a file first"


_DATA_URL = re.compile(r"data:[^,]{0,200};\s*base64\s*,(.*)", re.DOTALL | re.IGNORECASE)
_SHORTEST = 48  # characters of base64; an image file has more


def encoded(text: str) -> bytes | None:
    """Decode a file from base64 text, bare or in a data: URL; None for other text, such as a path.

    A long path may look like base64: check first whether such a file exists. Raises ValueError for a data: URL that
    cannot be read.
    """
    url = text[:5].lower() == "data:"
    match = _DATA_URL.fullmatch(text) if url else None
    if url and match is None:
        raise ValueError("a data: URL that is not base64: give data:image/png;base64,... or a path")
    plainly = "".join((text if match is None else match[1]).split()).translate(str.maketrans("-_", "+/"))
    if not url and len(plainly) < _SHORTEST:
        return None
    try:
        return base64.b64decode(plainly + "=" * (-len(plainly) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        if url:
            raise ValueError(f"a data: URL whose base64 cannot be read: {error}") from error
        return None


_SHOWN_PATH, _LONGEST_PATH = 300, 4096  # characters


def path_exists(path: Path) -> bool:
    """Whether there is such a file or directory; False for a text that no path can be."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def file_of(value: Any) -> Any:
    """Convert an image or video to the path or the bytes of its file, given as a path, bytes, base64, a data: URL, or a
    table of {"bytes": ..., "path": ...}; return any other value as it is. Raises ValueError for a data: URL that cannot
    be read, and for long text that is neither a path nor base64."""
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, str) and not path_exists(Path(value)):
        if (data := encoded(value)) is not None:
            return data
        if len(value) > _LONGEST_PATH:
            raise ValueError(f"a text of {len(value):,} characters, neither a path nor base64: {shown(value, 40)}")
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return Path(value) if isinstance(value, str | os.PathLike) else value


def named_file(value: Any, file: Any) -> str:
    """A file's path, or the start of its base64, in brackets for an error message; "" for other values."""
    if isinstance(file, Path):
        return f" ({printable(str(file), _SHOWN_PATH)})"
    text = value.get("bytes") or value.get("path") if isinstance(value, Mapping) else value
    return f" (base64 {printable(text[:40])}...)" if isinstance(file, bytes) and isinstance(text, str) else ""


def half_pairs(value: Any) -> str | None:
    """The first text within a value that holds half of a surrogate pair; None without one."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value
        return None
    if isinstance(value, Mapping):
        inside = (half_pairs(x) for pair in value.items() for x in pair)
    elif isinstance(value, (list, tuple)):
        inside = (half_pairs(x) for x in value)
    else:
        return None
    return next((text for text in inside if text is not None), None)
