"""Markdown of untrusted text: escaped, in tables, in fences. No text becomes a link, an image, a tag or a heading."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fppo._errors import MOST, printable

_ACTIVE = re.compile(r"[!-+\-/:-@\[-`{-~]")  # ASCII's punctuation but commas and full stops
_STOPS = re.compile(r"\.(?=[^\W\d])|(?<=[^\W\d])\.(?=\w)")  # of web addresses
_ITEM = re.compile(r"\A(\s*\d+)\.(?!\S)")  # the number of a list's item


def escaped(text: str, max_characters: int = MOST) -> str:
    """The text as Markdown on one line that shows it as it is, with its line ends as breaks; without its middle if it
    has more than `max_characters` characters."""
    shown = printable(text, max_characters, lines=True).replace("\t", " ")
    shown = _ACTIVE.sub(lambda match: f"&#{ord(match[0])};", shown)
    return _ITEM.sub(r"\1&#46;", _STOPS.sub("&#46;", shown)).replace("\n", "<br>")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], max_characters: int = MOST) -> str:
    """A table of untrusted cells; numbers are written with six digits, None as an empty cell."""
    lines = [
        [escaped(name) for name in head],
        ["---"] * len(head),
        *([_cell(x, max_characters) for x in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object, max_characters: int) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else escaped(str(value), max_characters)


def fenced(text: str, language: str = "") -> str:
    """The text as a block of code, in a fence longer than any that it holds."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{printable(text, max(len(text), 1), lines=True).rstrip()}\n{fence}"
