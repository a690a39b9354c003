"""Loggers of a run's metrics: the console, JSON lines, trackers, a user's own."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import attrs

from fppo._errors import printable, words_of
from fppo.pipeline.train import StepRecord
from fppo.runs import held_out, samples
from fppo.runs.alarms import Alarms
from fppo.runs.guards import Guarded, Logger, NotStarted, Queued, Rows, TrackerRun
from fppo.runs.jsonl import JsonLines
from fppo.runs.trackers import TRACKERS, Tracked, start

METRICS = "metrics.jsonl"
FAILED = "log/failures"  # the metric that counts failed calls of loggers
DROPPED = "log/dropped"  # and the calls that were never made, for want of room in a queue
ALWAYS = ("console", "jsonl")  # loggers of every run


def open_loggers(
    names: Sequence[str],
    run_dir: str | os.PathLike[str],
    *,
    steps: int,
    first_step: int = 0,
    project: str = "fppo",
    entity: str | None = None,
    group: str | None = None,
    settings: Mapping[str, Any] | None = None,
    own: Mapping[str, Callable[..., Logger]] = MappingProxyType({}),
) -> list[Logger]:
    """Open the console, metrics.jsonl, and then the loggers called `names`, for a run of `steps` steps.

    `first_step` is the first step to be logged: lines of an earlier process from it on are dropped. Trackers get
    `project`, `entity` and `group`, as far as they have them, and `settings`. `own` are functions that make users'
    loggers, by name. Raises ValueError for an unknown name, for a logger whose package is not installed and, at the
    first start of a run, for a logger that fails to start; a resumed run prints a line and continues without that
    logger. Later failures, except of metrics.jsonl, do not end the run, and slow trackers do not hold it up (`guards`).
    """
    run_dir = Path(run_dir)
    known = [*ALWAYS, *TRACKERS, *own]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"log.loggers = {list(names)}: unknown logger {unknown[0]!r}; there are {known}")
    run = Tracked(
        run_dir=run_dir,
        first_step=first_step,
        project=project,
        entity=entity,
        group=group,
        settings=settings or {},
    )
    opened: list[Logger] = []
    try:
        opened.append(Guarded("console", console(steps, first_step=first_step)))
        opened.append(JsonLines(run_dir / METRICS, first_step=first_step))
        for name in dict.fromkeys(name for name in names if name not in ALWAYS):
            if (tracker := _tracker(name, run, own)) is not None:
                opened.append(tracker)
    except Exception:
        close(opened)
        raise
    return opened


def _tracker(name: str, run: Tracked, own: Mapping[str, Callable[..., Logger]]) -> Queued | None:
    """A tracker, started. If it fails to start, a new run raises NotStarted, and a resumed one prints a line and gets
    None."""
    make = partial(own_logger, name, own[name], run) if name in own else partial(start, name, run)
    try:
        return Queued(name, make)
    except NotStarted as error:
        if run.first_step == 0:
            raise
        print(f"{printable(str(error))}; the run goes on without it", file=sys.stderr)
    return None


def own_logger(name: str, make: Callable[..., Logger], run: Tracked) -> TrackerRun:
    """The tracker that a user's function of that name, "module:function", returns for a run.

    It is called as function(run_dir, first_step=..., settings=...), with the run's directory, the first step to be
    logged, and the settings as nested tables. The result has `log(step, metrics)` and `close()`, and
    `log_samples(step, rows)` if it shows samples. Raises ValueError for a result without `log` and `close`, and
    NotStarted if the function fails.
    """
    try:
        logger = make(run.run_dir, first_step=run.first_step, settings=dict(run.settings))
    except (Exception, SystemExit) as error:
        raise NotStarted(f"log.loggers names {name}, which does not start: {words_of(error)}") from error
    lacks = [method for method in ("log", "close") if not callable(getattr(logger, method, None))]
    if lacks:
        text = f"{name} returned a {type(logger).__name__} without {' and '.join(lacks)}"
        raise ValueError(f"log.loggers: {text}; return an object with log(step, metrics) and close()")
    shows: Callable[[int, Rows], None] | None = getattr(logger, "log_samples", None)
    return TrackerRun(log=logger.log, close=logger.close, log_samples=shows)


def close(loggers: Sequence[Logger]) -> None:
    """Close all loggers."""
    for logger in loggers:
        logger.close()


@attrs.frozen(kw_only=True)
class Tables:
    """Samples for trackers: `rows` of each `every`th step, and of the first, spread evenly over its batch."""

    rows: int  # 0: none
    every: int
    tokenizer: Any

    def of(self, record: StepRecord) -> Callable[[], Rows] | None:
        """A function that makes the rows of a step, and may be called in other threads; None if it is not shown."""
        step, experience = record.run.step, record.experience
        if experience is None or not self.rows or (step > 1 and step % self.every):
            return None
        on_host = samples.on_host(samples.spread(experience, self.rows))
        return cache(partial(samples.shown, on_host, self.tokenizer, step))


def observer(
    loggers: Sequence[Logger], tables: Tables | None = None, alarms: Alarms | None = None
) -> Callable[[StepRecord], None]:
    """An observer for `pipeline.train`: hands a step's metrics to the loggers, and samples to trackers that show them.

    The numbers of failed and of dropped calls of loggers, if any, are added to the metrics. Trackers also get a 1 for
    each of the `alarms` that rings at the step.
    """

    def observe(record: StepRecord) -> None:
        step = record.run.step
        failures = sum(logger.failures for logger in loggers if isinstance(logger, Guarded | Queued))
        dropped = sum(logger.dropped for logger in loggers if isinstance(logger, Queued))
        counted = {name: float(count) for name, count in ((FAILED, failures), (DROPPED, dropped)) if count}
        rung = {f"alarm/{each.alarm}": 1.0 for each in alarms(record)} if alarms else {}
        for logger in loggers:
            logger.log(step, record.metrics | counted | (rung if isinstance(logger, Queued) else {}))
        shows = [logger for logger in loggers if isinstance(logger, Queued) and logger.takes_samples]
        if tables is not None and shows and (rows := tables.of(record)) is not None:
            for logger in shows:
                logger.log_samples(step, rows)

    return observe


# the console: a label, its metrics (the first that was logged counts), and the number's format
Line = tuple[str, tuple[str, ...], Callable[[float], str]]
LINES: tuple[Line, ...] = (
    ("reward", ("critic/score/mean", "critic/rewards/mean"), lambda x: f"{x:.3f}"),
    ("loss", ("supervised/nll_loss",), lambda x: f"{x:.4f}"),
    ("kl", ("actor/reward_kl_penalty", "actor/ppo_kl"), lambda x: f"{x:.4f}"),
    ("entropy", ("actor/entropy",), lambda x: f"{x:.3f}"),
    ("clip", ("actor/pg_clipfrac",), lambda x: f"{x:.1%}"),
    ("vf loss", ("critic/vf_loss",), lambda x: f"{x:.4f}"),
    ("length", ("response_length/mean",), lambda x: f"{x:.1f}"),
    ("turns", ("rollout/turns/mean",), lambda x: f"{x:.1f}"),
    ("tok/s", ("perf/throughput",), lambda x: f"{x:,.0f}"),
)


# failures of a step, shown if not 0: responses without a score, skipped shares of the updates
FAILURES: tuple[Line, ...] = (
    ("no score", ("reward/errors", "reward/timeouts", "reward/judge_unparsed"), lambda x: f"{x:.0f}"),
    ("reward cut", ("reward/model_truncated",), lambda x: f"{x:.0f}"),
    ("tool failed", ("rollout/tool_failures",), lambda x: f"{x:.0f}"),
    ("actor skipped", ("actor/skipped",), lambda x: f"{x:.0%}"),
    ("critic skipped", ("critic/skipped",), lambda x: f"{x:.0%}"),
    ("skipped", ("supervised/skipped",), lambda x: f"{x:.0%}"),
    ("logs failed", (FAILED,), lambda x: f"{x:.0f}"),
    ("logs dropped", (DROPPED,), lambda x: f"{x:.0f}"),
)
WIDTH = 80  # columns of a line for pipes and files
IMPORTANT = (  # by priority: the last are dropped first from a full line
    *(
        "reward",
        "loss",
        "no score",
        "reward cut",
        "tool failed",
        "actor skipped",
        "critic skipped",
        "skipped",
        "logs failed",
        "logs dropped",
    ),
    *("kl", "turns", "length", "clip", "tok/s", "entropy", "vf loss"),
)
Pairs = list[tuple[str, str]]


def summary(metrics: Mapping[str, float]) -> Pairs:
    """(label, number) pairs of a step for the console; metrics that were not logged are left out."""
    shown = []
    for label, names, write in LINES:
        values = [metrics[name] for name in names if metrics.get(name) is not None]
        if values:
            shown.append((label, write(values[0])))
    for label, names, write in FAILURES:
        if total := sum(metrics.get(name) or 0.0 for name in names):
            shown.append((label, write(total)))
    return shown


def held_out_summary(metrics: Mapping[str, float]) -> Pairs:
    """(label, number) pairs of an evaluation, from `held_out.shown`, and the number of sources averaged over."""
    shown = [(printable(name, 40), f"{value:.3f}") for name, value in held_out.shown(metrics)]
    count = len(held_out.sources(metrics))
    return [*shown, ("sources", str(count))] if count > 1 else shown


def fitting(pairs: Pairs, room: int, *, least: int = 0) -> Pairs:
    """The pairs that fit into `room` columns, the most important first kept; numbers count as at least `least` columns
    wide. At least one pair is kept."""
    kept = list(pairs)
    ranks = {label: place for place, label in enumerate(IMPORTANT)}
    while len(kept) > 1 and sum(len(label) + max(len(number), least) + 3 for label, number in kept) > room:
        worst = max(range(len(kept)), key=lambda i: (ranks.get(kept[i][0], len(ranks)), i))
        del kept[worst]
    return kept


class TimeLeft:
    """Estimate the seconds until the last step from the pace of recent steps, with the time between them (saving)."""

    def __init__(
        self, steps: int, *, first_step: int = 0, clock: Callable[[], float] = time.monotonic, window: int = 20
    ) -> None:
        self._steps = steps
        self._clock = clock
        self._times: deque[tuple[int, float]] = deque(maxlen=window + 1)
        self._times.append((max(first_step - 1, 0), clock()))

    def at(self, step: int) -> float | None:
        """The estimate now that `step` is done; None before a first step."""
        if self._times[-1][0] == step:  # the evaluation before the first step does not count
            self._times.pop()
        self._times.append((step, self._clock()))
        (first, start), (last, end) = self._times[0], self._times[-1]
        return None if last == first else (self._steps - last) * (end - start) / (last - first)


def duration(seconds: float) -> str:
    """Seconds as text: 0:07, 12:30 or 1:02:03."""
    whole = max(round(seconds), 0)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class PlainConsole:
    """One line per step, for pipes and files."""

    def __init__(
        self,
        steps: int,
        *,
        first_step: int = 0,
        file: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._file = sys.stdout if file is None else file
        self._left = TimeLeft(steps, first_step=first_step, clock=clock)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line, and one for its evaluation."""
        left = self._left.at(step)
        head = f"step {step:>{len(str(self._steps))}}/{self._steps}"
        tail = [] if left is None else [f"left {duration(left)}"]
        room = WIDTH - len(head) - sum(len(word) + 2 for word in tail)
        if step_numbers := fitting(summary(metrics), room):
            words = [head, *(f"{label} {number}" for label, number in step_numbers), *tail]
            print("  ".join(words), file=self._file, flush=True)
        if held_out_numbers := fitting(held_out_summary(metrics), WIDTH - len(head) - 10):
            words = [head, "held out", *(f"{label} {number}" for label, number in held_out_numbers)]
            print("  ".join(words), file=self._file, flush=True)

    def close(self) -> None:
        """Do nothing: every line was flushed."""


class LiveConsole:
    """A progress bar below one line per step, for terminals."""

    def __init__(self, steps: int, *, first_step: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._steps = steps
        self._left = TimeLeft(steps, first_step=first_step, clock=clock)
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[left]}"),
            console=Console(),  # not the process-wide one, which keeps its first width
            transient=True,
        )
        self._task = self._progress.add_task("", total=steps, completed=max(first_step - 1, 0), left="")
        self._progress.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line, and one for its evaluation, above the bar, and advance it."""
        from rich.markup import escape

        left = self._left.at(step)
        head, console = f"{step:>{len(str(self._steps))}}", self._progress.console
        for about, shown in (("", summary(metrics)), ("held out  ", held_out_summary(metrics))):
            room = console.width - len(head) - len(about)
            pairs = fitting(shown, room, least=6)
            numbers = "  ".join(f"[dim]{escape(label)}[/] [bold]{number:>6}[/]" for label, number in pairs)
            if pairs:
                console.print(f"[cyan]{head}[/]  {about}{numbers}", highlight=False)
        remaining = "" if left is None else f"{duration(left)} left"
        self._progress.update(self._task, completed=step, left=remaining)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()


class NotebookConsole:
    """A progress bar above one line per step, for notebooks."""

    def __init__(self, steps: int, *, first_step: int = 0) -> None:
        from IPython.display import ProgressBar

        self._lines, self._bar = PlainConsole(steps, first_step=first_step), ProgressBar(steps)
        self._bar.display()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line, and advance the bar."""
        self._lines.log(step, metrics)
        self._bar.progress = step

    def close(self) -> None:
        """Do nothing: the bar stays, where it stands."""


def in_notebook() -> bool:
    """True if a notebook shows what this process prints."""
    from rich.console import Console

    return "IPython" in sys.modules and Console().is_jupyter


def console(steps: int, *, first_step: int = 0) -> Logger:
    """The console of a terminal or a notebook, with a progress bar, else one plain line per step."""
    kind = LiveConsole if sys.stdout.isatty() else NotebookConsole if in_notebook() else PlainConsole
    return kind(steps, first_step=first_step)
