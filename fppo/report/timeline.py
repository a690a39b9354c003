"""Timeline of a run's last steps: a drawing for its report, and a file for viewers of Chrome traces."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fppo.report.charts import tick_labels, ticks
from fppo.runs import jsonl
from fppo.runs.observers import TRACE

FILE = "trace.json"
ROLES = ("rollout", "reward", "actor", "reference", "critic")
_ROLE: Mapping[str, str] = MappingProxyType(  # by stage, and by call to a pool
    {"gen": "rollout", "generate": "rollout", "reward": "reward", "old_log_prob": "actor", "update_actor": "actor"}
    | {"ref": "reference", "values": "critic", "update_critic": "critic"}
)
STEP, OTHER = "step", "other"
_LINES = ("step", *ROLES, OTHER)  # the lines of a process, in the order of the drawing


class Bar(NamedTuple):
    """A span of time: its process and line, its name, its step, and further numbers."""

    process: str  # "pool NAME", or the controller
    line: str  # a role, or a rank of a pool
    name: str
    step: int
    start: float  # in seconds since 1970
    seconds: float
    more: Mapping[str, float] = MappingProxyType({})

    @property
    def kind(self) -> str:
        """The role of the bar."""
        return _ROLE.get(self.name, OTHER)


def read(run: str | os.PathLike[str], *, last: int | None = None) -> list[Bar]:
    """The bars of the `last` steps (None: of all kept ones), line by line. Damaged lines are left out."""
    files = sorted((Path(run) / TRACE).glob("rank_*.jsonl"))
    records = {path: jsonl.read(path, on_damage=lambda _: None) for path in files}
    steps = sorted({record["step"] for lines in records.values() for record in lines})
    wanted = set(steps if last is None else steps[-last:])
    bars = [
        bar
        for rank, lines in enumerate(records.values())
        for record in lines
        if record["step"] in wanted
        for bar in _bars(record, f"rank {rank}" if len(records) > 1 else "controller")
    ]
    return sorted(bars, key=_place)


def _place(bar: Bar) -> tuple[Any, ...]:
    line = _LINES.index(bar.line) if bar.line in _LINES else int(bar.line.removeprefix("rank "))
    return bar.process.startswith("pool "), bar.process, line, bar.start, -bar.seconds


def _bars(record: Mapping[str, Any], process: str) -> Iterator[Bar]:
    step = record["step"]
    for stage, start, seconds in record["spans"]:
        line = STEP if stage == STEP else _ROLE.get(stage, OTHER)
        yield Bar(process, line, stage, step, start, seconds)
    for call in record["calls"]:
        for rank, (start, seconds) in enumerate(call["ranks"]):
            waited = max(call["seconds"] - seconds, 0.0)
            more = {"waited": waited, "bytes there": call["there"], "bytes back": call["back"]}
            yield Bar(f"pool {call['group']}", f"rank {rank}", call["label"], step, start, seconds, more)


def write(run: str | os.PathLike[str], target: str | os.PathLike[str] | None = None) -> Path:
    """Write the kept traces of a run as a Chrome trace (None: into its directory) and return the path.

    Raises ValueError if the run has written none.
    """
    bars = read(run)
    if not bars:
        raise ValueError(f"{Path(run) / TRACE} holds no traces; give the output_dir of a run")
    path = Path(run) / TRACE / FILE if target is None else Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome(bars)) + "\n", encoding="utf-8")
    return path


def chrome(bars: Sequence[Bar]) -> dict[str, Any]:
    """The bars in the Trace Event Format, in microseconds since the first one began.

    Two that overlap by what a message takes are put one after the other: viewers take an overlap for a call within.
    """
    zero, events = min(bar.start for bar in bars), list[dict[str, Any]]()
    processes = list(dict.fromkeys(bar.process for bar in bars))
    lines = list(dict.fromkeys((bar.process, bar.line) for bar in bars))
    for name in processes:
        about = {"pid": processes.index(name), "args": {"name": name}}
        events += [{"ph": "M", "name": "process_name", **about}]
    for number, (process, name) in enumerate(lines):
        about = {"pid": processes.index(process), "tid": number}
        events += [{"ph": "M", "name": "thread_name", **about, "args": {"name": name}}]
        events += [{"ph": "M", "name": "thread_sort_index", **about, "args": {"sort_index": number}}]
        end = zero
        for bar in (bar for bar in bars if (bar.process, bar.line) == (process, name)):
            start, last = max(bar.start, end), bar.start + bar.seconds
            span = {"ts": 1e6 * (start - zero), "dur": 1e6 * max(last - start, 0.0)}
            args = {"step": bar.step, "seconds": bar.seconds, **bar.more}
            events.append({"ph": "X", "name": bar.name, "cat": bar.kind, **about, **span, "args": args})
            end = max(end, last)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


# the drawing

WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 1180, 150, 14, 24, 22, 22
MOST = 24  # lines drawn at most
LETTER = 6.4  # width of a letter


def svg(bars: Sequence[Bar]) -> str:
    """The bars as an inline SVG figure, coloured by the page's style; each shows its numbers on hovering."""
    drawn = [bar for bar in bars if bar.line != STEP]
    lines = list(dict.fromkeys((bar.process, bar.line) for bar in drawn))[:MOST]
    zero, end = min(bar.start for bar in drawn), max(bar.start + bar.seconds for bar in drawn)
    scale = (WIDTH - LEFT - RIGHT) / max(end - zero, 1e-9)
    bottom = TOP + ROW * len(lines)

    def x(time: float) -> float:
        return LEFT + scale * (time - zero)

    marks = ticks(0.0, end - zero, 8)
    steps = {bar.step: bar.start for bar in bars if bar.line == STEP and bar.start >= zero - 1.0}
    elements = [
        f'<svg viewBox="0 0 {WIDTH} {bottom + BOTTOM}" role="img" aria-label="timeline of the last steps">',
        *(
            f'<line class="grid" x1="{x(zero + t):.1f}" x2="{x(zero + t):.1f}" y1="{TOP}" y2="{bottom}"/>'
            f'<text class="tick" x="{x(zero + t):.1f}" y="{bottom + 16}" text-anchor="middle">{label} s</text>'
            for t, label in zip(marks, tick_labels(marks), strict=True)
        ),
        *(
            f'<line class="stepline" x1="{x(max(t, zero)):.1f}" x2="{x(max(t, zero)):.1f}" y1="6" y2="{bottom}"/>'
            f'<text class="tick" x="{x(max(t, zero)) + 4:.1f}" y="15">step {step}</text>'
            for step, t in steps.items()
        ),
    ]
    for number, (process, name) in enumerate(lines):
        y, of = TOP + ROW * number, process.removeprefix("pool ")
        label = name if process == "controller" else f"{of}, {name}"
        elements.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(label)}</text>')
        elements += [_bar(bar, x(bar.start), y, scale) for bar in drawn if (bar.process, bar.line) == (process, name)]
    return "".join([*elements, "</svg>"])


def _bar(bar: Bar, x: float, y: float, scale: float) -> str:
    width = max(scale * bar.seconds, 0.6)
    color = f"c{ROLES.index(bar.kind)}" if bar.kind in ROLES else "dim"
    more = [f"waited {bar.more['waited']:.3f} s"] if "waited" in bar.more else []
    more += [f"{bar.more[name]:,.0f} {name}" for name in ("bytes there", "bytes back") if name in bar.more]
    about = "; ".join([f"{bar.name}, step {bar.step}: {bar.seconds:.3f} s", *more])
    shown = bar.name if width > LETTER * len(bar.name) + 6 else ""
    text = f'<text class="inbar" x="{x + 4:.1f}" y="{y + 16}">{escape(shown)}</text>' if shown else ""
    rect = f'<rect class="work {color}" x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{ROW - 6}" rx="3">'
    return f"{rect}<title>{escape(about)}</title></rect>{text}"
