"""Results of commands: words for a terminal, and files."""

from __future__ import annotations

from pathlib import Path


def write(path: str, text: str) -> None:
    """Write a text file that ends with a line break, with its directory."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def show(words: str, numbers: str, json: str | None) -> None:
    """Print the words, and write the numbers to the file `json`, if any; "-" prints them in place of the words."""
    print(numbers if json == "-" else words)
    if json not in (None, "-"):
        write(json, numbers)
