"""Loggers of a run's metrics: the console, JSON lines, TensorBoard, W&B, a user's own."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Protocol

from fppo._errors import printable, words_of
from fppo.runs import held_out
from fppo.runs.jsonl import JsonLines
from fppo.runtime.exports import write_whole

METRICS = "metrics.jsonl"
FAILED = "log/failures"  # the metric that counts failed calls of loggers
ALWAYS = ("console", "jsonl")  # loggers of every run


class Logger(Protocol):
    """The protocol of loggers: metrics step by step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of `step`; 0 is the evaluation before the first."""
        ...

    def close(self) -> None:
        """Flush and close; it can be called twice."""
        ...


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

    `first_step` is the first step to be logged: lines of an earlier process from it on are dropped. `settings` go to
    W&B and to users' loggers, which functions in `own` make, by their names. Raises ValueError for an unknown name, and
    for a logger whose package is not installed or that fails to start. Later failures, except of metrics.jsonl, do not
    end the run (`Guarded`).
    """
    run_dir = Path(run_dir)
    makers: dict[str, Callable[[], Logger]] = {
        "console": lambda: console(steps, first_step=first_step),
        "jsonl": lambda: JsonLines(run_dir / METRICS, first_step=first_step),
        "tensorboard": lambda: TensorBoard(run_dir / "tensorboard", first_step=first_step),
        "wandb": lambda: WandB(run_dir, project=project, entity=entity, group=group, settings=settings or {}),
    }
    makers |= {name: partial(own_logger, name, make, run_dir, first_step, settings or {}) for name, make in own.items()}
    unknown = [name for name in names if name not in makers]
    if unknown:
        raise ValueError(f"log.loggers = {list(names)}: unknown logger {unknown[0]!r}; there are {list(makers)}")
    opened: list[Logger] = []
    try:
        for name in dict.fromkeys([*ALWAYS, *names]):
            logger = makers[name]()
            opened.append(logger if isinstance(logger, JsonLines) else Guarded(name, logger))
    except Exception:
        close(opened)
        raise
    return opened


def own_logger(
    name: str, make: Callable[..., Logger], run_dir: Path, first_step: int, settings: Mapping[str, Any]
) -> Logger:
    """The logger that a user's function of that name, "module:function", returns for a run.

    It is called as function(run_dir, first_step=..., settings=...), with the run's directory, the first step to be
    logged, and the settings as nested tables. Raises ValueError for a result without `log` and `close`.
    """
    logger = make(run_dir, first_step=first_step, settings=dict(settings))
    lacks = [method for method in ("log", "close") if not callable(getattr(logger, method, None))]
    if lacks:
        text = f"{name} returned a {type(logger).__name__} without {' and '.join(lacks)}"
        raise ValueError(f"log.loggers: {text}; return an object with log(step, metrics) and close()")
    return logger


def close(loggers: Sequence[Logger]) -> None:
    """Close all loggers."""
    for logger in loggers:
        logger.close()


def observer(loggers: Sequence[Logger]) -> Callable[[Any], None]:
    """An observer for `pipeline.train`: writes a step's metrics to the loggers. The number of failed calls of loggers,
    if any, is added to the metrics."""

    def observe(record: Any) -> None:
        step = record.run.step
        failures = sum(logger.failures for logger in loggers if isinstance(logger, Guarded))
        counted = {FAILED: float(failures)} if failures else {}
        for logger in loggers:
            logger.log(step, record.metrics | counted)

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
    ("tool failed", ("rollout/tool_failures",), lambda x: f"{x:.0f}"),
    ("actor skipped", ("actor/skipped",), lambda x: f"{x:.0%}"),
    ("critic skipped", ("critic/skipped",), lambda x: f"{x:.0%}"),
    ("skipped", ("supervised/skipped",), lambda x: f"{x:.0%}"),
    ("logs failed", (FAILED,), lambda x: f"{x:.0f}"),
)
WIDTH = 80  # columns of a line for pipes and files
IMPORTANT = (  # by priority: the last are dropped first from a full line
    *("reward", "loss", "no score", "tool failed", "actor skipped", "critic skipped", "skipped", "logs failed"),
    *("kl", "turns", "length", "clip", "tok/s", "entropy", "vf loss"),
)
Shown = list[tuple[str, str]]


def summary(metrics: Mapping[str, float]) -> Shown:
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


def held_out_summary(metrics: Mapping[str, float]) -> Shown:
    """(label, number) pairs of an evaluation, from `held_out.shown`, and the number of sources averaged over."""
    shown = [(printable(name, 40), f"{value:.3f}") for name, value in held_out.shown(metrics)]
    count = len(held_out.sources(metrics))
    return [*shown, ("sources", str(count))] if count > 1 else shown


def fitting(shown: Shown, room: int, *, least: int = 0) -> Shown:
    """The pairs that fit into `room` columns, by priority, with numbers at least `least` wide; at least one."""
    kept = list(shown)
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
        from rich.progress import BarColumn, Progress, TextColumn

        self._steps = steps
        self._left = TimeLeft(steps, first_step=first_step, clock=clock)
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[left]}"),
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


def console(steps: int, *, first_step: int = 0) -> Logger:
    """The live console if standard output is a terminal, else one plain line per step."""
    kind = LiveConsole if sys.stdout.isatty() else PlainConsole
    return kind(steps, first_step=first_step)


class TensorBoard:
    """A logger of event files under `directory`; TensorBoard hides earlier events from `first_step` on."""

    def __init__(self, directory: str | os.PathLike[str], *, first_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            text = "tensorboard is not installed; pip install 'fppo[tensorboard]'"
            raise ValueError(f"log.loggers names tensorboard: {text}") from error
        self._writer = SummaryWriter(str(directory), purge_step=first_step if first_step > 0 else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandB:
    """A logger to a run of Weights & Biases, named after the run's directory; a resumed run continues it."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        project: str,
        entity: str | None = None,
        group: str | None = None,
        settings: Mapping[str, Any],
    ) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            text = "wandb is not installed; pip install 'fppo[wandb]'"
            raise ValueError(f"log.loggers names wandb: {text}") from error
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        marker = run_dir / "wandb_id"
        noted = marker.read_text(errors="replace").strip() if marker.exists() else ""
        previous = noted if re.fullmatch(r"[\w.-]+", noted) else None  # None for a damaged id
        try:
            self._run = wandb.init(
                project=project,
                entity=entity,
                group=group,
                name=Path(os.path.realpath(run_dir)).name,
                id=previous,
                dir=str(run_dir),
                config=dict(settings),
                resume="allow" if previous else None,
            )
        except (Exception, SystemExit) as error:
            text = "leave it out, or have it log in or write here (WANDB_MODE=offline)"
            raise ValueError(f"log.loggers names wandb, which does not start: {words_of(error)}; {text}") from error
        write_whole(marker, self._run.id.encode())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Guarded:
    """A logger whose exceptions are caught: the first is printed on standard error, all are counted and their number
    printed at close.

    It is called again at the next step, since networks recover. A broken pipe ends the run, as everywhere.
    """

    def __init__(self, name: str, logger: Logger) -> None:
        self._name, self._logger = name, logger
        self.failures = 0  # calls that have failed

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the metrics of a step."""
        self._try(f"at step {step}", lambda: self._logger.log(step, metrics))

    def close(self) -> None:
        """Close the logger, and print the number of failures if there were several."""
        self._try("at its end", self._logger.close)
        if self.failures > 1:
            print(f"log.loggers: {self._name} has failed {self.failures} times; the run is whole", file=sys.stderr)

    def _try(self, when: str, call: Callable[[], None]) -> None:
        try:
            call()
        except BrokenPipeError:
            raise
        except (Exception, SystemExit) as error:
            self.failures += 1
            if self.failures == 1:
                text = f"log.loggers: {self._name} failed {when}, and the run goes on: {words_of(error)}"
                print(text, file=sys.stderr, flush=True)
