"""Curves of a run: their panels, and all of them as one PNG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fppo._errors import printable
from fppo.runs import held_out

Points = list[tuple[float, float]]  # (step, value)
COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#be185d", "#0891b2", "#4d7c0f", "#dc2626")
SMOOTH_FROM = 40  # the least number of points for a smoothed line over the raw one


@attrs.frozen
class Panel:
    """A chart of one quantity: title, note, lines by label, unit of the x axis, and least span of the y axis."""

    title: str
    note: str
    lines: dict[str, Points]
    unit: str = "step"
    least: float = 0.0
    """The least span of its y axis, in the quantity's units: smaller changes are noise and look small."""


@attrs.frozen
class PanelMetrics:
    """The metrics of a chart, by their labels in it."""

    title: str
    note: str
    metrics: Mapping[str, str]
    least: float = 0.0


PANELS: tuple[tuple[str, str, float, tuple[tuple[str, str], ...]], ...] = (
    ("Reward", "mean score of the sampled responses", 0.01, (("score", "critic/score/mean"),)),
    ("KL to the reference", "distance of the policy from the reference", 1e-3, (("kl", "actor/reward_kl_penalty"),)),
    ("KL to the old policy", "change of the policy in one step", 1e-3, (("kl", "actor/ppo_kl"),)),
    ("Entropy", "of the policy per token, in nats", 0.01, (("entropy", "actor/entropy"),)),
    (
        *("Clip fraction", "tokens whose ratio, or value, was clipped", 0.01),
        (("policy", "actor/pg_clipfrac"), ("value", "critic/vf_clipfrac")),
    ),
    (
        *("Off-policy ratio", "largest ratio of current to sampling probability", 0.01),
        (("largest", "training/rollout_ratio_max"),),
    ),
    ("Loss", "mean -log-prob of the imitated tokens, in nats", 0.01, (("loss", "supervised/nll_loss"),)),
    ("Gradient norm", "before clipping", 0.0, (("", "supervised/grad_norm"),)),
    ("Value loss", "squared error of the critic, halved", 1e-3, (("value loss", "critic/vf_loss"),)),
    (
        *("Explained variance", "share of the returns' variance that the critic predicts", 0.05),
        (("", "critic/vf_explained_var"),),
    ),
    (
        *("Critic against exact values", "share of the exact values' variance that it predicts", 0.05),
        (("", "critic/true/r2"),),
    ),
    (
        *("Angle to the exact advantages", "cosine between the estimated and the exact ones", 0.05),
        (("", "critic/true/cosine"),),
    ),
    (
        *("Signs of advantages", "share of tokens on which the exact ones agree", 0.05),
        (("", "critic/true/sign"),),
    ),
    ("Response length", "tokens per response", 1.0, (("mean", "response_length/mean"),)),
    ("Gradient norm of the policy", "before clipping", 0.0, (("", "actor/grad_norm"),)),
    ("Gradient norm of the critic", "before clipping", 0.0, (("", "critic/grad_norm"),)),
    ("Throughput", "tokens per second", 1.0, (("", "perf/throughput"),)),
)
NAMED = 4  # lines of a panel in the picture's legend; the page names all
SHOWN_MEASURES = 6  # held-out measures with a chart; the others are in the table


def least_of(name: str) -> float:
    """The least span of a metric's axis; 0 for metrics without a panel."""
    return next((least for _, _, least, lines in PANELS if name in [metric for _, metric in lines]), 0.0)


def points(records: Sequence[Mapping[str, Any]], name: str) -> Points:
    """The points (step, value) of a metric, finite numbers alone."""
    values = ((r["step"], r.get(name)) for r in records)
    return [(s, v) for s, v in values if isinstance(v, int | float) and math.isfinite(v)]


def panels(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """The charts with numbers, held-out results first."""
    drawn = []
    for each in panel_metrics(records):
        lines = {label: points(records, name) for label, name in each.metrics.items()}
        drawn.append(Panel(each.title, each.note, lines, least=each.least))
    return drawn


def panel_metrics(records: Sequence[Mapping[str, Any]]) -> list[PanelMetrics]:
    """The metrics with numbers of each chart, held-out results first."""
    named = [
        PanelMetrics(title, note, {label: name for label, name in lines if points(records, name)}, least)
        for title, note, least, lines in PANELS
    ]
    return [*_held_out_metrics(records), *(each for each in named if each.metrics)]


def _held_out_metrics(records: Sequence[Mapping[str, Any]]) -> list[PanelMetrics]:
    """A chart for each number measured on held-out prompts, the reward first.

    Its lines are the means by source; for a single source also best@n and maj@n. A term that equals the reward in all
    points is left out.
    """
    found = held_out.held_out(dict.fromkeys(name for record in records for name in record))
    several = len({each.source for each in found}) > 1
    most = max((each.responses for each in found), default=1)
    names: dict[str, dict[str, str]] = {}
    measures: dict[str, dict[str, Points]] = {}
    for each in found:
        line = points(records, each.metric)
        if line and (each.is_mean or (each.responses == most and not several)):
            label = each.source or each.measure if several else each.kind
            measures.setdefault(each.measure, {})[label] = line
            names.setdefault(each.measure, {})[label] = each.metric
    for name in held_out.repeated(measures):
        del measures[name]
    note = "prompts never trained on" + (", by source" if several else "")
    chosen = list(measures.items())[:SHOWN_MEASURES]
    return [PanelMetrics(f"Held-out {name}", note, names[name], _least(lines.values())) for name, lines in chosen]


def _least(lines: Iterable[Points]) -> float:
    """The least span of a score's axis: a hundredth of the largest score, or of 1 if scores are smaller."""
    return 0.01 * max([1.0, *(abs(value) for line in lines for _, value in line)])


def smooth(line: Points) -> Points:
    """A centred moving average over a fifteenth of the line, narrower at its ends, so without lag."""
    half = max(2, len(line) // 30)
    means = []
    for i, (step, _) in enumerate(line):
        reach = min(half, i, len(line) - 1 - i)
        window = [value for _, value in line[i - reach : i + reach + 1]]
        means.append((step, sum(window) / len(window)))
    return means


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Format numbers in few characters, with enough digits to distinguish them."""
    apart = min((abs(b - a) for a, b in pairwise(values)), default=math.inf)
    for digits in range(3, 13):
        labels = [short(value, digits) for value in values]
        read = [float(label.replace("k", "e3")) for label in labels]
        if apart == math.inf or all(abs(a - b) < apart / 10 for a, b in zip(read, values, strict=True)):
            return labels
    return [repr(value) for value in values]


def short(value: float, digits: int = 3) -> str:
    """Format a number in few characters, with at most `digits` digits."""
    size = abs(value)
    if value == 0 or 0.001 <= size < 1000:
        return f"{value:.{digits}g}"
    if 1000 <= size < 999500:
        decimals = max(digits - 4, 0)
        return f"{value:.{decimals}f}" if size < 10000 else f"{value / 1000:.{digits}g}k"
    number, exponent = f"{value:.{digits - 2}e}".split("e")
    return f"{number.rstrip('0').removesuffix('.')}e{int(exponent)}"


def columns_of(count: int, widths: Sequence[int] = (3, 4, 2, 5)) -> int:
    """The number of charts in a row: the first of the numbers `widths` that leaves no chart alone in a row."""
    fitting = [columns for columns in widths if columns <= count and count % columns != 1]
    return next(iter(fitting), max(min(widths[0], count), 1))


def shortened(text: str, width: int) -> str:
    """The text in at most `width` characters, its middle replaced by "..."."""
    return text if len(text) <= width else f"{text[: width // 2 - 1]}...{text[-(width - width // 2 - 2) :]}"


# PNG


def worded(text: str, width: int = 120) -> str:
    """An untrusted name in at most `width` characters for matplotlib: without control characters, "$" escaped."""
    return shortened(printable(text), width).replace("$", r"\$")


def write_png(drawn: Sequence[Panel], path: Path, *, title: str) -> None:
    """Write all panels as one picture."""
    picture(drawn, title=title).savefig(path, dpi=130, metadata={"Software": None})


def picture(drawn: Sequence[Panel], *, title: str) -> Figure:
    """Draw all panels in one figure, each with room for its tick labels."""
    columns = columns_of(len(drawn))
    rows = max(-(-len(drawn) // columns), 1)
    width, height = 4.4 * columns, 2.9 * rows + 0.4
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.text(0.1 / width, 1 - 0.1 / height, worded(title), fontsize=12, fontweight="bold", va="top")
    for number, panel in enumerate(drawn):
        row, column = divmod(number, columns)  # positions in inches: matplotlib's own layout doubles the time
        left, bottom = 4.4 * column + 0.6, 2.9 * (rows - 1 - row) + 0.5
        ax = figure.add_axes((left / width, bottom / height, 3.65 / width, 2.05 / height))
        more = max(_draw(panel, ax) * 0.07 - 0.5, 0.0)  # width of labels at 8 points beyond the common margin
        ax.set_position(((left + more) / width, bottom / height, (3.65 - more) / width, 2.05 / height))
    return figure


def _draw(panel: Panel, ax: Axes) -> int:
    """Draw a panel and return the length of its longest tick label."""
    for number, (color, (name, line)) in enumerate(zip(_colors(), panel.lines.items(), strict=False)):
        steps, values = zip(*line, strict=True)
        marker = "o" if len(line) < 12 else None
        if len(line) >= SMOOTH_FROM:
            ax.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            values = [v for _, v in smooth(line)]
        shown = worded(name, 20) if name and number < NAMED else None
        ax.plot(steps, values, color=color, linewidth=1.8, marker=marker, markersize=4, label=shown)
    ax.set_ylim(*axis_range([v for line in panel.lines.values() for _, v in line], panel.least))
    ax.set_title(worded(panel.title, 46), fontsize=10, loc="left")
    ax.grid(True, color="#e5e7eb", linewidth=0.8)
    ax.tick_params(labelsize=8, length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color("#9ca3af")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    places, labels = zip(*_labelled(ticks(*ax.get_ylim(), 6)), strict=True)
    ax.set_yticks(places, labels)
    if len(panel.lines) > 1:
        ax.legend(
            fontsize=8, frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.1), borderaxespad=0, borderpad=0
        )
    return max(map(len, labels))


def _colors() -> Iterator[str]:
    while True:
        yield from COLORS


def _labelled(values: Sequence[float]) -> list[tuple[float, str]]:
    return list(zip(values, tick_labels(values), strict=True))


def axis_range(values: Sequence[float], least: float = 0.0) -> tuple[float, float]:
    """The range of an axis for the values: at least as wide as `least` and as 2 % of the largest, so that noise looks
    small.

    If no value is negative, the axis begins at 0 or above; if all are 0, it ends at `least`, or at 1 if `least` is 0.
    """
    low, high = min(values), max(values)
    narrow = max(least, 0.02 * max(abs(low), abs(high))) or 1.0
    if high - low < narrow:
        middle = (low + high) / 2
        start = max(middle - narrow / 2, 0.0) if low >= 0 else middle - narrow / 2
        return start, max(start + narrow, high)
    margin = (high - low) * 0.06
    start = max(low - margin, 0.0) if low >= 0 else low - margin
    return start, high + margin
