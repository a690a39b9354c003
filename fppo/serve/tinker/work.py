"""The worker of training runs: a thread that does their requests, each run's in order, and runs in fair turns.

A run's state is its last saved state, with the later requests in its journal done again. So a request whose arrival was
answered is done, whatever happens to the server.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from fppo._errors import words_of
from fppo.serve.tinker.decode import RefusedVerb, RunVerb
from fppo.serve.tinker.futures import FailedRequest, Futures, Outcome

CREATED = 0  # the number of the request that creates a run


@attrs.define(eq=False)
class RunQueue:
    """The requests of a run that are to be done; `next` is the number of the next one."""

    name: str
    next: int
    todo: dict[int, RunVerb] = attrs.field(factory=dict)
    used: float = 0.0  # seconds of the worker, by which runs have their turns
    waits: float | None = None  # since when a number is missing
    busy: bool = False


class RunActions(Protocol):
    """Protocol of actions on the requests of runs."""

    def do(self, run: str, number: int, verb: RunVerb) -> Outcome: ...

    def joins(self, run: str, verb: RunVerb) -> str | None:
        """The name of what a run's request can be computed in one pass with, if others wait for it, too; None: it is
        done by itself."""
        ...

    def join(self, asked: Sequence[tuple[str, int, RunVerb]]) -> None:
        """Compute requests of several runs in one pass, for `do`, which is called next for each of them."""
        ...

    def done(self, run: str, number: int, seconds: float) -> None:
        """Note that a request is done and its outcome set, after `seconds` of work."""
        ...

    def give_up(self, run: str, numbers: Sequence[int], error: str) -> None:
        """Record on disk that a run's requests of these numbers are not to be done."""
        ...


def request_name(run: str, number: int) -> str:
    """The name of a run's request by its number."""
    return f"{run}:{number}"


class Worker:
    """The thread that works. Of the runs with something to do, the one that has had the least time is next; requests of
    other runs that can be computed in one pass with its own are done with it.

    A run whose next number is missing waits `gap_seconds` for it; then its waiting requests fail. Gaps are looked for
    every `look_seconds`.
    """

    def __init__(
        self,
        actions: RunActions,
        futures: Futures,
        clock: Callable[[], float],
        *,
        gap_seconds: float = 600.0,
        look_seconds: float = 1.0,
    ) -> None:
        self._actions, self._futures, self._clock = actions, futures, clock
        self._gap_seconds, self._look_seconds = gap_seconds, look_seconds
        self._changed = threading.Condition()
        self._runs: dict[str, RunQueue] = {}
        self._floor = 0.0
        self._stopped = False
        self.failure: Exception | None = None  # a fault of the server's own, after which nothing is done
        self._thread = threading.Thread(target=self._work, name="fppo-tinker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the request that is being done."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def add_run(self, name: str, next_number: int) -> None:
        """Add a run, whose next request has this number."""
        with self._changed:
            self._runs.setdefault(name, RunQueue(name, next_number))

    def put(self, run: str, number: int, verb: RunVerb) -> None:
        """Add request `number` of a run, decoded as `verb`."""
        with self._changed:
            queue = self._runs[run]
            if not queue.todo and not queue.busy:
                queue.used = max(queue.used, self._floor)  # idle time is not saved up
            queue.todo[number] = verb
            self._changed.notify_all()

    def knows(self, run: str, number: int) -> bool:
        """Whether a run's request of this number has been done, or waits."""
        with self._changed:
            queue = self._runs[run]
            return number < queue.next or number in queue.todo

    def has_done(self, run: str, number: int) -> bool:
        """Whether a run's request of this number has been done."""
        with self._changed:
            return number < self._runs[run].next

    def idle(self, run: str) -> bool:
        """Whether a run has nothing to do."""
        with self._changed:
            queue = self._runs[run]
            return not queue.todo and not queue.busy

    def _work(self) -> None:
        try:
            self._until_stopped()
        except Exception as error:  # the next server does what waits
            self.failure = error
            text = f"training failed, and nothing more is done: {words_of(error, 500)}; start the server again"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _until_stopped(self) -> None:
        while True:
            with self._changed:
                while (chosen := self._chosen()) is None and not self._stopped:
                    self._changed.wait(timeout=self._look_seconds)
                    if self._late():
                        break
                if self._stopped:
                    return
                late = self._late()
                taken = [] if chosen is None else self._taken(chosen)
            for queue in late:
                self._expire(queue)
            self._do_all(taken)

    def _ready(self) -> list[RunQueue]:
        return [queue for queue in self._runs.values() if queue.next in queue.todo and not queue.busy]

    def _chosen(self) -> RunQueue | None:
        ready = self._ready()
        for queue in ready:
            queue.waits = None
        return min(ready, key=lambda queue: queue.used, default=None)

    def _taken(self, chosen: RunQueue) -> list[tuple[RunQueue, RunVerb]]:
        """The request of the chosen run, and those that are done with it, taken from their queues."""
        kind = self._actions.joins(chosen.name, chosen.todo[chosen.next])
        others = [] if kind is None else [x for x in self._ready() if x is not chosen]
        queues = [chosen, *(x for x in others if self._actions.joins(x.name, x.todo[x.next]) == kind)]
        self._floor = max(self._floor, chosen.used)
        for queue in queues:
            queue.busy = True
        return [(queue, queue.todo.pop(queue.next)) for queue in queues]

    def _do_all(self, taken: Sequence[tuple[RunQueue, RunVerb]]) -> None:
        start = self._clock()
        if len(taken) > 1:
            self._actions.join([(queue.name, queue.next, verb) for queue, verb in taken])
        share = (self._clock() - start) / max(len(taken), 1)
        for queue, verb in taken:
            self._do(queue, verb, share)

    def _do(self, queue: RunQueue, verb: RunVerb, share: float) -> None:
        """Do a request; `share` are the seconds that it has taken in a joint pass."""
        start, number = self._clock() - share, queue.next
        try:
            outcome = self._actions.do(queue.name, number, verb)
        except OSError as full:  # an outcome that is not on disk is not answered: the request is done again later
            text = f"{request_name(queue.name, number)} is tried again: {words_of(full, 500)}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            with self._changed:
                queue.todo[number], queue.busy = verb, False
                self._changed.wait(timeout=0 if self._stopped else self._look_seconds)
            return
        seconds = self._clock() - start
        with self._changed:
            queue.next, queue.used = number + 1, queue.used + seconds
        self._futures.settle(request_name(queue.name, number), outcome)
        self._actions.done(queue.name, number, seconds)
        with self._changed:
            queue.busy = False  # only now may the run be let go of: its state has been saved, if that was due

    def _late(self) -> list[RunQueue]:
        """The runs that have waited too long for the request that is next."""
        now, late = self._clock(), list[RunQueue]()
        for queue in self._runs.values():
            if queue.busy or not queue.todo or queue.next in queue.todo:
                continue
            if queue.waits is None:
                queue.waits = now
            elif now - queue.waits > self._gap_seconds and not all(
                isinstance(verb, RefusedVerb) for verb in queue.todo.values()
            ):
                late.append(queue)
        return late

    def _expire(self, queue: RunQueue) -> None:
        with self._changed:
            waiting = sorted(n for n, verb in queue.todo.items() if not isinstance(verb, RefusedVerb))
            first = queue.next
        error = (
            f"request {first} of {queue.name} did not come within {self._gap_seconds:g} seconds: those behind it fail"
        )
        try:
            self._actions.give_up(queue.name, waiting, error)
        except OSError as full:  # refusals that are not on disk are not answered: they are tried again later
            text = f"{queue.name}: requests were not given up: {words_of(full, 500)}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        with self._changed:
            queue.todo |= {number: RefusedVerb(error=error) for number in waiting}
            queue.waits = None
        for number in waiting:
            self._futures.settle(request_name(queue.name, number), FailedRequest(error))
