"""An ablation as a picture: time on the left, error on the right, one row of panels for each shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fppo.studies.ablate.result import Ablation, ResultRow, groups, shape_words
from fppo.studies.ablate.text import seconds, share

FORWARD, TOTAL, VALUE, GRADIENT, BAD, GREY = "#93c5fd", "#2563eb", "#059669", "#d97706", "#b91c1c", "#6b7280"


def save(ablation: Ablation, path: Path) -> None:
    """Write the PNG. Raises ValueError if there are no rows."""
    panels = groups(ablation.rows)
    if not panels:
        raise ValueError("nothing was measured: there is no chart to draw")
    heights = [0.42 * len(rows) + 1.15 for rows in panels]
    figure = Figure(figsize=(12, sum(heights) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 2, squeeze=False, height_ratios=heights, width_ratios=(1.15, 1))
    for rows, (left, right) in zip(panels, axes, strict=True):
        _times(rows, left)
        _errors(rows, right)
    machine = ablation.machine
    figure.suptitle(
        f"{machine.device}, torch {machine.torch}, threads: {machine.threads}",
        fontsize=9,
        color=GREY,
        x=0.01,
        ha="left",
    )
    colors = [Patch(color=FORWARD, label="forward"), Patch(color=TOTAL, label="forward and backward")]
    figure.legend(handles=colors, loc="outside upper right", ncols=2, fontsize=8, frameon=False)
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.1)  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _times(rows: Sequence[ResultRow], ax: Axes) -> None:
    first = rows[0]
    ax.set_title(f"{first.op}   {shape_words(first)}   {first.dtype}", fontsize=9, loc="left", fontweight="bold")
    longest = max([x for row in rows for x in (row.seconds_forward, row.seconds_total) if x] or [1.0])
    unit, factor = ("s", 1.0) if longest >= 1 else ("ms", 1e3) if longest >= 1e-3 else ("us", 1e6)
    for place, row in enumerate(rows):
        bars = ((row.seconds_total, TOTAL, "forward and backward"), (row.seconds_forward, FORWARD, "forward"))
        shown = [bar for bar in bars if bar[0] is not None]
        thick = 0.76 / max(len(shown), 1)
        for i, (value, color, label) in enumerate(shown):
            assert value is not None
            y = place + (i - (len(shown) - 1) / 2) * -thick
            ax.barh(y, value * factor, 0.9 * thick, color=color)
            fraction = row.fraction_total if label != "forward" else row.fraction_forward
            beside = "" if fraction is None else f"  {share(fraction)}"
            ax.text((value + longest * 0.012) * factor, y, f"{seconds(value)}{beside}", fontsize=7, va="center")
        if not shown:
            text = {"refused": "cannot run here", "error": "error"}.get(row.status, row.status)
            text = f"{text}: {row.reason}" if row.reason else text
            ax.text(longest * 0.012 * factor, place, _cut(text, 62), fontsize=8, va="center", color=GREY)
    ax.set_xlim(0, longest * factor * 1.3)
    ax.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    for row, tick in zip(rows, ax.get_yticklabels(), strict=True):
        tick.set_color(BAD if row.status in ("failed", "error") else GREY if row.status == "refused" else "black")
    rate = "matmul" if first.bound == "matmul" else "copy"
    ax.set_xlabel(f"median, {unit}; %: of this machine's {rate} rate", fontsize=8)
    _finish(ax, len(rows))


def _label(row: ResultRow) -> str:
    return f"{row.implementation}{' *' if row.default else ''}{' FAILED' if row.status == 'failed' else ''}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _errors(rows: Sequence[ResultRow], ax: Axes) -> None:
    """A dot for each output's value and gradient, by its relative error."""
    exact, rounded = [], []
    outputs = list(dict.fromkeys(e.output for row in rows for e in row.errors))
    markers = dict(zip(outputs, "osD^v" * len(outputs), strict=False))
    for place, row in enumerate(rows):
        for error in row.errors:
            value = error.by is None
            y = place + (-0.16 if value else 0.16)
            if error.relative == 0:
                exact.append((place, value))
                continue
            x = min(error.relative, 1e6)
            rounded.append(x)
            color = VALUE if value else GRADIENT
            label = f"{error.output}, {'value' if value else 'gradient'}"
            ax.plot([x], [y], markers[error.output], color=color, markersize=5, alpha=0.85, label=label)
    low, high = (min(rounded), max(rounded)) if rounded else (1e-8, 1e-6)
    ax.set_xscale("log")
    ax.set_xlim(low / 4, high * 4)
    for place, value in set(exact):
        color, y = VALUE if value else GRADIENT, place + (-0.16 if value else 0.16)
        ax.text(0.01, y, "0", fontsize=8, va="center", color=color, transform=ax.get_yaxis_transform())
    ax.set_title("largest error against float64", fontsize=8, loc="right")  # clear of a long title beside it
    ax.set_xlabel("relative to the tensor's largest number; 0: bit-equal", fontsize=8)
    ax.set_yticks(range(len(rows)), [""] * len(rows))
    _finish(ax, len(rows))
    _legend(ax)


def _finish(ax: Axes, count: int) -> None:
    ax.set_ylim(count - 0.4, -0.6)
    ax.grid(True, axis="x", color="#e5e7eb", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8, length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color("#9ca3af")


def _legend(ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if not unique:
        return
    ax.legend(unique.values(), unique.keys(), fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
