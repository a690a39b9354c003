"""User functions, ready to be called: some in this process, the rest in worker processes with a time limit."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from logging import Logger
from typing import Protocol, Self

from fppo.workers.calls import Mode, Patience, call
from fppo.workers.pool import WorkerPool
from fppo.workers.sample import Kind, Outcome, Sample, UserFn

CALLS, LEAST = 6, 60.0  # late calls, and seconds, that a process may lose on a batch by default, whichever is more


class Function(Protocol):
    """A user function and how it is called."""

    @property
    def name(self) -> str: ...
    @property
    def fn(self) -> UserFn: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def asynchronous(self) -> bool: ...
    @property
    def inline(self) -> bool: ...  # in this process


class FunctionRunner:
    """Functions, ready to be called; close it, or use it in a `with` statement.

    Inline functions run in this process, where nothing stops them. All others run in `workers` processes, which are
    killed and started again when one call takes more than `time_limit` seconds, in Python or C. Once calls on one batch
    have run out of time for `batch_limit` seconds in each process, the others have a tenth of that time (a second at
    least), and after as long again they are not made. Coroutines run up to `concurrency` at a time. Loading the
    functions may take `start_limit` seconds. `role` is what errors call them. Several threads may call: the processes
    serve one at a time.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        *,
        role: str,
        time_limit: float,
        batch_limit: float | None = None,
        workers: int,
        concurrency: int,
        start_limit: float,
    ) -> None:
        batch_limit = max(LEAST, CALLS * time_limit) if batch_limit is None else batch_limit
        if not (time_limit > 0 and batch_limit > 0) or workers < 1 or concurrency < 1:
            raise ValueError(
                f"time_limit = {time_limit}, batch_limit = {batch_limit}, workers = {workers}, "
                f"concurrency = {concurrency}: all must be above 0"
            )
        self._time_limit, self._batch_limit, self._concurrency = time_limit, batch_limit, concurrency
        self._role = role
        self._workers = workers
        outside = [(function.name, function.fn) for function in functions if not function.inline]
        self._numbers = {name: number for number, (name, _) in enumerate(outside)}
        self._pool, self._one_at_a_time = None, threading.Lock()
        if outside:
            self._pool = WorkerPool(outside, workers=workers, start_limit=start_limit, role=role)

    def start(self) -> None:
        """Starts the worker processes ahead of the first call, without waiting for them."""
        if self._pool is not None:
            self._pool.start()

    def close(self) -> None:
        """Ends the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def patience(self) -> Patience:
        """A fresh `Patience`: the seconds that processes may lose on one batch in parts."""
        return Patience(self._time_limit, self._batch_limit * self._workers)

    def logged_outcomes(self, function: Function, samples: Sequence[Sample], what: str, log: Logger) -> list[Outcome]:
        """The outcomes of samples, which the log calls `what`; failures among them are logged in one line."""
        outcomes = self.outcomes_of(function, samples)
        failed = [number for number, outcome in enumerate(outcomes) if outcome.kind in ("error", "timeout")]
        if failed:
            text, first = "the %s %r failed on %d of %d %s; number %d: %s", failed[0]
            log.warning(text, self._role, function.name, len(failed), len(outcomes), what, first, outcomes[first].text)
        return outcomes

    def outcomes_of(
        self, function: Function, samples: Sequence[Sample], patience: Patience | None = None
    ) -> list[Outcome]:
        """Call a function on samples and return their outcomes; without `patience` they are a batch of their own."""
        limits = self._time_limit, self._batch_limit, self._concurrency
        mode = Mode(function.kind, function.asynchronous, *limits)
        if not samples:
            return []
        if self._pool is not None and not function.inline:
            with self._one_at_a_time:
                return self._pool.run(self._numbers[function.name], mode, samples, patience or self.patience())
        outcomes: dict[int, Outcome] = {}

        def inline() -> None:
            with asyncio.Runner() as loop:
                call(function.fn, samples, mode, loop, outcomes.__setitem__, _nothing)

        _outside_loops(inline)
        return [outcomes[number] for number in range(len(samples))]


def _outside_loops(fn: Callable[[], None]) -> None:
    """Call a function that runs an event loop: here, or in a thread where one runs here already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        fn()
        return
    with ThreadPoolExecutor(1, "inline calls") as thread:
        thread.submit(contextvars.copy_context().run, fn).result()


def _nothing() -> None:
    pass
