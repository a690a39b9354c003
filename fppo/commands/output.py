"""Results of commands: words for a terminal, and files."""

from __future__ import annotations

from pathlib import Path


def write(path: str, text: str) -> None:
    """Write a text file that ends with a line break, making its directory if needed."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def show(words: str, numbers: str, json: str | None) -> None:
    """Print `words`, and write `numbers` (JSON) to the file `json` if given; if it is "-", print `numbers` instead."""
    print(numbers if json == "-" else words)
    if json not in (None, "-"):
        write(json, numbers)
