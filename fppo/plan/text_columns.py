"""What a step's columns cost a pool, as text, and as what JSON holds."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from fppo.plan.columns import Bytes, ColumnCall
from fppo.plan.text_values import table

MIB = 1 << 20
COUNTED = (
    "Columns are as wide as prompts and responses may become, and counted once, however many ranks read them; "
    "`fppo trace` says of a run what went there and came back. Images, objects of rows, metrics and weights are not in "
    "it, nor held-out prompts, nor those that are drawn again."
)


def columns_report(calls: Sequence[ColumnCall], *, width: int = 100) -> str:
    """The columns that the calls of a step to one pool take and give, for a terminal; "" for no calls."""
    if not calls:
        return ""
    lines = [*_table("columns of a step's batch to this pool, MiB", calls, [call.there for call in calls]), ""]
    giving = [call for call in calls if call.back]
    if giving:
        lines += [*_table("and from it", giving, [call.back for call in giving]), ""]
    return "\n".join([*lines, *textwrap.wrap(COUNTED, width)])


def _table(title: str, calls: Sequence[ColumnCall], sizes: Sequence[Bytes]) -> list[str]:
    names = dict.fromkeys(name for each in sizes for name in each)
    rows = [(name, [_mib(each[name]) if name in each else "" for each in sizes]) for name in names]
    return [title, *table([call.call for call in calls], rows, ("together", [_mib(sum(x.values())) for x in sizes]))]


def _mib(size: int) -> str:
    value = size / MIB
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}" if value >= 0.001 else f"{value:.1g}"


def columns_summary(calls: Sequence[ColumnCall]) -> list[dict[str, Any]]:
    """Columns as JSON, in bytes."""
    return [{"role": call.role, "call": call.call, "there": call.there, "back": call.back} for call in calls]
