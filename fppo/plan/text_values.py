"""Tables and numbers of a plan, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from fppo.plan.values import GIB


def table(heads: Sequence[str], rows: Sequence[tuple[str, list[str]]], last: tuple[str, list[str]] | None) -> list[str]:
    """Cells in columns, to the right; a last row under a line."""
    every = [*rows, *([last] if last else [])]
    label = max(len(name) for name, _ in every)
    widths = [max(len(head), *(len(cells[i]) for _, cells in every)) for i, head in enumerate(heads)]

    def line(name: str, cells: Sequence[str]) -> str:
        return f"  {name:<{label}}{''.join(f'  {c:>{w}}' for c, w in zip(cells, widths, strict=True))}".rstrip()

    lines = [line("", heads), *(line(name, cells) for name, cells in rows)]
    if last is not None:
        lines += ["  " + "-" * (label + sum(widths) + 2 * len(widths)), line(*last)]
    return lines


def gib(size: float) -> str:
    """Bytes as GiB."""
    value = size / GIB
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 0.01:
        return f"{value:.2f}" if value < 10 else f"{value:.1f}"
    return "0" if size < 1 else f"{value:.1g}" if value >= 0.001 else "<0.001"


def seconds(value: float) -> str:
    """Seconds, in three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else f"{value:.1g}"
