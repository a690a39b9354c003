"""Calls of user functions, in which an error costs only its own sample; every process runs this code."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from fppo._errors import is_interrupt, listed, printable, words_of
from fppo.runtime.clock import ProcessClock
from fppo.workers.sample import Kind, Outcome, Sample, UserFn, outcome_of

OnOutcome = Callable[[int, Outcome], None]
_LOOK = 0.5  # seconds between two looks at the clock, at most
_TEXT = 1000  # characters of an error's text that are kept
_SHORTEST = 1.0  # seconds that a call may always take, however long others took, unless its time limit is shorter


class Mode(NamedTuple):
    """How a function is called: on a sample or a batch (`kind`), as a coroutine or not, and within which limits."""

    kind: Kind
    asynchronous: bool
    time_limit: float  # seconds for each coroutine
    batch_limit: float  # see `Patience`; for each of the coroutines that run at a time
    concurrency: int  # coroutines at a time


@attrs.define
class Patience:
    """The time that calls on one batch may take: `time_limit` seconds each, until overdue calls have cost (`lost`)
    `batch_limit` seconds in all. From then on a call may take a tenth of `time_limit`, but at least a second. After
    another `batch_limit` seconds no more calls are made."""

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
        """Count `limit` seconds as lost, and return the outcome of a call that took longer than that."""
        self.lost += limit
        return Outcome("timeout", text=f"no result within {limit:g} s")

    def given_up(self) -> Outcome:
        """The outcome of a sample for which no call is made, since the patience is used up."""
        return Outcome("timeout", text=f"not called: others of its batch have run out of time for {self.lost:g} s")


def call(
    fn: UserFn,
    samples: Sequence[Sample],
    mode: Mode,
    loop: asyncio.Runner,
    on_outcome: OnOutcome,
    on_call: Callable[[], None],
) -> None:
    """Call a function on samples; coroutines run in `loop`. `on_outcome(number, outcome)` is called for each result,
    and `on_call()` before each call of a function that takes a batch."""
    if mode.kind == "batch":
        _batch(fn, samples, 0, loop, on_outcome, on_call)
    elif mode.asynchronous:
        loop.run(_gather(fn, samples, mode, on_outcome))
    else:
        for number, sample in enumerate(samples):
            on_outcome(number, _guarded(lambda sample=sample: outcome_of(_settled(fn(sample), loop)), sample))


def _settled(result: Any, loop: asyncio.Runner) -> Any:
    """Await a function's result in the loop if it is awaitable, and return it."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> tuple[Any, BaseException | None]:
        try:
            return await result, None
        except BaseException as error:  # some errors would end the event loop
            return None, error

    value, error = loop.run(wait())
    if error is not None:
        raise error
    return value


def _guarded(attempt: Callable[[], Outcome], sample: Sample) -> Outcome:
    try:
        return attempt()
    except BaseException as error:
        if is_interrupt(error):
            raise
        return _error(error, sample)


def _error(error: BaseException, sample: Sample) -> Outcome:
    """The outcome of a call that raised, with the error's notes; for a KeyError also the columns of the sample's
    row."""
    frames = traceback.extract_tb(error.__traceback__)
    last = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, KeyError) and sample.prompt_tokens:  # calls of tools and environments have none
        note_columns(error, sample.extras)
    notes = "".join(f"; {printable(note, _TEXT)}" for note in getattr(error, "__notes__", ()))
    return Outcome("error", text=f"{words_of(error, _TEXT)}{printable(last)}{notes}")


def note_columns(error: KeyError, row: Mapping[str, Any]) -> None:
    """Add a note of a row's columns to the error, unless its key is one of the columns, or it has notes already."""
    if not getattr(error, "__notes__", ()) and not (error.args and error.args[0] in row):
        error.add_note(f"the row has the columns {listed(row)}")


def _batch(
    fn: UserFn,
    samples: Sequence[Sample],
    first: int,
    loop: asyncio.Runner,
    on_outcome: OnOutcome,
    on_call: Callable[[], None],
) -> None:
    """Call a function once on all samples; if it raises, call it on each half, until the samples at fault are alone.
    `first` is the number of the first sample."""
    on_call()
    try:
        results = _settled(fn(list(samples)), loop)
    except BaseException as error:
        if is_interrupt(error):
            raise
        if len(samples) == 1:
            on_outcome(first, _error(error, samples[0]))
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
    """Calls of a coroutine function, up to `mode.concurrency` at a time; more may be added meanwhile. Construct it
    inside a running event loop.

    One timer watches the time limits of all calls. Time in which this process was stopped does not count.
    """

    def __init__(self, fn: UserFn, mode: Mode, on_outcome: OnOutcome) -> None:
        self._fn, self._on_outcome = fn, on_outcome
        self._turns = asyncio.Semaphore(mode.concurrency)
        self._patience = Patience(mode.time_limit, mode.batch_limit * mode.concurrency)
        self._loop, self._clock = asyncio.get_running_loop(), ProcessClock(2 * _LOOK)
        self._open: set[asyncio.Task[None]] = set()
        self._ended, self._failed = asyncio.Event(), None  # no call is open, or an error came from outside the function
        self._due: dict[asyncio.Task[None], float] = {}  # deadlines of running calls, by the clock
        self._late: set[asyncio.Task[None]] = set()  # calls that ran past their deadlines
        self._look: asyncio.TimerHandle | None = None  # the next look at the clock
        self._look_at = 0.0

    def add(self, number: int, sample: Sample) -> None:
        """Begin a call when fewer than `mode.concurrency` calls are running."""
        task = self._loop.create_task(self._one(number, sample))
        self._open.add(task)
        task.add_done_callback(self._on_end)

    async def cancel(self) -> None:
        """Cancel all open calls, and wait until they have ended."""
        left = [*self._open]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def done(self) -> None:
        """Wait until no call is open. An error that `on_outcome` raised is raised at once."""
        while self._open and self._failed is None:  # more calls may come meanwhile
            self._ended.clear()
            await self._ended.wait()
        if self._failed is not None:
            raise self._failed

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._late.discard(task)
        if not task.cancelled() and self._failed is None:
            self._failed = task.exception()
        if not self._open or self._failed is not None:
            self._ended.set()

    async def _one(self, number: int, sample: Sample) -> None:
        async with self._turns:
            outcome = self._patience.given_up() if self._patience.used_up else await self._called(sample)
        self._on_outcome(number, outcome)

    async def _called(self, sample: Sample) -> Outcome:
        """The outcome of a call. An overdue call is cancelled, and may then take its time to clean up."""
        limit, task = self._patience.limit, asyncio.current_task()
        assert task is not None
        self._begin(task, limit)
        try:
            outcome = outcome_of(await self._fn(sample))
        except asyncio.CancelledError as error:
            if task.cancelling() and task not in self._late:
                raise
            outcome = _error(error, sample)  # unless the call is late, the function raised this itself
        except BaseException as error:
            if is_interrupt(error):
                raise
            outcome = _error(error, sample)
        finally:
            self._due.pop(task, None)
        return self._patience.overdue(limit) if task in self._late else outcome

    def _begin(self, task: asyncio.Task[None], limit: float) -> None:
        now = self._clock.now()
        self._due[task] = due = now + limit
        if self._look is None or due < self._look_at:
            self._look_after(now, due)

    def _look_after(self, now: float, due: float) -> None:
        if self._look is not None:
            self._look.cancel()
        wait = min(max(due - now, 0.0), _LOOK)
        self._look_at, self._look = now + wait, self._loop.call_later(wait, self._cancel_overdue)

    def _cancel_overdue(self) -> None:
        """Cancel the calls that have passed their deadlines."""
        now, self._look = self._clock.now(), None
        for task in [task for task, due in self._due.items() if due <= now]:
            del self._due[task]
            self._late.add(task)
            task.cancel()
        if self._due:
            self._look_after(now, min(self._due.values()))


async def _gather(fn: UserFn, samples: Sequence[Sample], mode: Mode, on_outcome: OnOutcome) -> None:
    calls = CoroutineCalls(fn, mode, on_outcome)
    for number, sample in enumerate(samples):
        calls.add(number, sample)
    await calls.done()
