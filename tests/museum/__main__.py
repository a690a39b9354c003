"""The museum's tables: `python -m tests.museum > docs/results/museum.md` writes them."""

from __future__ import annotations

from collections.abc import Iterable

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
INTRODUCTION = "Mistakes that were published, each with the law that catches it."
HEAD = ("| published | what went wrong | the law | what it prints on a mutation of ours |", "|---|---|---|---|")


def row(exhibit: Exhibit, said: str) -> str:
    """A line of the table."""
    shown = " ".join(said.split()).replace("|", "\\|")
    return f"| {exhibit.link} | {exhibit.story} | {exhibit.law} | {shown} |"


def tables() -> Iterable[str]:
    """The lines of the page: all rooms."""
    yield from (INTRODUCTION, "")
    for name, room in ROOMS.items():
        rows = [row(exhibit, exhibit.show() or "NOT CAUGHT") for exhibit in room]
        yield from (f"## {name}", "", *HEAD, *rows, "")


if __name__ == "__main__":
    print("\n".join(tables()).strip())
