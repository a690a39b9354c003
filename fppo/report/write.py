"""Write the report of a run: its curves as a PNG, and the viewer's page of it in one HTML file that loads nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from fppo.report import charts, summary, view_page, viewed
from fppo.report.charts import points
from fppo.runs import alarms, held_out, jsonl, sample_files
from fppo.runs.alarms import Finding
from fppo.runs.loggers import METRICS

CURVES, REPORT = "curves.png", "report.html"
MOST_BYTES = 16e6  # of sampled rows in a report


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write curves.png and report.html into the run's directory, and return the path of the latter.

    Missing files (samples, settings, a critic's metrics) are left out; so are damaged lines of metrics and damaged
    files of samples, which are named on standard error. Steps without metrics are named there and on the page, which
    then shows them by the run's other files. Of more than 16 MB of sampled rows every second step is left out, then
    every fourth, and so on. Raises ValueError if no file has any step, or the settings are damaged.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such directory; give the output_dir of a run")
    summary.settings_of(run_dir / viewed.SETTINGS)
    title = Path(os.path.realpath(run_dir)).name
    state = viewed.state_of(run_dir, title) or {}
    records = summary.merged([*state["others"], *state["lines"]["records"]])
    if not records:
        hints = ["is it the output_dir of a run that logged to jsonl and finished a step?", *state["notes"]]
        raise ValueError(f"{run_dir / METRICS}: no metrics to report; {'; '.join(hints)}")
    printed = set(map(str, alarms.ring(records)))  # by the run itself
    for text in (
        *(x for x in state["notes"] if x not in printed),
        *_unreadable(sample_files.files(run_dir / sample_files.SAMPLES)),
    ):
        print(text, file=sys.stderr)
    charts.write_png(charts.panels(records), run_dir / CURVES, title=title)
    view_page.export([run_dir], run_dir / REPORT, most_bytes=MOST_BYTES)
    return run_dir / REPORT


def alarms_of(run_dir: str | os.PathLike[str]) -> list[Finding]:
    """The alarms that ring in a run's metrics. Damaged lines are named on standard error. Raises ValueError for a
    directory without metrics."""
    records = summary.merged(jsonl.read(Path(run_dir) / METRICS, on_damage=partial(print, file=sys.stderr)))
    if not records:
        raise ValueError(f"{Path(run_dir) / METRICS}: no metrics to look at; give the output_dir of a run")
    return alarms.ring(records)


def _unreadable(sampled: Mapping[int, Path]) -> Iterator[str]:
    """Messages on damaged files of rows."""
    for path in sampled.values():
        try:
            sample_files.read(path, ("score",))
        except ValueError as error:
            yield f"left out: {error}"


def held_out_change(run_dir: str | os.PathLike[str]) -> tuple[float, float]:
    """The first and the last mean reward on held-out prompts of the first source. Raises ValueError without any."""
    records = summary.merged(jsonl.read(Path(run_dir) / METRICS, on_damage=lambda _: None))
    found = held_out.rewards(dict.fromkeys(name for record in records for name in record))
    line = points(records, found[0].metric) if found else []
    if not line:
        raise ValueError(f"{run_dir} has no held-out metrics")
    return line[0][1], line[-1][1]
