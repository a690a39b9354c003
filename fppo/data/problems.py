"""What is wrong with the rows of a data set, gathered so that one error names all of it."""

from __future__ import annotations

from collections.abc import Sequence

Strings = Sequence[str]
SHOWN = 10


class Problems:
    """The first problems by text, and how many there are."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.count = 0

    def add(self, text: str) -> None:
        """Notes one problem."""
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(text)

    def check(self, what: str) -> None:
        """Raises ValueError if there are any."""
        if self.count:
            rest = f"\n  and {self.count - len(self.shown)} more" if self.count > len(self.shown) else ""
            noun = "problem" if self.count == 1 else "problems"
            raise ValueError("\n  ".join([f"{self.count} {noun} in the {what}:", *self.shown]) + rest)


def fail(texts: Sequence[str], what: str) -> None:
    """Raises ValueError that names the first of `texts` and counts all; nothing if there are none."""
    problems = Problems()
    for text in texts:
        problems.add(text)
    problems.check(what)
