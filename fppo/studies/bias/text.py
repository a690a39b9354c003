"""Tables of bias as text for a terminal, as Markdown, and as JSON values."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from fppo.studies.bias.study import BiasTable, Number
from fppo.studies.plan.text import Table, rendered

WORDS = (
    "turned: the part of the mean gradient across the objective's, which no learning rate makes up for; size: its "
    "length along it; noise: the deviation of a batch's gradient over the mean's length. Medians over worlds."
)


def cell(head: str, value: Number) -> str:
    """A number as text: in per cent in the column "turned", plain in others; 0 if it is at most 1e-9."""
    if isinstance(value, str):
        return value
    if math.isinf(value):
        return "-"
    if abs(value) < 1e-9:
        return "0"
    if head.startswith("turned"):
        return f"{100 * value:.1f} %" if value < 10 else f"{100 * value:,.0f} %"
    return f"{value:z.3f}" if abs(value) < 10 else f"{value:,.1f}"


def shown(table: BiasTable) -> Table:
    """Convert a table for the terminal."""
    rows = [(label, _cells(table, numbers)) for label, numbers in table.rows]
    return Table(table.title, table.heads, rows)


def terminal(tables: Iterable[BiasTable], width: int) -> str:
    """All tables and their descriptions as text, in lines of `width` characters where they fit."""
    sections = [[table.about, shown(table)] for table in tables]
    return rendered([*sections, [WORDS]], width)


def markdown(tables: Iterable[BiasTable]) -> str:
    """All tables as Markdown, each below its title."""
    lines: list[str] = []
    for table in tables:
        lines += [f"### {table.title}", "", *textwrap.wrap(table.about, 120), "", _line(["", *table.heads])]
        lines += [_line(["---"] * (1 + len(table.heads)))]
        lines += [_line([label, *_cells(table, numbers)]) for label, numbers in table.rows]
        lines += [""]
    return "\n".join(lines)


def plain(table: BiasTable) -> dict[str, Any]:
    """A table as a JSON value: each row has its label, and its numbers by column; null for numbers that are not
    finite."""
    rows = [
        {"label": label, **{head: _finite(x) for head, x in zip(table.heads, numbers, strict=True)}}
        for label, numbers in table.rows
    ]
    return {"name": table.name, "title": table.title, "about": table.about, "rows": rows}


def _finite(x: Number) -> Number | None:
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _cells(table: BiasTable, numbers: Sequence[Number]) -> list[str]:
    return [cell(head, x) for head, x in zip(table.heads, numbers, strict=True)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
