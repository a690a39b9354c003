"""Timeline of a run's last steps: bars for the viewer, and a file for viewers of Chrome traces."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fppo.runs import jsonl
from fppo.runs.observers import TRACE

FILE = "trace.json"
ROLES = ("rollout", "reward", "actor", "reference", "critic")
_ROLE: Mapping[str, str] = MappingProxyType(  # by stage, and by call to a pool
    {"gen": "rollout", "generate": "rollout", "reward": "reward", "old_log_prob": "actor", "update_actor": "actor"}
    | {"ref": "reference", "teacher": "reference", "values": "critic", "update_critic": "critic"}
)
STEP, OTHER = "step", "other"
_LINES = ("step", *ROLES, OTHER)  # the lines of a process, in the order of the page


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
        """The role that the bar's name belongs to."""
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

    Bars of a line that overlap, by the time of a message, are put one after the other: viewers would show nested calls.
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
