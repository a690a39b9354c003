"""How a problem with settings is said."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import attrs

from fppo.settings.fields import name_of

Problems = Iterator[str]
_ADDRESS = re.compile(r"(ray://)?[^\s:/]+:\d+")


def problem(path: str, value: Any, text: str) -> str:
    """What is wrong with one setting, and what to do."""
    return f"{path} = {value!r}: {text}"


def unread(path: str, value: Any, default: Any, reader: str) -> Problems:
    """A setting that was given and that nothing would read."""
    if value != default:
        yield problem(path, value, f"nothing reads it here: it is for {reader}; leave it out")


def cluster_problems(path: str, value: str, words: tuple[str, ...]) -> Problems:
    """A setting that names a cluster by none of the words and by no address."""
    if value not in words and not _ADDRESS.fullmatch(value):
        yield problem(path, value, f"it is {', '.join(words)}, or the HOST:PORT of a Ray cluster that runs")


def unread_section(section: Any, path: str, reader: str) -> Problems:
    """The settings of the section at `path` that differ from its defaults, where nothing reads it."""
    default = type(section)()
    for field in attrs.fields(type(section)):
        value = getattr(section, field.name)
        yield from unread(f"{path}.{name_of(field)}", value, getattr(default, field.name), reader)
