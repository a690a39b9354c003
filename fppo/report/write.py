"""Write the report of a run: its curves as a PNG, and all else with them in one HTML file that loads nothing."""

from __future__ import annotations

import math
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fppo.report import charts, timeline
from fppo.report.charts import Panel, points
from fppo.report.page import Page, Tile, render
from fppo.report.remains import remains
from fppo.runs import held_out, jsonl, sample_files, starts
from fppo.runs.evaluations import TRUTH
from fppo.runs.loggers import METRICS
from fppo.settings import files

SETTINGS, CURVES, REPORT = "settings.toml", "curves.png", "report.html"
SHOWN_STEPS, SHOWN_PER_STEP, EXTREMES, SHOWN_TRUTHS, SHOWN_WORK = 6, 4, 3, 4, 3


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write curves.png and report.html into the run's directory, and return the path of the latter.

    Missing files (samples, settings, a critic's metrics) are left out; so are damaged lines of metrics and samples,
    which are named on standard error. Steps without metrics are named there and on the page, which then shows them by
    the run's other files. Raises ValueError if no file has any step, or the settings are damaged.
    """
    run_dir = Path(run_dir)
    path = run_dir / METRICS
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such directory; give the output_dir of a run")
    damaged: list[str] = []
    logged = jsonl.read(path, on_damage=damaged.append)
    sampled = sample_files.files(run_dir / sample_files.SAMPLES)
    known = remains(run_dir, sampled, on_damage=damaged.append)
    present = {record.get("step") for record in logged}
    records = merged([*(record for record in known if record["step"] not in present), *logged])
    if not records:
        hints = ["is it the output_dir of a run that logged to jsonl and finished a step?", *damaged]
        raise ValueError(f"{path}: no metrics to report; {'; '.join(hints)}")
    samples, best = shown_rows(sampled, on_damage=damaged.append)
    lost = jsonl.missing(path, present, starts.first(run_dir) + 1, records[-1]["step"])
    for text in (*lost, *(f"left out: {text}" for text in damaged)):
        print(text, file=sys.stderr)
    title = Path(os.path.realpath(run_dir)).name
    drawn = charts.panels(records)
    charts.write_png(drawn, run_dir / CURVES, title=title)
    chosen, rest = settings_of(run_dir / SETTINGS)
    page = Page(
        title=title,
        lost=lost,
        tiles=tiles(records, rest | chosen),
        panels=drawn,
        truth=beside_truth(run_dir / TRUTH),
        stages=stages(records),
        work=timeline.read(run_dir, last=SHOWN_WORK),
        samples=samples,
        extremes=best,
        chosen=chosen,
        rest=rest,
        metrics=table(records),
    )
    target = run_dir / REPORT
    temporary = run_dir / f".{REPORT}.new"
    temporary.write_bytes(render(page).encode("utf-8", "replace"))  # a lone surrogate has no UTF-8
    os.replace(temporary, target)
    return target


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
    """Up to `count` responses that differ most: first the one with the largest range of exact values, then, one by one,
    the one furthest from those chosen, by the range, start and end of its exact values and the critic's error.
    """
    features = {}
    for place, line in enumerate(lines):
        if exact := line["exact_values"]:
            off = sum(abs(a - b) for a, b in zip(line["values"], exact, strict=True)) / len(exact)
            features[place] = (max(exact) - min(exact), exact[0], exact[-1], off)

    def distance(place: int) -> float:
        return min(math.dist(features[place], features[other]) for other in chosen)

    chosen: list[int] = sorted(features, key=lambda place: -features[place][0])[:1]
    while 0 < len(chosen) < min(count, len(features)):
        chosen.append(max((place for place in features if place not in chosen), key=distance))
    return [lines[place] for place in chosen]


def held_out_change(run_dir: str | os.PathLike[str]) -> tuple[float, float]:
    """The first and the last mean reward on held-out prompts of the first source. Raises ValueError without any."""
    records = merged(jsonl.read(Path(run_dir) / METRICS, on_damage=lambda _: None))
    found = held_out.rewards(dict.fromkeys(name for record in records for name in record))
    line = points(records, found[0].metric) if found else []
    if not line:
        raise ValueError(f"{run_dir} has no held-out metrics")
    return line[0][1], line[-1][1]


def merged(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One record per step, in order; lines of one step are joined, and a line without a step is left out."""
    by_step: dict[int, dict[str, Any]] = {}
    for record in records:
        if isinstance(record.get("step"), int):
            by_step.setdefault(record["step"], {}).update(record)
    return [by_step[step] for step in sorted(by_step)]


def tiles(records: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[Tile]:
    """The headline numbers of a run."""
    found = held_out.rewards(dict.fromkeys(name for record in records for name in record))
    tiles = []
    for each in found[:3]:
        line = points(records, each.metric)
        if line:
            caption = f"Held-out {each.measure}" + (f", {each.source}" if len(found) > 1 else "")
            since = f"after step {line[0][0]:.0f}" if line[0][0] else "before"
            tiles.append(_change(caption, line[0][1], line[-1][1], f"{since}, and after step {line[-1][0]:.0f}"))
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
    """A tile of a change; numbers from 0 to 1 as per cents, with the gain in points."""
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


Rows = Sequence[Mapping[str, Any]]


def shown_rows(
    sampled: Mapping[int, Path], *, on_damage: Callable[[str], None]
) -> tuple[Mapping[int, Rows], Mapping[str, Rows]]:
    """Rows of some steps from the first to the last, by step, and the best and the worst of late steps, by heading."""
    whole = readable(sampled, on_damage=on_damage)
    steps = list(whole)
    count = min(len(steps), SHOWN_STEPS)
    some = dict.fromkeys(steps[round(i * (len(steps) - 1) / max(count - 1, 1))] for i in range(count))
    tables = {step: sample_files.read(whole[step]) for step in some}
    by_step = {step: list(sample_files.rows(table, unlike_scores(table))) for step, table in tables.items()}
    return by_step, extremes(whole)


def readable(sampled: Mapping[int, Path], *, on_damage: Callable[[str], None]) -> dict[int, Path]:
    """The files that are not damaged; messages about the others go to `on_damage`."""
    whole = {}
    for step, path in sampled.items():
        try:
            sample_files.read(path, ("score",))
        except ValueError as error:
            on_damage(str(error))
        else:
            whole[step] = path
    return whole


def unlike_scores(table: Any) -> list[int]:
    """The numbers of up to SHOWN_PER_STEP rows, of different prompts where there are so many, from the lowest score to
    the highest."""
    scores, groups = (table.column(name).to_pylist() for name in ("score", "group"))
    ranked = sorted(range(len(scores)), key=lambda row: (scores[row] is None, scores[row] or 0.0))
    first = {groups[row]: row for row in reversed(ranked)}
    some = [row for row in ranked if first[groups[row]] == row] if len(first) >= SHOWN_PER_STEP else ranked
    count = min(len(some), SHOWN_PER_STEP)
    return list(dict.fromkeys(some[round(i * (len(some) - 1) / max(count - 1, 1))] for i in range(count)))


def extremes(sampled: Mapping[int, Path]) -> dict[str, Rows]:
    """The best and the worst rows of the last quarter of the steps, by heading; none if all scores are equal."""
    late = list(sampled)[len(sampled) * 3 // 4 :]
    ranked = sorted(
        (score, step, number)
        for step in late
        for number, score in enumerate(sample_files.read(sampled[step], ("score",)).column("score").to_pylist())
        if score is not None
    )
    if not ranked or ranked[0][0] == ranked[-1][0]:
        return {}
    count = min(EXTREMES, len(ranked) // 2)
    since = f"of steps {late[0]} to {late[-1]}" if len(late) > 1 else f"of step {late[-1]}"
    heads = {
        f"Best {since}, up to {charts.short(ranked[-1][0])}": ranked[::-1][:count],
        f"Worst {since}, from {charts.short(ranked[0][0])}": ranked[:count],
    }

    tables = {step: sample_files.read(sampled[step]) for chosen in heads.values() for _, step, _ in chosen}
    return {
        head: [row for _, step, number in chosen for row in sample_files.rows(tables[step], [number])]
        for head, chosen in heads.items()
    }


def table(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float, float, float]]:
    """(first, last, least, greatest) of every metric."""
    names = sorted({name for record in records for name in record} - {"step"})
    lines = {name: [value for _, value in points(records, name)] for name in names}
    return {name: (v[0], v[-1], min(v), max(v)) for name, v in lines.items() if v}


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
