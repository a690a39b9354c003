"""Results of commands: words for a terminal, files, and with `--json` one document on standard output."""

from __future__ import annotations

import contextlib
import json as as_json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from fppo.runs import jsonl

PRINTED = "-"  # the file of a document that is printed


class Show(Protocol):
    """Show the result of a command: `words` for people, if they are not printed yet, or the `record` behind them as a
    document of JSON."""

    def __call__(self, words: str, record: Any) -> None: ...


def write(path: str, text: str) -> None:
    """Write a text file that ends with a line break, making its directory if needed."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def document(record: Any) -> str:
    """A record as strict JSON: numbers that are not finite are null, and values of other types are their text."""
    return as_json.dumps(jsonl.plain(record), indent=1, allow_nan=False)


@contextlib.contextmanager
def shown(json: str | None) -> Iterator[Show]:
    """A context with a function that shows the result: it prints words, and writes the document to the file `json` if
    given. If that is "-", the document is printed at the end, and all that is printed meanwhile, by other processes
    too, goes to standard error."""
    if json != PRINTED:
        yield lambda words, record: _show(words, record, json)
        return
    documents: list[str] = []
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield lambda words, record: documents.append(document(record))
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    for text in documents:
        print(text, flush=True)


def _show(words: str, record: Any, json: str | None) -> None:
    if words:
        print(words)
    if json is not None:
        write(json, document(record))
