"""Verdicts of laws on the functions of a trainer, as records, text and JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from fppo import laws
from fppo.laws import Verdict

SHORT = 300  # characters of a reason in the table


@attrs.frozen
class Audited:
    """A function to check by the laws of a kind of `laws.verdicts`, with its name in the table.

    `reference` is fppo's function, if both should agree; `group_rows` and `tokens` are the smallest numbers of rows in
    a group and of tokens in a batch that the function accepts. `leave_out` names laws that are not meant to hold, for
    example for a term that is no policy gradient. Laws compare in `dtype`: float32 for a function that rounds to it.
    """

    name: str
    kind: str
    fn: Callable[..., Any]
    reference: Callable[..., Any] | None = None
    group_rows: int = 1
    tokens: int = 0
    leave_out: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64

    def verdicts(self) -> tuple[Verdict, ...]:
        """Check the function by the laws of its kind, except those that `leave_out` names."""
        found = laws.verdicts(
            self.fn,
            kind=self.kind,
            reference=self.reference,
            group_rows=self.group_rows,
            tokens=self.tokens,
            dtype=self.dtype,
            name="audited",
        )
        return tuple(verdict for verdict in found if verdict.law not in self.leave_out)


@attrs.frozen
class AuditedFunction:
    """The verdicts on one function."""

    name: str
    kind: str
    verdicts: tuple[Verdict, ...]

    def those(self, outcome: str) -> list[Verdict]:
        """The verdicts of an outcome: "holds", "note" or "fault"."""
        return [verdict for verdict in self.verdicts if verdict.outcome == outcome]


@attrs.frozen
class AuditReport:
    """The verdicts on a trainer: its name, the versions of its packages, and its functions in order."""

    name: str
    versions: tuple[str, ...]
    functions: tuple[AuditedFunction, ...]

    @property
    def faults(self) -> int:
        """The number of broken laws, without notes, which are differences of convention."""
        return sum(len(function.those("fault")) for function in self.functions)


def audit(
    name: str, functions: Iterable[Audited], versions: Sequence[str] = (), progress: Callable[[str], None] | None = None
) -> AuditReport:
    """Check the functions of a trainer by their laws. `progress` is called with each function's name before its
    turn."""
    found: list[AuditedFunction] = []
    for audited in functions:
        if progress is not None:
            progress(audited.name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # some functions draw from torch's global generator
            found.append(AuditedFunction(audited.name, audited.kind, audited.verdicts()))
    return AuditReport(name, tuple(versions), tuple(found))


def table(report: AuditReport, *, width: int = 120, batches: bool = False) -> str:
    """The report as text: a line for each function, then the broken laws; with `batches`, the batches that break
    them."""
    broken = [function for function in report.functions if len(function.those("holds")) < len(function.verdicts)]
    lines = [f"{report.name} ({', '.join(report.versions)})" if report.versions else report.name, ""]
    lines += _overview(report.functions)
    for function in broken:
        lines += ["", function.name]
        for verdict in (*function.those("fault"), *function.those("note")):
            lines += _said(verdict, width, batches=batches)
    count = Counter(verdict.outcome for function in report.functions for verdict in function.verdicts)
    laws_held = f"{count['holds']} of {count.total()} laws hold"
    return "\n".join([*lines, "", f"{laws_held}; {count['fault']} faults, {count['note']} notes"])


def _overview(functions: Sequence[AuditedFunction]) -> Iterator[str]:
    rows = [["function", "kind", "laws", "hold", "notes", "faults"]]
    for function in functions:
        counts = [len(function.verdicts), *(len(function.those(x)) for x in ("holds", "note", "fault"))]
        rows.append([function.name, function.kind, *map(str, counts)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        yield "  ".join([*left, *(cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))]).rstrip()


def _said(verdict: Verdict, width: int, *, batches: bool) -> list[str]:
    reason = " ".join((verdict.reason or "").split())
    text = f'{verdict.outcome} "{verdict.law}": {textwrap.shorten(reason, SHORT, placeholder=" ...")}'
    lines = textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return [*lines, *(f"      {line}" for line in verdict.shown)] if batches else lines


def record(report: AuditReport) -> dict[str, Any]:
    """The report as values of JSON: every verdict, with the smallest batch that breaks the law as lists of numbers."""
    functions = [
        {"name": function.name, "kind": function.kind, "laws": [_numbers(x) for x in function.verdicts]}
        for function in report.functions
    ]
    return {"name": report.name, "versions": list(report.versions), "functions": functions}


def _numbers(verdict: Verdict) -> dict[str, Any]:
    said = {"law": verdict.law, "statement": verdict.statement, "outcome": verdict.outcome}
    if verdict.outcome == "holds":
        return said
    batch = {name: _plain(x) for name, x in verdict.example.items()}
    return {**said, "reason": verdict.reason, "size": verdict.size, "batch": batch}


def _plain(x: torch.Tensor) -> Any:
    """A tensor as nested lists of numbers; numbers that JSON lacks are "nan", "inf" or "-inf"."""

    def number(value: Any) -> Any:
        if isinstance(value, list):
            return [number(item) for item in value]
        finite = not isinstance(value, float) or value - value == 0.0
        return value if finite else str(value)

    return number(x.tolist())
