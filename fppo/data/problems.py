"""Problems with the rows of a data set, gathered so that one error names all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fppo._errors import printable

Strings = Sequence[str]
SHOWN = 10
LONGEST = 1000  # characters of a problem, which may quote the data


class Problems:
    """The first `SHOWN` problems by text, of `LONGEST` characters at most, each with the first row or file that has it,
    and the count of all."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, int]] = {}  # by text: the first row or file, and the number of them
        self.count = 0

    def add(self, text: str, *, at: str = "") -> None:
        """Note a problem, `at` a row ("file:line") or file if it has one; equal texts share a line."""
        self.count += 1
        text, at = printable(text, LONGEST, lines=True), printable(at, LONGEST)
        first, number = self._places.get(text, (at, 0))
        if number or len(self._places) < SHOWN:
            self._places[text] = (first, number + 1)

    def check(self, what: str) -> None:
        """Raise DataError if any problem was noted; `what` names the rows in its message."""
        if self.count:
            raise DataError(self, what)

    def text(self, what: str) -> str:
        """The text of an error about the rows `what`: the count, a line for each problem shown, and the number of
        others."""
        noun = "problem" if self.count == 1 else "problems"
        return "\n  ".join([f"{self.count} {noun} in the {what}:", *self.lines(), *filter(None, [self.rest()])])

    def merged_with(self, other: Problems) -> Problems:
        """The union of these problems and `other`."""
        both = Problems()
        both.count = self.count + other.count
        for text, (first, number) in [*self._places.items(), *other._places.items()]:
            place, before = both._places.get(text, (first, 0))
            if before or len(both._places) < SHOWN:
                both._places[text] = (place, before + number)
        return both

    def rest(self) -> str:
        """A note on the number of problems that are not shown; empty if all are."""
        left = self.count - sum(number for _, number in self._places.values())
        return f"and {left} more" if left else ""

    def lines(self) -> Iterator[str]:
        """A line for each problem that is shown."""
        for text, (first, number) in self._places.items():
            also = f" (and {number - 1} more have it)" if number > 1 else ""
            yield f"{first}: {text}{also}" if first else f"{text}{also}"


class DataError(ValueError):
    """The error that carries the problems of a data set's rows."""

    def __init__(self, problems: Problems, what: str) -> None:
        super().__init__(problems.text(what))
        self.problems, self.what = problems, what


class FieldError(ValueError):
    """The error of fields that no row has: a line for each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


def lines_of(error: Exception) -> list[str]:
    """The problems that an error names, one line each."""
    if isinstance(error, FieldError):
        return [*error.lines]
    if not isinstance(error, DataError):
        return [str(error)]
    lines, rest = list(error.problems.lines()), error.problems.rest()
    return [*lines[:-1], f"{lines[-1]}; {rest} in the {error.what}"] if rest else lines


def together(errors: Sequence[Exception]) -> list[Exception]:
    """The errors, with the data errors of equal kind merged into one, so that a common problem is named once."""
    left: list[Exception] = []
    for error in errors:
        for place, other in enumerate(left):
            if isinstance(error, DataError) and isinstance(other, DataError) and error.what == other.what:
                if str(other) != str(error):  # equal texts are of the same rows
                    left[place] = DataError(other.problems.merged_with(error.problems), other.what)
                break
        else:
            left.append(error)
    return left


def fail(texts: Sequence[str], what: str) -> None:
    """Raise a DataError about `what` that names the first `SHOWN` of the problems `texts` and counts all; do nothing
    without problems."""
    problems = Problems()
    for text in texts:
        problems.add(text)
    problems.check(what)
