"""Calls of user functions whose outcomes can be taken one by one, while the caller does something else."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from fppo.workers.calls import CoroutineCalls, Mode, Patience, call
from fppo.workers.pool import WorkerPool
from fppo.workers.sample import Outcome, Sample, UserFn

FAILED = ("error", "timeout")  # kinds of outcomes


class CallSource(Protocol):
    """Protocol of calls in progress, numbered by the caller."""

    def put(self, number: int, sample: Sample) -> None:
        """Add a call of the function with a sample, under a number that no open call has."""
        ...

    def taken(self, *, wait: bool) -> Mapping[int, Outcome]:
        """Take the outcomes that have come, by number; with `wait`, wait for at least one if any call is open."""
        ...

    def close(self) -> None: ...


class CallStream:
    """Calls in progress, numbered by the caller; a call that fails is made again up to `retries` times."""

    def __init__(self, source: CallSource, retries: int) -> None:
        self._source, self._retries = source, retries
        self._open: dict[int, tuple[Sample, int]] = {}  # the sample, and the retries left
        self.count = self.failed = 0  # the numbers of calls, and of calls that failed in the end
        self.why = ""  # why the first call failed

    def put(self, number: int, sample: Sample) -> None:
        """Begin a call, or queue it for a free process, under a number that no open call has."""
        self.count += 1
        self._open[number] = sample, self._retries
        self._source.put(number, sample)

    def taken(self, *, wait: bool) -> list[tuple[int, Outcome]]:
        """Take the outcomes that have come; with `wait`, wait for at least one if any call is open."""
        outcomes: list[tuple[int, Outcome]] = []
        while True:
            for number, outcome in self._source.taken(wait=wait and bool(self._open)).items():
                sample, left = self._open.pop(number)
                if outcome.kind in FAILED and left:
                    self._open[number] = sample, left - 1
                    self._source.put(number, sample)
                    continue
                if outcome.kind in FAILED:
                    self.why = self.why or outcome.text
                    self.failed += 1
                outcomes.append((number, outcome))
            if outcomes or not (wait and self._open):
                return outcomes


class PooledCalls:
    """Calls in the processes of a pool."""

    def __init__(self, pool: WorkerPool, function: int, mode: Mode, patience: Patience) -> None:
        self._pool, self._run = pool, pool.begin(function, mode, patience)

    def put(self, number: int, sample: Sample) -> None:
        """Begin or queue a call in the pool, under a number that no open call has."""
        self._run.put(number, sample)

    def taken(self, *, wait: bool) -> Mapping[int, Outcome]:
        """Take out the outcomes that have come, by the numbers of the calls; with `wait`, wait for at least one."""
        return self._pool.taken(self._run, wait=wait)

    def close(self) -> None:
        """End calls that are still open."""
        self._pool.forget(self._run)


class CallsHere:
    """Calls of a function in this thread, made when their outcomes are taken."""

    def __init__(self, fn: UserFn, mode: Mode) -> None:
        self._fn, self._mode = fn, mode
        self._new: dict[int, Sample] = {}

    def put(self, number: int, sample: Sample) -> None:
        """Note a call, which `taken` makes, under a number that no open call has."""
        self._new[number] = sample

    def taken(self, *, wait: bool) -> Mapping[int, Outcome]:
        """Make all calls noted since the last time, and return their outcomes by number. `wait` does not matter."""
        del wait
        new, self._new = self._new, {}
        return dict(zip(new, called_here(self._fn, [*new.values()], self._mode), strict=True)) if new else {}

    def close(self) -> None:
        """Do nothing, since no call is ever in progress."""


class CoroutinesHere:
    """Calls of a coroutine function, in an event loop on a thread of this process."""

    def __init__(self, fn: UserFn, mode: Mode) -> None:
        self._outcomes: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self._loop, self._open = asyncio.new_event_loop(), 0
        self._new: list[tuple[int, Sample]] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True)
        self._thread.start()
        made = asyncio.run_coroutine_threadsafe(self._made(fn, mode), self._loop)
        self._calls = made.result()

    async def _made(self, fn: UserFn, mode: Mode) -> CoroutineCalls:
        return CoroutineCalls(fn, mode, lambda number, outcome: self._outcomes.put((number, outcome)))

    def put(self, number: int, sample: Sample) -> None:
        """Note a call, which the next `taken` starts, under a number that no open call has."""
        self._open += 1
        self._new.append((number, sample))

    def _add(self, new: Sequence[tuple[int, Sample]]) -> None:
        for number, sample in new:
            self._calls.add(number, sample)

    def taken(self, *, wait: bool) -> Mapping[int, Outcome]:
        """Start the calls noted, and take out the outcomes that have come, by number; with `wait`, wait for at least
        one if any call is open."""
        found: dict[int, Outcome] = {}
        if self._new:
            new, self._new = self._new, []
            self._loop.call_soon_threadsafe(self._add, new)  # in one go, since each wakes the thread
        while self._open:
            try:
                number, outcome = self._outcomes.get(block=wait and not found)
            except queue.Empty:
                break
            found[number] = outcome
            self._open -= 1
        return found

    def close(self) -> None:
        """End the open calls, and the thread."""
        asyncio.run_coroutine_threadsafe(self._calls.cancel(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def called_here(fn: UserFn, samples: Sequence[Sample], mode: Mode) -> list[Outcome]:
    """Call a function on samples in this process, and return their outcomes."""
    outcomes: dict[int, Outcome] = {}

    def inline() -> None:
        with asyncio.Runner() as loop:
            call(fn, samples, mode, loop, outcomes.__setitem__, _nothing)

    _outside_loops(inline)
    return [outcomes[number] for number in range(len(samples))]


def _outside_loops(fn: Callable[[], None]) -> None:
    """Call a function that runs an event loop of its own. If this thread runs an event loop already, as in a notebook,
    the function is called in another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        fn()
        return
    with ThreadPoolExecutor(1, "inline calls") as thread:
        thread.submit(contextvars.copy_context().run, fn).result()


def _nothing() -> None:
    pass
