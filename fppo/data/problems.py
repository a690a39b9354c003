"""Problems with the rows of a data set, gathered so that one error names all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fppo._errors import printable

Strings = Sequence[str]
SHOWN = 10
LONGEST = 1000  # characters of a problem, which may quote the data


class Problems:
    """A collection of problems with data, for one error message. It keeps the first `SHOWN` different texts, cut to
    `LONGEST` characters, each with the first row or file that has it and the number of those. `count` is the number of
    all problems, also of those not kept."""

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

    def check(self, subject: str) -> None:
        """Raise DataError if any problem was noted; `subject` names the rows in its message."""
        if self.count:
            raise DataError(self, subject)

    def text(self, subject: str) -> str:
        """The text of an error about the rows `subject`: the count, a line for each problem shown, the number of
        others."""
        noun = "problem" if self.count == 1 else "problems"
        return "\n  ".join([f"{self.count} {noun} in the {subject}:", *self.lines(), *filter(None, [self.unshown()])])

    def merged_with(self, other: Problems) -> Problems:
        """The union of these problems and `other`."""
        both = Problems()
        both.count = self.count + other.count
        for text, (first, number) in [*self._places.items(), *other._places.items()]:
            place, before = both._places.get(text, (first, 0))
            if before or len(both._places) < SHOWN:
                both._places[text] = (place, before + number)
        return both

    def unshown(self) -> str:
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

    def __init__(self, problems: Problems, subject: str) -> None:
        super().__init__(problems.text(subject))
        self.problems, self.subject = problems, subject


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
    lines, rest = list(error.problems.lines()), error.problems.unshown()
    return [*lines[:-1], f"{lines[-1]}; {rest} in the {error.subject}"] if rest else lines


def together(errors: Sequence[Exception]) -> list[Exception]:
    """The errors, with the data errors of equal kind merged into one, so that a common problem is named once."""
    left: list[Exception] = []
    for error in errors:
        for place, other in enumerate(left):
            if isinstance(error, DataError) and isinstance(other, DataError) and error.subject == other.subject:
                if str(other) != str(error):  # equal texts are of the same rows
                    left[place] = DataError(other.problems.merged_with(error.problems), other.subject)
                break
        else:
            left.append(error)
    return left


def fail(texts: Sequence[str], subject: str) -> None:
    """Raise a DataError about the rows `subject` that names the first `SHOWN` of the problems `texts` and counts all;
    do nothing without problems."""
    problems = Problems()
    for text in texts:
        problems.add(text)
    problems.check(subject)
