"""The museum's table: `python -m tests.museum` prints it, `python -m tests.museum docs/museum.md` writes the page's."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from .beside_the_loss import ROOM as BESIDE
from .estimates import ROOM as ESTIMATES
from .exhibit import Exhibit
from .normalisation import ROOM as NORMALISATION
from .terms import ROOM as TERMS

ROOMS: dict[str, tuple[Exhibit, ...]] = {
    "Normalisation": NORMALISATION,
    "The loss of a token": TERMS,
    "Advantages": ESTIMATES,
    "Log-probs, and resuming": BESIDE,
}
HEAD = ("| published | what went wrong | the law | what it prints on a mutation of ours |", "|---|---|---|---|")


def row(exhibit: Exhibit, said: str) -> str:
    """A line of the table."""
    shown = " ".join(said.split()).replace("|", "\\|")
    return f"| {exhibit.link} | {exhibit.story} | {exhibit.law} | {shown} |"


def tables() -> Iterable[str]:
    """The lines of all rooms."""
    for name, room in ROOMS.items():
        rows = [row(exhibit, exhibit.show() or "NOT CAUGHT") for exhibit in room]
        yield from (f"## {name}", "", *HEAD, *rows, "")


def written(page: str, lines: Iterable[str]) -> str:
    """The page with these tables in place of its own."""
    return re.sub(r"^## .*\Z", lambda match: "\n".join(lines), page, flags=re.DOTALL | re.MULTILINE)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        page = Path(sys.argv[1])
        page.write_text(written(page.read_text("utf-8"), tables()), "utf-8")
    else:
        print("\n".join(tables()))
