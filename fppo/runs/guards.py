"""Guards around loggers: no failure ends a run, and no slow service holds it up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import Any, Protocol

import attrs

from fppo._errors import words_of

ROOM, TABLES = 1000, 10  # calls with metrics, and with samples, that wait for a tracker
PATIENCE = 60.0  # seconds that a tracker has for what waits when the run ends
OPENING = 180.0  # seconds that it has to open a run

Rows = Sequence[Mapping[str, Any]]  # samples: text and numbers by column


class NotStarted(ValueError):
    """Raised for a tracker that is installed and does not start."""


class Logger(Protocol):
    """The protocol of loggers: metrics step by step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of `step`; 0 is the evaluation before the first."""
        ...

    def close(self) -> None:
        """Flush and close; it can be called twice."""
        ...


@attrs.frozen(kw_only=True)
class TrackerRun:
    """A run that is open in a tracker, as functions; they are called in one thread, one after the other."""

    log: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]
    log_samples: Callable[[int, Rows], None] | None = None


class Failures:
    """Calls of a logger whose exceptions are caught: the first is printed on standard error, all are counted."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.count = 0  # calls that have failed

    def attempt(self, when: str, call: Callable[[], None], *, ends: tuple[type[BaseException], ...] = ()) -> None:
        """Call a function and catch its errors, except those of the types `ends`. A message says `when` the first
        occurred."""
        try:
            call()
        except ends:
            raise
        except (Exception, SystemExit) as error:
            self.count += 1
            if self.count == 1:
                text = f"log.loggers: {self._name} failed {when}, and the run goes on: {words_of(error)}"
                print(text, file=sys.stderr, flush=True)

    def say(self) -> None:
        """Print the number of failures if there were several."""
        if self.count > 1:
            print(f"log.loggers: {self._name} has failed {self.count} times; the run is whole", file=sys.stderr)


class Guarded:
    """A logger whose failures do not end the run (`Failures`); it is called again at the next step, since networks
    recover. A broken pipe ends the run, as everywhere."""

    def __init__(self, name: str, logger: Logger | TrackerRun) -> None:
        self._logger, self._calls = logger, Failures(name)

    @property
    def failures(self) -> int:
        """Calls that have failed."""
        return self._calls.count

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the metrics of a step."""
        self._calls.attempt(f"at step {step}", lambda: self._logger.log(step, metrics), ends=(BrokenPipeError,))

    def close(self) -> None:
        """Close the logger, and print the number of failures if there were several."""
        self._calls.attempt("at its end", self._logger.close, ends=(BrokenPipeError,))
        self._calls.say()


class Queued:
    """A tracker behind a queue, opened by `make` and called in a thread of its own: `log` and `log_samples` return at
    once.

    Up to `room` steps and the samples of `tables` steps wait in the queue; while it is full, further ones are dropped
    and counted. At close the tracker has `patience` seconds for all that waits; the rest is dropped. Drops and failures
    are printed on standard error, the first of each at once and their number at the end. Raises the errors of `make`,
    and NotStarted if it takes more than `opening` seconds.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], TrackerRun],
        *,
        room: int = ROOM,
        tables: int = TABLES,
        patience: float = PATIENCE,
        opening: float = OPENING,
    ) -> None:
        self._name, self._patience = name, patience
        self._calls: SimpleQueue[tuple[Semaphore, str, Callable[[], None]] | None] = SimpleQueue()
        self._room, self._tables = Semaphore(room), Semaphore(tables)
        self._failures = Failures(name)
        self._closed = False
        self.dropped = 0  # calls that were never made
        opened: Future[TrackerRun] = Future()
        self._thread = Thread(target=self._work, args=(make, opened), name=f"log.loggers: {name}", daemon=True)
        self._thread.start()
        try:
            self._tracker = opened.result(opening)
        except TimeoutError:
            opened.cancel()
            raise NotStarted(f"log.loggers names {name}, which has not started in {opening:g} s") from None

    @property
    def failures(self) -> int:
        """Calls that have failed."""
        return self._failures.count

    @property
    def takes_samples(self) -> bool:
        """Whether the tracker shows samples."""
        return self._tracker.log_samples is not None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the metrics of a step."""
        self._put(self._room, f"at step {step}", partial(self._tracker.log, step, dict(metrics)))

    def log_samples(self, step: int, rows: Callable[[], Rows]) -> None:
        """Hand over the samples of a step; `rows` is called in the thread."""
        show = self._tracker.log_samples
        if show is not None:
            self._put(self._tables, f"with the samples of step {step}", lambda: show(step, rows()))

    def close(self) -> None:
        """Wait until the tracker has all and is closed, or for `patience` seconds; it can be called twice."""
        if self._closed:
            return
        self._closed = True
        self._calls.put(None)
        self._thread.join(self._patience)
        if self._thread.is_alive():
            self.dropped += self._left()
            self._calls.put(None)
            text = f"is still busy {self._patience:g} s after the end of the run, which does not wait for it"
            print(f"log.loggers: {self._name} {text}", file=sys.stderr)
        self._failures.say()
        if self.dropped:
            text = f"lacks {self.dropped} of the steps that it should have got; metrics.jsonl and samples have all"
            print(f"log.loggers: {self._name} {text}", file=sys.stderr)

    def _put(self, room: Semaphore, when: str, call: Callable[[], None]) -> None:
        if room.acquire(blocking=False):
            self._calls.put((room, when, call))
            return
        self.dropped += 1
        if self.dropped == 1:
            text = f"is slower than the run: what comes while its queue is full is dropped, first {when}"
            print(f"log.loggers: {self._name} {text}", file=sys.stderr, flush=True)

    def _left(self) -> int:
        """Empty the queue, and return how many calls it held."""
        count = 0
        while True:
            try:
                count += self._calls.get_nowait() is not None
            except Empty:
                return count

    def _work(self, make: Callable[[], TrackerRun], opened: Future[TrackerRun]) -> None:
        try:
            tracker = make()
        except BaseException as error:
            opened.set_exception(error)
            return
        if not opened.set_running_or_notify_cancel():  # too late: nobody waits any more
            self._failures.attempt("at its end", tracker.close)
            return
        opened.set_result(tracker)
        while (item := self._calls.get()) is not None:
            room, when, call = item
            self._failures.attempt(when, call)
            room.release()
        self._failures.attempt("at its end", tracker.close)
