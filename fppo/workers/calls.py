"""Calls of user functions with what they raise kept to the sample; the same in every process."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import attrs

from fppo._errors import printable, words_of
from fppo.runtime.clock import ProcessClock
from fppo.workers.sample import Kind, Outcome, Sample, UserFn, outcome_of

T = TypeVar("T")
OnOutcome = Callable[[int, Outcome], None]
_LOOK = 0.5  # seconds between two looks at the clock, at most
_TEXT = 1000  # characters of an error's text that are kept
_SHORTEST = 1.0  # seconds that a call has, however long others took, unless its time limit is less


class Mode(NamedTuple):
    """How a function is called."""

    kind: Kind
    asynchronous: bool
    time_limit: float  # seconds for each coroutine
    batch_limit: float  # see `Patience`, for coroutines that run one at a time
    concurrency: int  # coroutines at a time


@attrs.define
class Patience:
    """How long calls on one batch may take: `time_limit` seconds each, until `batch_limit` seconds in all have gone to
    calls that took longer; then a tenth of it, but a second at least. Once as long again has gone, it is used up."""

    time_limit: float
    batch_limit: float
    lost: float = 0.0

    @property
    def limit(self) -> float:
        """Seconds that the next call may take."""
        if self.lost < self.batch_limit:
            return self.time_limit
        return min(self.time_limit, max(self.time_limit / 10, _SHORTEST))

    @property
    def used_up(self) -> bool:
        """Whether no further call is to be made."""
        return self.lost >= 2 * self.batch_limit

    def overdue(self, limit: float) -> Outcome:
        """The outcome of a sample whose call took longer than `limit`; these seconds are lost."""
        self.lost += limit
        return Outcome("timeout", text=f"no result within {limit:g} s")

    def given_up(self) -> Outcome:
        """The outcome of a sample that is not called any more."""
        return Outcome("timeout", text=f"not called: others of its batch have run out of time for {self.lost:g} s")


def call(
    fn: UserFn,
    samples: Sequence[Sample],
    mode: Mode,
    loop: asyncio.Runner,
    on_outcome: OnOutcome,
    on_call: Callable[[], None],
) -> None:
    """Calls `on_outcome(number, outcome)` for a sample once it is known, `on_call()` before each call of a batch."""
    if mode.kind == "batch":
        _batch(fn, samples, 0, loop, on_outcome, on_call)
    elif mode.asynchronous:
        loop.run(_gather(fn, samples, mode, on_outcome))
    else:
        for number, sample in enumerate(samples):
            on_outcome(number, _guarded(lambda sample=sample: outcome_of(_settled(fn(sample), loop))))


def _settled(result: Any, loop: asyncio.Runner) -> Any:
    """The result of a function, awaited if it is awaitable."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    return loop.run(wait())


def _guarded(attempt: Callable[[], Outcome]) -> Outcome:
    try:
        return attempt()
    except (Exception, SystemExit) as error:
        return _error(error)


def _error(error: BaseException) -> Outcome:
    frames = traceback.extract_tb(error.__traceback__)
    last = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return Outcome("error", text=f"{words_of(error, _TEXT)}{printable(last)}")


def _batch(
    fn: UserFn,
    samples: Sequence[Sample],
    first: int,
    loop: asyncio.Runner,
    on_outcome: OnOutcome,
    on_call: Callable[[], None],
) -> None:
    """One call for all; if it raises, one for each half, until the samples at fault are alone."""
    on_call()
    try:
        results = _settled(fn(list(samples)), loop)
    except (Exception, SystemExit) as error:
        if len(samples) == 1:
            on_outcome(first, _error(error))
            return
        half = len(samples) // 2
        _batch(fn, samples[:half], first, loop, on_outcome, on_call)
        _batch(fn, samples[half:], first + half, loop, on_outcome, on_call)
        return
    for number, outcome in enumerate(_outcomes(results, len(samples))):
        on_outcome(first + number, outcome)


def _outcomes(results: Any, count: int) -> list[Outcome]:
    try:
        listed = [] if isinstance(results, (str, dict)) else list(results)
    except TypeError:
        listed = []
    if len(listed) != count:
        text = f"{len(listed)} results" if isinstance(results, (list, tuple)) else f"a {type(results).__name__}"
        one_each = "a function of a batch must return a list of one result for each sample, in their order"
        return [Outcome("bad", text=f"{text} for {count} samples; {one_each}")] * count
    return [outcome_of(result) for result in listed]


class CoroutineCalls:
    """Calls of a coroutine, `mode.concurrency` at a time; others may come while some are under way. Make it inside of a
    running loop."""

    def __init__(self, fn: UserFn, mode: Mode, on_outcome: OnOutcome) -> None:
        self._fn, self._on_outcome = fn, on_outcome
        self._turns = asyncio.Semaphore(mode.concurrency)
        self._patience = Patience(mode.time_limit, mode.batch_limit * mode.concurrency)
        self._open: set[asyncio.Task[None]] = set()

    def add(self, number: int, sample: Sample) -> None:
        """Begins a call as soon as it is its turn."""
        task = asyncio.ensure_future(self._one(number, sample))
        self._open.add(task)

    async def cancel(self) -> None:
        """Ends the calls that are open."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def done(self) -> None:
        """Waits until no call is open."""
        while self._open:
            ended, _ = await asyncio.wait({*self._open}, return_when=asyncio.FIRST_COMPLETED)
            self._open -= ended  # others may have come meanwhile
            for task in ended:
                task.result()

    async def _one(self, number: int, sample: Sample) -> None:
        patience = self._patience
        async with self._turns:
            limit, given_up = patience.limit, patience.used_up
            found = None if given_up else await _within(_outcome(self._fn, sample), limit)
            if found is None:
                found = patience.given_up() if given_up else patience.overdue(limit)
        self._on_outcome(number, found)


async def _outcome(fn: UserFn, sample: Sample) -> Outcome:
    """The outcome of a coroutine, with what it raises kept to it: a task would hand an exit on to the event loop."""
    try:
        return outcome_of(await fn(sample))
    except (Exception, SystemExit) as error:
        return _error(error)


async def _gather(fn: UserFn, samples: Sequence[Sample], mode: Mode, on_outcome: OnOutcome) -> None:
    calls = CoroutineCalls(fn, mode, on_outcome)
    for number, sample in enumerate(samples):
        calls.add(number, sample)
    await calls.done()


async def _within(waited: Awaitable[T], limit: float) -> T | None:
    """The result of the awaitable; None after `limit` seconds in which this process was not stopped."""
    task, clock = asyncio.ensure_future(waited), ProcessClock(2 * _LOOK)
    try:
        while not task.done() and (left := limit - clock.now()) > 0:
            await asyncio.wait([task], timeout=min(left, _LOOK))
    finally:
        late = task.cancel()
    if late:
        await asyncio.gather(task, return_exceptions=True)  # what it does at its end
    return None if late else task.result()
