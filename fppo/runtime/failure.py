"""Failures of ranks: one error is shown, once, and all ranks end within seconds."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from types import TracebackType

import attrs
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from fppo._errors import printable
from fppo.runtime._standing import Standing, broken, too_long
from fppo.runtime.clock import ProcessClock, Unchanged, sleep
from fppo.runtime.watch import WaitingCollective, Watch

MONITOR = "monitor"  # prefix of the monitors' keys in a store
FAILED = 1  # the exit status of a rank that ends because of another's error
_STAND, _AHEAD = "stand", "ahead"  # prefixes of keys: status of ranks, and of their threads that make batches ahead
_GRACE = 2.0  # seconds in which a rank may end by itself once another has failed


def not_done(store: Store, ranks: Iterable[int]) -> list[int]:
    """Select the ranks whose monitors have not finished, by the `store` that the ranks share."""
    kept = PrefixStore(MONITOR, store)
    return [rank for rank in ranks if not kept.check([_done(rank)])]


def _done(rank: int) -> str:
    return f"done/{rank}"


class PeerError(RuntimeError):
    """Raised for a collective that failed because of another rank, which it names."""


@attrs.frozen(kw_only=True)
class Limits:
    """Limits in seconds: the period of checks, the longest wait for a collective, the longest silence of a rank."""

    period: float = 0.5
    timeout: float = 600.0
    silence: float = 60.0


class Monitor:
    """A thread that publishes this rank's status in a store and checks the other ranks'.

    It ends the process if another rank has failed, if a collective waits longer than `limits.timeout`, if the next rank
    is silent for `limits.silence` (each rank checks one), and if the store, and with it the launcher, is gone. Use it
    in a `with` statement: an error in the block is raised if it is the first of all ranks; otherwise the process ends
    quietly.

    `beside` watches another thread of the process, over process groups of its own.

    Each start of the ranks needs keys of its own in the store. Without the store the first error is unknown; then the
    last rank reports, since the first may hold the store.
    """

    def __init__(
        self, store: Store, rank: int, world: int, watch: Watch, limits: Limits, beside: Watch | None = None
    ) -> None:
        self._beside = beside
        self._rank, self._world, self._watch, self._limits = rank, world, watch, limits
        # a second connection, so that two threads do not wait for each other
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._worker = 0  # the id of the working thread
        self._told = False  # whether another rank has failed
        self._mine: bytes | None = None  # this rank's claim, if any

    def __enter__(self) -> Monitor:
        self._worker = threading.get_ident()
        self._publish(0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = self._failed()
        waiting = failed.waiting
        if not isinstance(error, Exception):
            self._stop()
            if error is None:
                with contextlib.suppress(DistError):  # the store ended with the last rank
                    self._store.set(_done(self._rank), "")
            return
        text = str(error) if waiting is None else self._of_broken(failed, waiting, failed.error or error)
        self._stop()
        if self._told or not self._claim(text, alone=waiting is None):
            raise SystemExit(FAILED) from None
        time.sleep(2 * self._limits.period)  # if the store is in this process, the others must have read it
        if waiting is not None:
            raise PeerError(text) from error
        error.add_note(f"on rank {self._rank}{self._place()} of {self._world}")

    def _stop(self) -> None:
        self._ended.set()
        self._thread.join(_GRACE)  # the thread is stuck if the store hangs

    def _claim(self, text: str, *, alone: bool) -> bool:
        """Claim an error; return whether it is the first of all ranks. If the store is gone, the last rank's error
        counts as the first, and so does any error with `alone`: it arose outside collectives, so no other rank reports
        it."""
        mine = json.dumps([self._rank, text])
        self._mine = mine.encode()
        try:
            first = bytes(self._store.compare_set("error", "", mine))
        except DistError:
            return alone or self._rank == self._world - 1
        if first != self._mine:
            self._say_foreign(first)
        return first == self._mine

    def _say_foreign(self, claim: bytes) -> bool:
        """Report the error `claim` in the store if no rank has made it, and return whether this rank has reported it.
        The reporting rank is the one that the claim names, or the first rank if it names none."""
        try:
            rank = json.loads(claim)[0]
        except (ValueError, LookupError, TypeError):
            rank = None
        known = isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < self._world
        if claim == self._mine or self._rank != (rank if known else 0):
            return False
        text = printable(claim.decode(errors="replace"), 400)
        self._say(
            f"rank {self._rank}: the store of the ranks holds an error that none of them has written, {text}: another "
            "program writes to it, and the ranks end"
        )
        return True

    def _say(self, text: str) -> None:
        print(f"fppo: {printable(text, lines=True)}", file=sys.stderr, flush=True)

    def _failed(self) -> Watch:
        """The watch of the failed collective, if any; else this rank's own."""
        other = self._beside
        if self._watch.waiting is None and other is not None and other.error is not None:
            return other
        return self._watch

    def _of_broken(self, watch: Watch, waiting: WaitingCollective, error: object) -> str:
        """Describe a collective that failed in this rank because of another one, naming the ranks that have stopped
        reporting. Waits first, so that the other ranks can claim their error."""
        try:
            before = self._standings(watch)
            sleep(_GRACE)
            after = self._standings(watch)
        except DistError:
            before = after = {}
        gone = [rank for rank, standing in after.items() if standing == before[rank] and rank != self._rank]
        return self._about(watch) + broken(waiting, self._watch.step, error, gone, after)

    def _about(self, watch: Watch) -> str:
        return "" if watch is self._watch else "of the batches that are made ahead, "

    def _place(self) -> str:
        """This rank's coordinates on the axes, as text."""
        return f" ({self._watch.place})" if self._watch.place else ""

    def _standings(self, watch: Watch) -> dict[int, Standing | None]:
        return {rank: self._standing(rank, watch) for rank in range(self._world)}

    def _standing(self, rank: int, watch: Watch | None = None) -> Standing | None:
        key = f"{_STAND if watch in (None, self._watch) else _AHEAD}/{rank}"
        try:
            return Standing.loaded(self._store.get(key)) if self._store.check([key]) else None
        except (ValueError, KeyError, TypeError):  # not written by a rank
            return None

    def _publish(self, beat: int) -> None:
        self._store.set(f"{_STAND}/{self._rank}", Standing.of(self._watch, beat, self._worker).dumped())
        if self._beside is not None:
            self._beside.step = self._watch.step
            standing = Standing.of(self._beside, beat, self._beside.thread or self._worker)
            self._store.set(f"{_AHEAD}/{self._rank}", standing.dumped())

    def _run(self) -> None:
        limits, next_one = self._limits, (self._rank + 1) % self._world
        clock = ProcessClock(4 * limits.period)
        watches = [watch for watch in (self._watch, self._beside) if watch is not None]
        neighbour, awaited = Unchanged(), [Unchanged() for _ in watches]
        beat = 0
        while not self._ended.wait(limits.period):
            beat += 1
            try:
                self._publish(beat)
                if self._store.check(["error"]):
                    self._end_later()
                now = clock.now()
                for watch, unchanged in zip(watches, awaited, strict=True):
                    self._look_at(watch, unchanged, now)
                if neighbour.seconds(self._standing(next_one), now) > limits.silence:
                    self._fail(f"rank {next_one} has not reported for {limits.silence:g} s")
            except DistError as error:
                if not self._ended.wait(_GRACE):
                    lost = f"rank {self._rank}: the launcher of the ranks cannot be reached any more ({error})"
                    self._end(lost if self._rank == self._world - 1 else None)
                return
            except RuntimeError:
                continue  # an error of the GPU: the working thread gets it too, and reports it

    def _look_at(self, watch: Watch, unchanged: Unchanged, now: float) -> None:
        """End the process if a collective has been waited for too long."""
        limit, waiting = self._limits.timeout, watch.oldest() if watch.error is None else None
        if unchanged.seconds(waiting, now) > limit and waiting is not None:
            others = [rank for rank in watch.ranks[waiting.axis] if rank != self._rank]
            said = too_long(waiting, self._watch.step, limit, others, self._standings(watch))
            self._fail(self._about(watch) + said)

    def _end_later(self) -> None:
        """End the process some time after another rank's error, unless it ends by itself."""
        claim = bytes(self._store.get("error"))
        if claim == self._mine:
            return
        self._told = True
        self._say_foreign(claim)
        if not self._ended.wait(_GRACE):
            self._end(None)

    def _fail(self, text: str) -> None:
        first = self._claim(text, alone=False)
        if first:
            self._say(f"rank {self._rank}{self._place()}: {text}")
            time.sleep(2 * self._limits.period)
        self._end(None)

    def _end(self, text: str | None) -> None:
        """End this process from a thread; the main one may be in a collective that never returns."""
        if text is not None:
            self._say(text)
        os._exit(FAILED)
