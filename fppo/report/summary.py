"""Summary of a run: its steps, headline numbers, stages, settings, and the critic beside the truth."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fppo.pipeline.supervised import NLL
from fppo.report import charts
from fppo.report.charts import Panel, points
from fppo.runs import held_out, jsonl
from fppo.settings import files

SHOWN_TRUTHS = 4  # responses beside the truth


@attrs.frozen
class Tile:
    """A number with a caption and a note."""

    caption: str
    value: str
    note: str


def merged(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One record per step, in order; lines of one step are joined, and a line without a step is left out."""
    by_step: dict[int, dict[str, Any]] = {}
    for record in records:
        if isinstance(record.get("step"), int):
            by_step.setdefault(record["step"], {}).update(record)
    return [by_step[step] for step in sorted(by_step)]


def tiles(records: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[Tile]:
    """The headline numbers of a run; none without a step."""
    if not records:
        return []
    found = held_out.rewards(dict.fromkeys(name for record in records for name in record))
    tiles = []
    for each in found[:3]:
        line = points(records, each.metric)
        if line:
            caption = f"Held-out {each.measure}" + (f", {each.source}" if len(found) > 1 else "")
            since = f"after step {line[0][0]:.0f}" if line[0][0] else "before"
            note = f"{since}, and after step {line[-1][0]:.0f}"
            tiles.append(_change(caption, line[0][1], line[-1][1], note, share=each.measure != NLL))
    losses = [value for _, value in points(records, f"supervised/{NLL}")]
    if losses:
        tiles.append(_change("Loss in training", losses[0], losses[-1], "first and last step", share=False))
    scores = [value for _, value in points(records, "critic/score/mean")]
    if scores:
        window = max(1, min(5, len(scores) // 2))
        start, end = sum(scores[:window]) / window, sum(scores[-window:]) / window
        about = "first and last step" if window == 1 else f"first and last {window} steps"
        tiles.append(_change("Reward in training", start, end, about, share=False))
    wanted = settings.get("steps")
    done = records[-1]["step"]
    tiles.append(Tile("Steps", f"{done} of {wanted}" if wanted is not None else str(done), ""))
    seconds = [value for _, value in points(records, "timing_s/step")]
    speed = [value for _, value in points(records, "perf/throughput")]
    if seconds:
        about = f"{sum(speed) / len(speed):,.0f} tokens/s" if speed else ""
        tiles.append(Tile("Time in steps", _duration(sum(seconds)), about))
    return tiles


def _change(caption: str, before: float, after: float, note: str, *, share: bool = True) -> Tile:
    """A tile of a number before and after. With `share`, numbers from 0 to 1 are per cents, with the gain in points."""
    if share and min(before, after) >= 0 and max(before, after) <= 1:
        return Tile(caption, f"{before:.1%} → {after:.1%}", f"{100 * (after - before):+.1f} points; {note}")
    return Tile(caption, f"{before:.3f} → {after:.3f}", f"{after - before:+.3f}; {note}")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def stages(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds per step by stage, the longest first."""
    names = {n for r in records for n in r if n.startswith("timing_s/")} - {"timing_s/step", "timing_s/testing"}
    lines = {name.removeprefix("timing_s/"): points(records, name) for name in names}
    means = {name: sum(v for _, v in line) / len(line) for name, line in lines.items() if line}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def beside_truth(directory: Path) -> list[tuple[Panel, Panel]]:
    """Panels of the last evaluation's responses: values and advantages by token, the critic's and the exact ones."""
    evaluations = sorted(directory.glob("*.jsonl"))
    drawn = []
    for line in unlike(jsonl.read(evaluations[-1], on_damage=lambda _: None) if evaluations else []):
        title = charts.shortened(f"{line['prompt']}{''.join(line['tokens'])}".strip(), 60)

        def panel(what: str, names: Mapping[str, str], line: Mapping[str, Any] = line, title: str = title) -> Panel:
            lines = {label: [(float(t), x) for t, x in enumerate(line[name], 1)] for label, name in names.items()}
            return Panel(title, what, lines, "token", 0.1)

        values = panel("value before each token", {"exact": "exact_values", "critic": "values"})
        drawn.append((values, panel("advantage", {"exact": "exact_advantages", "estimate": "advantages"})))
    return drawn


def unlike(lines: Sequence[Mapping[str, Any]], count: int = SHOWN_TRUTHS) -> list[Mapping[str, Any]]:
    """Choose up to `count` sampled responses that differ most from each other. The first has the largest range of exact
    values; then, one by one, comes the one furthest from those chosen. The distance counts the range, first and last of
    the exact values, and the critic's mean absolute error.

    `lines` are records of responses with lists "exact_values", the true value before each token, and "values", the
    critic's. Lines without exact values are left out.
    """
    features = {}
    for place, line in enumerate(lines):
        if exact := line["exact_values"]:
            off = sum(abs(a - b) for a, b in zip(line["values"], exact, strict=True)) / len(exact)
            features[place] = (max(exact) - min(exact), exact[0], exact[-1], off)

    def distance(index: int) -> float:
        return min(math.dist(features[index], features[other]) for other in chosen)

    chosen: list[int] = sorted(features, key=lambda place: -features[place][0])[:1]
    while 0 < len(chosen) < min(count, len(features)):
        chosen.append(max((place for place in features if place not in chosen), key=distance))
    return [lines[place] for place in chosen]


def settings_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings by their paths: those that differ from the defaults, and the others. Raises ValueError for a file
    that is not TOML."""
    if not path.exists():
        return {}, {}
    try:
        values = files.flat(tomllib.loads(files.read_text(path)))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from error
    defaults = files.flat(files.to_dict(files.TrainSettings()))
    chosen = {name: value for name, value in values.items() if name not in defaults or defaults[name] != value}
    return chosen, {name: value for name, value in values.items() if name not in chosen}
