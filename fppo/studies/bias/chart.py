"""Pictures of tables of bias: the direction error of each row's mean gradient, and its noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fppo.report.charts import COLORS, worded
from fppo.studies.bias.study import BiasTable
from fppo.studies.bias.text import cell

GREY = "#6b7280"


def save(tables: Sequence[BiasTable], path: Path) -> None:
    """Write a PNG with a panel for each table. Raises ValueError for none."""
    if not tables:
        raise ValueError("no tables to draw")
    heights = [0.26 * len(table.rows) + 1.1 for table in tables]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(tables), 1, squeeze=False, height_ratios=heights)[:, 0]
    for table, ax in zip(tables, axes, strict=True):
        _draw(table, ax)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _draw(table: BiasTable, ax: Axes) -> None:
    """Draw bars for the columns about a gradient's direction; for a table without any, for all its numbers."""
    turned = [i for i, head in enumerate(table.heads) if head.startswith("turned")]
    columns, factor = (turned, 100.0) if turned else (range(len(table.heads)), 1.0)
    thick = 0.8 / max(len(columns), 1)
    longest = 0.0
    for number, i in enumerate(columns):
        for row, (_, numbers) in enumerate(table.rows):
            x, y = numbers[i], row + (number - (len(columns) - 1) / 2) * thick
            size = factor * x if isinstance(x, float) and math.isfinite(x) else 0.0
            longest = max(longest, abs(size))
            label = table.heads[i] if row == 0 else None
            ax.barh(y, size, 0.9 * thick, color=COLORS[number % len(COLORS)], label=label)
            ax.text(max(size, 0.0), y, f" {cell(table.heads[i], x)}", fontsize=6, va="center", color=GREY)
    ax.set_yticks(range(len(table.rows)), [worded(label, 60) for label, _ in table.rows], fontsize=7)
    ax.set_ylim(len(table.rows) - 0.4, -0.6)
    ax.set_xlim(right=1.12 * longest or 1.0)
    ax.set_title(table.title, fontsize=10, loc="left", fontweight="bold")
    ax.set_xlabel("per cent across the objective's gradient" if turned else "value less the mean return", fontsize=7)
    ax.tick_params(labelsize=7, length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    if len(columns) > 1:
        ax.legend(fontsize=7, frameon=False, loc="lower right")
