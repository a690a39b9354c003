"""Compare variants of a run: one table and one picture, means over seeds with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import attrs
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fppo.report.charts import COLORS, Points, axis_range, columns_of, least_of, points, short, worded
from fppo.runs import held_out, jsonl
from fppo.runs.loggers import METRICS

TRUTH = "critic/true/r2"


@attrs.frozen(kw_only=True)
class Comparison:
    """The logged curves of several runs: for each metric and variant, one per seed."""

    curves: Mapping[str, Mapping[str, Mapping[int, Points]]]

    def rows(self) -> list[dict[str, Any]]:
        """For each metric and variant: the last number, the mean over the run, and the differences of both from the
        first variant's at equal seeds."""
        rows = []
        for metric, variants in self.curves.items():
            first = next(iter(variants.values()), {})
            for name, curves in variants.items():
                row: dict[str, Any] = {"metric": metric, "variant": name, "seeds": len(curves)}
                for kind, of in (("last", _last), ("mean", _mean)):
                    own = {seed: of(curve) for seed, curve in curves.items()}
                    row[kind] = spread(list(own.values())) if own else None
                    differences = [x - of(first[seed]) for seed, x in own.items() if seed in first]
                    row[f"{kind}_apart"] = None if curves is first or not differences else spread(differences)
                rows.append(row)
        return rows

    def table(self) -> str:
        """The rows as text."""
        lines = []
        for metric in self.curves:
            rows = [row for row in self.rows() if row["metric"] == metric]
            cells = [["variant", "seeds", "last", "to the first", "mean of the run", "to the first"]]
            for row in rows:
                numbers = [row["last"], row["last_apart"], row["mean"], row["mean_apart"]]
                cells.append([row["variant"], str(row["seeds"]), *("" if x is None else str(x) for x in numbers)])
            widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
            lines += ["", metric, *("  ".join(x.ljust(w) for x, w in zip(row, widths)).rstrip() for row in cells)]
        return "\n".join([*lines, "", "± is half of the 95 % confidence interval of the mean over seeds"]).lstrip()

    def markdown(self) -> str:
        """The means over the runs as Markdown: a row for each variant, a column for each metric."""
        cells: dict[str, dict[str, str]] = {}
        for row in self.rows():
            cells.setdefault(row["variant"], {})[row["metric"]] = "" if row["mean"] is None else str(row["mean"])
        lines = [["variant", *(f"`{metric}`" for metric in self.curves)], ["---"] * (1 + len(self.curves))]
        lines += [[f"`{name}`", *(own.get(metric, "") for metric in self.curves)] for name, own in cells.items()]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def equal(self) -> list[list[str]]:
        """The variants whose runs have logged the same numbers of every metric, step by step, in groups of two and
        more."""
        groups: dict[str, list[str]] = {}
        for name in next(iter(self.curves.values()), {}):
            own = [variants.get(name) for variants in self.curves.values()]
            if any(own):
                groups.setdefault(repr(own), []).append(name)
        return [names for names in groups.values() if len(names) > 1]

    def numbers(self) -> list[dict[str, Any]]:
        """The rows as JSON values."""
        return [
            {name: attrs.asdict(x) if isinstance(x, Spread) else x for name, x in row.items()} for row in self.rows()
        ]


def _last(curve: Points) -> float:
    return curve[-1][1]


def _mean(curve: Points) -> float:
    return fmean(value for _, value in curve)


def collect(runs: Mapping[str, Mapping[int, Path]], metrics: Sequence[str] = ()) -> Comparison:
    """Collect the logged metrics of each variant's runs, by seed; by default the held-out reward of each source, and
    critic/true/r2.

    Raises ValueError for a metric that no run has logged, naming the logged ones.
    """
    logged = {
        name: {seed: jsonl.read(path / METRICS, on_damage=lambda _: None) for seed, path in seeds.items()}
        for name, seeds in runs.items()
    }
    records = [record for seeds in logged.values() for lines in seeds.values() for record in lines]
    known = dict.fromkeys(name for record in records for name in record)
    first = [each.metric for each in held_out.rewards(known)]
    chosen = list(metrics) or [*first, *([TRUTH] if TRUTH in known else [])]
    wrong = [name for name in chosen if name not in known]
    if wrong or not chosen:
        raise ValueError(f"--metrics: no run has logged {wrong or 'a held-out score'}; there are {sorted(known)}")
    return Comparison(
        curves={
            metric: {
                name: {seed: line for seed, records in seeds.items() if (line := points(records, metric))}
                for name, seeds in logged.items()
            }
            for metric in chosen
        }
    )


def write_png(comparison: Comparison, path: Path, *, x: str = "step") -> None:
    """Write a picture with a panel for each metric: each variant's mean over seeds with its 95 % confidence. `x` is the
    label of the horizontal axis."""
    picture(comparison, x=x).savefig(path, dpi=130, metadata={"Software": None})


def picture(comparison: Comparison, *, x: str = "step") -> Figure:
    """Draw a panel for each metric, with its legend below."""
    count = len(comparison.curves)
    columns = columns_of(count)
    rows = -(-count // columns)
    figure = Figure(figsize=(6.4 * columns, 4.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for (metric, variants), ax in zip(comparison.curves.items(), axes, strict=False):
        for number, (name, curves) in enumerate(variants.items()):
            _draw(ax, name, curves, COLORS[number % len(COLORS)])
        values = [v for curves in variants.values() for curve in curves.values() for _, v in curve]
        if values:
            (low, high), (lowest, highest) = axis_range(values, least_of(metric)), ax.get_ylim()
            ax.set_ylim(min(low, lowest), max(high, highest))  # with the bands around the means
        ax.set_title(worded(metric, 70), fontsize=10, loc="left")
        ax.set_xlabel(x, fontsize=8)
        ax.grid(True, color="#e5e7eb", linewidth=0.8)
        ax.tick_params(labelsize=8, length=0)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.12), borderaxespad=0)
    for ax in axes:  # unused ones
        ax.set_axis_off()
    return figure


def _draw(ax: Axes, name: str, curves: Mapping[int, Points], color: str) -> None:
    by_step: dict[float, list[float]] = {}
    for curve in curves.values():
        for step, value in curve:
            by_step.setdefault(step, []).append(value)
    steps = sorted(step for step, values in by_step.items() if len(values) == len(curves))  # logged by all seeds
    spreads = [spread(by_step[step]) for step in steps]
    last = f" {short(spreads[-1].mean)}" if spreads else ""
    ax.plot(steps, [x.mean for x in spreads], color=color, linewidth=1.8, label=f"{worded(name, 80)}{last}")
    if spreads and not math.isnan(spreads[0].half):
        low, high = ([x.mean + sign * x.half for x in spreads] for sign in (-1, 1))
        ax.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)


# the 0.975 quantiles of Student's t with 1, 2, ... degrees of freedom
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


@attrs.frozen
class Spread:
    """A mean, and half the width of its 95 % confidence interval (Student's t); nan where there is one number."""

    mean: float
    half: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if math.isnan(self.half) else f"{self.mean:.4f} ± {self.half:.4f}"


def spread(values: Sequence[float]) -> Spread:
    """The mean and confidence interval of independent draws. Raises ValueError for none."""
    if not values:
        raise ValueError("no numbers to take the mean of")
    if len(values) == 1:
        return Spread(values[0], math.nan, 1)
    degrees = len(values) - 1
    quantile = _STUDENT[degrees - 1] if degrees <= len(_STUDENT) else 1.96 + 2.5 / degrees
    return Spread(fmean(values), quantile * stdev(values) / math.sqrt(len(values)), len(values))
