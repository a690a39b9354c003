"""How a problem with settings is said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Problems = Iterator[str]


def problem(path: str, value: Any, text: str) -> str:
    """What is wrong with one setting, and what to do."""
    return f"{path} = {value!r}: {text}"


def unread(path: str, value: Any, default: Any, reader: str) -> Problems:
    """A setting that was given and that nothing would read."""
    if value != default:
        yield problem(path, value, f"nothing reads it here: it is for {reader}; leave it out")
