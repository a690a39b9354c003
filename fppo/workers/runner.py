"""User functions, ready to be called: some in this process, the rest in worker processes with a time limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging import Logger
from typing import NamedTuple, Protocol, Self

from fppo.workers.calls import Mode, Patience
from fppo.workers.pool import WorkerPool
from fppo.workers.sample import Kind, Outcome, Sample, UserFn
from fppo.workers.streams import FAILED, CallsHere, CallStream, CoroutinesHere, PooledCalls, called_here

CALLS, LEAST = 6, 60.0  # late calls, and seconds, that a process may lose on a batch by default, whichever is more


class Function(Protocol):
    """Protocol of a user function for workers: its `name` in messages, the function `fn`, whether it takes one sample,
    a batch or tensors (`kind`), whether it is a coroutine function, and whether it runs in this process (`inline`)."""

    @property
    def name(self) -> str: ...
    @property
    def fn(self) -> UserFn: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def asynchronous(self) -> bool: ...
    @property
    def inline(self) -> bool: ...  # it runs in this process


class WorkerFunction(NamedTuple):
    """A function of samples, as a `Function`."""

    name: str
    fn: UserFn
    asynchronous: bool
    inline: bool
    kind: Kind = "sample"


class FunctionRunner:
    """Functions, ready to be called; close it, or use it in a `with` statement.

    Inline functions run in this process, where nothing stops them. All others run in `workers` processes, which are
    killed and started again when one call takes more than `time_limit` seconds, in Python or C. Once overdue calls on
    one batch have cost `batch_limit` seconds in each process, further calls get a tenth of `time_limit` (at least a
    second), and after as many seconds again no more calls are made. Coroutines run up to `concurrency` at a time.
    Loading the functions may take `start_limit` seconds. A call that fails is made again up to `retries` times. Errors
    call the functions `role`. Several threads may call.
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
        retries: int = 0,
    ) -> None:
        batch_limit = max(LEAST, CALLS * time_limit) if batch_limit is None else batch_limit
        if not (time_limit > 0 and batch_limit > 0) or workers < 1 or concurrency < 1:
            raise ValueError(
                f"time_limit = {time_limit}, batch_limit = {batch_limit}, workers = {workers}, "
                f"concurrency = {concurrency}: all must be above 0"
            )
        self._time_limit, self._batch_limit, self._concurrency = time_limit, batch_limit, concurrency
        self._role, self._retries = role, retries
        self._workers = workers
        outside = [(function.name, function.fn) for function in functions if not function.inline]
        self._numbers = {name: number for number, (name, _) in enumerate(outside)}
        self._pool = None
        if outside:
            self._pool = WorkerPool(outside, workers=workers, start_limit=start_limit, role=role)

    def start(self) -> None:
        """Start the worker processes ahead of the first call, without waiting for them."""
        if self._pool is not None:
            self._pool.start()

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def patience(self) -> Patience:
        """Make a `Patience` for one batch, to share among calls on its parts."""
        return Patience(self._time_limit, self._batch_limit * self._workers)

    @contextmanager
    def stream(self, function: Function, noun: str, log: Logger) -> Iterator[CallStream]:
        """Open a function for calls until the context ends; outcomes can be taken as soon as each is ready. In the end
        failures are logged in one line, which names the samples as `noun`."""
        mode = self._mode(function)
        if self._pool is not None and not function.inline:
            source = PooledCalls(self._pool, self._numbers[function.name], mode, self.patience())
        elif function.asynchronous:
            source = CoroutinesHere(function.fn, mode)
        else:
            source = CallsHere(function.fn, mode)
        calls = CallStream(source, self._retries)
        try:
            yield calls
        finally:
            source.close()
            if calls.failed:
                text = "the %s %r failed on %d of %d %s: %s"
                log.warning(text, self._role, function.name, calls.failed, calls.count, noun, calls.why)

    def logged_outcomes(self, function: Function, samples: Sequence[Sample], noun: str, log: Logger) -> list[Outcome]:
        """Call a function on samples and return their outcomes; failed calls are made again. Remaining failures are
        logged in one line, which names the samples as `noun`."""
        outcomes = self.outcomes_of(function, samples)
        for _ in range(self._retries):
            again = [number for number, outcome in enumerate(outcomes) if outcome.kind in FAILED]
            for number, outcome in zip(again, self.outcomes_of(function, [samples[i] for i in again]), strict=True):
                outcomes[number] = outcome
        failed = [number for number, outcome in enumerate(outcomes) if outcome.kind in FAILED]
        if failed:
            text, first = "the %s %r failed on %d of %d %s; number %d: %s", failed[0]
            log.warning(text, self._role, function.name, len(failed), len(outcomes), noun, first, outcomes[first].text)
        return outcomes

    def outcomes_of(
        self, function: Function, samples: Sequence[Sample], patience: Patience | None = None
    ) -> list[Outcome]:
        """Call a function on samples once, and return their outcomes. Without `patience` the samples are a batch of
        their own."""
        mode = self._mode(function)
        if not samples:
            return []
        if self._pool is not None and not function.inline:
            return self._pool.run(self._numbers[function.name], mode, samples, patience or self.patience())
        return called_here(function.fn, samples, mode)

    def _mode(self, function: Function) -> Mode:
        return Mode(function.kind, function.asynchronous, self._time_limit, self._batch_limit, self._concurrency)
