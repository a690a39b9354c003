"""What is wrong with the rows of a data set, gathered so that one error names all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Strings = Sequence[str]
SHOWN = 10


class Problems:
    """The first problems by text, each with the first place that has it, and how many there are."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, int]] = {}  # by text: the first place, and how many have it
        self.count = 0

    def add(self, text: str, *, at: str = "") -> None:
        """Notes a problem, `at` a row's or a file's place if it has one; what several have is one line."""
        self.count += 1
        first, number = self._places.get(text, (at, 0))
        if number or len(self._places) < SHOWN:
            self._places[text] = (first, number + 1)

    def check(self, what: str) -> None:
        """Raises DataError if there are any."""
        if self.count:
            raise DataError(self, what)

    def text(self, what: str) -> str:
        """All of them, a line for each that is shown."""
        left = self.count - sum(number for _, number in self._places.values())
        rest = f"\n  and {left} more" if left else ""
        noun = "problem" if self.count == 1 else "problems"
        return "\n  ".join([f"{self.count} {noun} in the {what}:", *self._lines()]) + rest

    def and_those_of(self, other: Problems) -> Problems:
        """These and others as one."""
        both = Problems()
        both.count = self.count + other.count
        for text, (first, number) in [*self._places.items(), *other._places.items()]:
            place, before = both._places.get(text, (first, 0))
            if before or len(both._places) < SHOWN:
                both._places[text] = (place, before + number)
        return both

    def _lines(self) -> Iterator[str]:
        for text, (first, number) in self._places.items():
            also = f" (and {number - 1} more have it)" if number > 1 else ""
            yield f"{first}: {text}{also}" if first else f"{text}{also}"


class DataError(ValueError):
    """What is wrong with the rows of a data set."""

    def __init__(self, problems: Problems, what: str) -> None:
        super().__init__(problems.text(what))
        self.problems, self.what = problems, what


def together(errors: Sequence[Exception]) -> list[Exception]:
    """The errors, with one in the place of several of the same kind of rows, so that what all have is said once."""
    left: list[Exception] = []
    for error in errors:
        for place, other in enumerate(left):
            if isinstance(error, DataError) and isinstance(other, DataError) and error.what == other.what:
                if str(other) != str(error):  # else they are of the same rows
                    left[place] = DataError(other.problems.and_those_of(error.problems), other.what)
                break
        else:
            left.append(error)
    return left


def fail(texts: Sequence[str], what: str) -> None:
    """Raises ValueError that names the first of `texts` and counts all; nothing if there are none."""
    problems = Problems()
    for text in texts:
        problems.add(text)
    problems.check(what)
