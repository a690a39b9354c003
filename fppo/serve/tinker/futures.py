"""Futures: the results of requests that other threads work on, by names that derive from the requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import attrs

Category = Literal["user", "server"]


@attrs.frozen
class Payload:
    """The result of a request that succeeded, as the body of a response."""

    body: bytes
    proto: bool = False  # protobuf; else JSON

    def __len__(self) -> int:
        return len(self.body)


@attrs.frozen
class FailedRequest:
    """The result of a request that failed; `category` says whose fault that is."""

    error: str
    category: Category = "user"

    def __len__(self) -> int:
        return len(self.error)


Outcome = Payload | FailedRequest


@attrs.define(eq=False)
class _Future:
    owner: str
    opened: float
    size: int
    outcome: Outcome | None = None
    retrieved: float | None = None
    waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = attrs.field(factory=list)

    @property
    def held(self) -> int:
        """The bytes of the outcome."""
        return 0 if self.outcome is None else len(self.outcome)

    @property
    def order(self) -> tuple[bool, float]:
        """The sort key by which outcomes are forgotten to make room: those that were read first, then the earliest."""
        return self.retrieved is None, self.opened if self.retrieved is None else self.retrieved


class PendingRequests(NamedTuple):
    """The requests of an owner without a result: how many there are, and the bytes of what was sent."""

    number: int
    size: int


class FutureState(NamedTuple):
    """The state of a future."""

    outcome: Outcome | None  # None: the request is being worked on, or waits


class Futures:
    """The futures of a server; any thread may call.

    An outcome is forgotten `read_seconds` after it was first read, or `seconds` after it was set, both by `clock`. An
    owner's outcomes take at most `most_bytes`; the newest is always held. To make room, those that were read are
    forgotten before the others, the earliest first. A forgotten or unknown name has no state.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        read_seconds: float = 600.0,
        seconds: float = 24 * 3600.0,
        most_bytes: int = 1 << 30,
    ) -> None:
        self._clock, self._read_seconds, self._seconds = clock, read_seconds, seconds
        self._most_bytes, self._lock = most_bytes, threading.Lock()
        self._held: dict[str, _Future] = {}
        self._sizes: Counter[str] = Counter()  # of outcomes, by owner
        self._pending: dict[str, PendingRequests] = {}

    def open(self, name: str, owner: str, size: int = 0) -> bool:
        """Begin a future of a request of `size` bytes; False if there is one of this name already."""
        with self._lock:
            if name in self._held:
                return False
            future = self._held[name] = _Future(owner, self._clock(), size)
            self._count(future, 1)
            return True

    def _count(self, future: _Future, sign: int) -> None:
        count, size = self.pending(future.owner)
        self._pending[future.owner] = PendingRequests(count + sign, size + sign * future.size)

    def weigh(self, name: str, size: int) -> None:
        """Set the size in bytes of a waiting request, once it is known."""
        with self._lock:
            future = self._held.get(name)
            if future is not None and future.outcome is None:
                self._count(future, -1)
                future.size = size
                self._count(future, 1)

    def settle(self, name: str, outcome: Outcome) -> None:
        """Set an outcome, once, and wake all that wait for it; a name that is not open is ignored."""
        with self._lock:
            future = self._held.get(name)
            if future is None or future.outcome is not None:
                return
            self._count(future, -1)
            future.outcome, future.opened = outcome, self._clock()
            waiting, future.waiting = future.waiting, []
            self._sizes[future.owner] += future.held
            if self._sizes[future.owner] > self._most_bytes:
                self._make_room(future)
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(event.set)

    def _make_room(self, newest: _Future) -> None:
        """Forget an owner's outcomes, those that were read first, until the rest fits."""
        own = [each for each in self._held.items() if each[1].owner == newest.owner and each[1].held]
        own.sort(key=lambda each: each[1].order)
        for name, future in own:
            if self._sizes[newest.owner] > self._most_bytes and future is not newest:
                self._drop(name)

    def _drop(self, name: str) -> None:
        """Forget a future."""
        future = self._held.pop(name)
        self._sizes[future.owner] -= future.held
        if future.outcome is None:
            self._count(future, -1)

    def state(self, name: str, owner: str) -> FutureState | None:
        """The state of a future of this owner's; None if there is none."""
        with self._lock:
            future = self._held.get(name)
            return None if future is None or future.owner != owner else FutureState(future.outcome)

    async def wait(self, name: str, owner: str, seconds: float) -> FutureState | None:
        """The state of a future once it has an outcome, or after `seconds`."""
        with self._lock:
            future = self._held.get(name)
            if future is None or future.owner != owner:
                return None
            if future.outcome is not None:
                return FutureState(future.outcome)
            event = asyncio.Event()
            entry = (asyncio.get_running_loop(), event)
            future.waiting.append(entry)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
        with self._lock:
            if entry in future.waiting:
                future.waiting.remove(entry)
            return FutureState(future.outcome)

    def read(self, name: str) -> None:
        """Note that an outcome is being sent to its owner."""
        with self._lock:
            future = self._held.get(name)
            if future is not None and future.retrieved is None:
                future.retrieved = self._clock()

    def outcomes(self, names: Sequence[str]) -> dict[str, Outcome]:
        """The outcomes that are held under these names."""
        with self._lock:
            held = ((name, self._held.get(name)) for name in names)
            return {name: future.outcome for name, future in held if future is not None and future.outcome is not None}

    def pending(self, owner: str) -> PendingRequests:
        """The requests of an owner without an outcome."""
        return self._pending.get(owner, PendingRequests(0, 0))

    def forget(self, names: Sequence[str]) -> None:
        """Forget futures."""
        with self._lock:
            for name in names:
                if name in self._held:
                    self._drop(name)

    def sweep(self) -> list[str]:
        """Forget the outcomes that have been held long enough; returns their names."""
        with self._lock:
            now = self._clock()
            old = [name for name, future in self._held.items() if self._is_old(future, now)]
            for name in old:
                self._drop(name)
            return old

    def _is_old(self, future: _Future, now: float) -> bool:
        if future.outcome is None:
            return False
        if future.retrieved is not None and now - future.retrieved > self._read_seconds:
            return True
        return now - future.opened > self._seconds


class Completion(NamedTuple):
    """The end of a request, for clients that poll for the ends of many requests."""

    cursor: int
    name: str
    size: int | None  # bytes of the result; None: it failed


class Completions:
    """The ends of requests in their order, by target: a sampling session and a number of a client in it. One event loop
    calls.

    Cursors begin at `first`. A later server must not begin lower, since a client may hold an earlier server's cursor.
    """

    def __init__(self, first: int, *, max_held: int = 1 << 16) -> None:
        self._numbers, self._most = itertools.count(first + 1), max_held
        self._ended: dict[tuple[str, int], list[Completion]] = {}
        self._changed: dict[tuple[str, int], asyncio.Event] = {}

    def add(self, target: tuple[str, int], name: str, outcome: Outcome) -> None:
        """Record that the request `name` of a target has ended with this outcome."""
        size = len(outcome.body) if isinstance(outcome, Payload) else None
        ended = self._ended.setdefault(target, [])
        ended.append(Completion(next(self._numbers), name, size))
        del ended[: -self._most]
        if event := self._changed.pop(target, None):
            event.set()

    async def after(self, target: tuple[str, int], cursor: int, seconds: float) -> tuple[list[Completion], int]:
        """The ends after a cursor, and the cursor after them; wait up to `seconds` for one. Ends up to the cursor are
        forgotten."""
        found = self._behind(target, cursor)
        if not found and seconds > 0:
            event = self._changed.setdefault(target, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await event.wait()
            found = self._behind(target, cursor)
        return found, found[-1].cursor if found else cursor

    def drop(self, session: str) -> None:
        """Forget the ends of a sampling session."""
        for target in [target for target in self._ended if target[0] == session]:
            del self._ended[target]

    def _behind(self, target: tuple[str, int], cursor: int) -> list[Completion]:
        ended = self._ended.get(target)
        if ended is None:
            return []
        ended[:] = [each for each in ended if each.cursor > cursor]
        return [*ended]
