"""The thread that decodes: requests join and leave it, and their results go to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

import attrs
from torch import Tensor

from fppo.models.several import Adapter
from fppo.rollout.engine import Engine
from fppo.rollout.generated import opened
from fppo.rollout.requests import AdapterRequests, DrawnTokens, FinishedRequest, QueueFull, Request, Requests
from fppo.serve.refusal import Refusal

Params = Mapping[str, Tensor]
Newer = Callable[[], tuple[Params, int] | None]


class DrawnPart(NamedTuple):
    """The tokens of an answer that a step drew, for a client that streams it."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]


_CLOSE, _LONGEST = 0.002, 0.03  # seconds between requests that are prefilled together, and that one waits at most
Event = DrawnPart | FinishedRequest | Exception
Receive = Callable[[Event], None]


class ServerStopped(RuntimeError):
    """Error of a server that takes no more requests, or that ended while one was being answered."""


def refusal_of(error: BaseException) -> Refusal:
    """The refusal that tells a client of an engine's error."""
    if isinstance(error, QueueFull):
        return Refusal(f"{error}; try again later", status=429, code="queue_full")
    if isinstance(error, ServerStopped):
        return Refusal(str(error), status=503)
    if isinstance(error, ValueError):
        return Refusal(str(error))
    return Refusal(f"the engine failed: {type(error).__name__}", status=500)


@attrs.define(eq=False)
class _Waiting:
    request: Request
    receive: Receive
    home: asyncio.AbstractEventLoop


_Call = _Waiting | Callable[[Requests], None] | None  # None: to end


class EngineLoop:
    """An engine that answers requests in a thread of its own, as long as it is open. Any thread may call.

    At most `most_waiting` requests wait for a place. Those that come within 2 ms of one another are prefilled together,
    and none waits more than 30 ms for others, or for the end of a step. With `newer` it asks for newer weights every
    `every` steps, and whenever a request comes to an idle engine. An error of the engine goes to all open requests and
    to `on_failure`, and stays in `failure`; later requests get `ServerStopped`.
    """

    def __init__(
        self,
        engine: Engine,
        params: Params,
        *,
        version: int = 0,
        most_waiting: int | None = None,
        newer: Newer | None = None,
        every: int = 16,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._engine, self._most, self._newer, self._every = engine, most_waiting, newer, every
        self._on_failure = on_failure
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._held: list[_Call] = []  # calls that wait in the decoding thread until `_due`
        self._due: float | None = None
        self._first = 0.0  # when the first request among them came
        self._waiting: dict[str, _Waiting] = {}
        self._readers: set[str] = set()  # the names of those that are streamed
        self._futures: list[Future[None]] = []
        self._lock = threading.Lock()
        self._stopped = False
        self.failure: Exception | None = None
        self.version = version
        self.limit: int | None = None  # the most tokens of a row
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(params,), name="fppo-engine", daemon=True)

    def start(self) -> EngineLoop:
        """Start the thread; returns once the engine is open. Raises any error of opening it."""
        self._thread.start()
        self._ready.wait()
        if self.failure is not None:
            raise self.failure
        return self

    def submit(self, request: Request, receive: Receive, *, along: bool) -> None:
        """Add a request. In the running event loop, `receive` is called with its end and, with `along`, with its tokens
        as they are drawn.

        Raises ServerStopped. An error of the request itself goes to `receive` as its end.
        """
        waiting = _Waiting(request, receive, asyncio.get_running_loop())
        with self._lock:
            if self._stopped:
                raise ServerStopped("the engine has stopped")
            self._waiting[request.name] = waiting
            if along:
                self._readers.add(request.name)
        self._calls.put(waiting)

    def cancel(self, name: str) -> None:
        """End a request and forget it; `receive` is not called again."""
        with self._lock:
            self._left(name)

        def both(requests: Requests) -> None:
            requests.cancel([name])
            requests.release([name])

        self._calls.put(both)

    def release(self, names: Sequence[str]) -> None:
        """Forget the contexts of requests that have ended."""
        self._calls.put(lambda requests: requests.release(names))

    def put(self, name: str, adapter: Adapter, version: int = 0) -> Future[None]:
        """Give the engine an adapter under a name, between two steps, as `AdapterRequests.put` does.

        The returned future has the errors, with ValueError for an engine that takes no adapters.
        """

        def put(requests: Requests) -> None:
            if not hasattr(requests, "put"):
                raise ValueError("the engine runs no adapters beside its own policy")
            cast(AdapterRequests, requests).put(name, adapter, version)

        return self._called(put)

    def drop(self, name: str) -> Future[None]:
        """Have the engine forget an adapter, as `AdapterRequests.drop` does."""
        return self._called(lambda requests: cast(AdapterRequests, requests).drop(name))

    def _called(self, call: Callable[[Requests], None]) -> Future[None]:
        """Have the thread make a call between two steps; returns the future of its end."""
        result: Future[None] = Future()

        def called(requests: Requests) -> None:
            try:
                result.set_result(call(requests))
            except Exception as error:  # the caller's to handle
                result.set_exception(error)

        with self._lock:
            if self._stopped:
                result.set_exception(ServerStopped("the engine has stopped"))
                return result
            self._futures = [each for each in self._futures if not each.done()] + [result]
        self._calls.put(called)
        return result

    def update(self, params: Params, version: int) -> None:
        """Decode with newer weights, from the next step on."""
        self._calls.put(lambda requests: self._update(requests, params, version))

    def stop(self) -> None:
        """End the thread; open requests get `ServerStopped`. Returns once the engine is closed."""
        with self._lock:
            self._stopped = True
        self._calls.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self, params: Params) -> None:
        try:
            with opened(self._engine, params, version=self.version, most_waiting=self._most) as requests:
                self.limit = requests.limit
                self._ready.set()
                self._answer(requests)
            self._end(ServerStopped("the server is stopping"))
        except Exception as error:  # an engine's own, which all who wait must hear of
            opened_before = self._ready.is_set()
            self.failure = error
            self._end(error)
            if opened_before:  # else `start` raises it
                self._on_failure(error)
        finally:
            self._ready.set()

    def _answer(self, requests: Requests) -> None:
        steps = 0
        while True:
            idle = not requests.counts.open
            if not self._take(requests):
                return
            steps = 0 if idle else steps  # weights may have changed while nothing was open
            if self._newer is not None and steps % self._every == 0:
                fresh = self._newer()
                if fresh is not None and fresh[1] > self.version:
                    self._update(requests, *fresh)
            steps += 1
            self._deliver(requests)

    def _take(self, requests: Requests) -> bool:
        """Make the calls that are due; if no request is open, wait for some. Returns False to end."""
        new: list[_Waiting] = []
        for call in self._gathered(idle=not requests.counts.open):
            if isinstance(call, _Waiting):
                new.append(call)
                continue
            self._add(requests, new)  # those that came together are read together
            new = []
            if call is None:
                return False
            call(requests)
        self._add(requests, new)
        return True

    def _gathered(self, *, idle: bool) -> list[_Call]:
        """The calls that are due, in the order in which they came; `idle`: wait for one. Requests that come shortly
        after one another are added together, since prefilling them one by one would take longer. Other rows continue
        meanwhile; once some calls are due, those that came during the last step join them."""
        while True:
            left = None if self._due is None else self._due - time.monotonic()
            due = left is not None and left <= 0
            try:
                call = self._calls.get(timeout=left) if idle and not due else self._calls.get_nowait()
            except queue.Empty:
                if due:
                    break
                if idle:
                    continue
                return []
            self._held.append(call)
            if isinstance(call, _Waiting):
                now = time.monotonic()
                self._first = now if self._due is None else self._first
                self._due = self._due if due else min(now + _CLOSE, self._first + _LONGEST)
            elif call is None or self._due is None:
                break
        held, self._held, self._due = self._held, [], None
        return held

    def _add(self, requests: Requests, new: Sequence[_Waiting]) -> None:
        with self._lock:
            left = [each for each in new if each.request.name in self._waiting]  # others were cancelled meanwhile
        if not left:
            return
        try:
            requests.add([each.request for each in left])
        except (QueueFull, ValueError) as error:
            if len(left) > 1:  # none was taken: one of them may be to blame
                for each in left:
                    self._add(requests, [each])
                return
            (waiting,) = left
            with self._lock:
                self._left(waiting.request.name)
            _post(waiting.home, [(waiting.receive, error)])

    def _update(self, requests: Requests, params: Params, version: int) -> None:
        requests.update(params, version)
        self.version = version

    def _deliver(self, requests: Requests) -> None:
        drawn, finished = requests.step()
        posts: dict[asyncio.AbstractEventLoop, list[tuple[Receive, Event]]] = {}
        with self._lock:
            events: list[tuple[_Waiting | None, Event]] = []
            if self._readers:
                events += [(self._waiting.get(name), part) for name, part in self._along(drawn)]
            events += [(self._left(answer.name), answer) for answer in finished if answer.end != "cancelled"]
            for waiting, event in events:
                if waiting is not None:
                    posts.setdefault(waiting.home, []).append((waiting.receive, event))
        for home, each in posts.items():
            _post(home, each)

    def _along(self, drawn: DrawnTokens) -> list[tuple[str, DrawnPart]]:
        """The tokens of a step by request, for the requests that are streamed."""
        along: dict[str, tuple[list[int], list[float]]] = {}
        for name, token, log_prob in zip(drawn.names, drawn.tokens, drawn.log_probs, strict=True):
            if name in self._readers:
                tokens, log_probs = along.setdefault(name, ([], []))
                tokens.append(token)
                log_probs.append(log_prob)
        return [(name, DrawnPart(tuple(tokens), tuple(log_probs))) for name, (tokens, log_probs) in along.items()]

    def _left(self, name: str) -> _Waiting | None:
        """Forget a request; returns its entry, or None if nobody waits for it."""
        self._readers.discard(name)
        return self._waiting.pop(name, None)

    def _end(self, error: Exception) -> None:
        with self._lock:
            self._stopped = True
            left, self._waiting, self._readers = self._waiting, {}, set()
            futures, self._futures = self._futures, []
        for result in futures:
            if not result.done():
                result.set_exception(error)
        for waiting in left.values():
            _post(waiting.home, [(waiting.receive, error)])


def _post(home: asyncio.AbstractEventLoop, events: Sequence[tuple[Receive, Any]]) -> None:
    """Call each receiver with its event in the thread of the event loop `home`, unless that loop has ended."""

    def call() -> None:
        for receive, event in events:
            receive(event)

    try:
        home.call_soon_threadsafe(call)
    except RuntimeError:  # it is closed: nobody is there to read
        return
