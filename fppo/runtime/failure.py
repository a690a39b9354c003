"""What ranks do when one of them fails: one error is shown, once, and all of them end within seconds."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

import attrs
from torch._C._distributed_c10d import Store

from fppo.runtime.watch import Watch

FAILED = 1  # the exit status of a rank that ends for another's error
_GRACE = 2.0  # seconds in which a rank may end by itself once another has failed


class PeerError(RuntimeError):
    """A collective that failed because of another rank; which, and in what."""


@attrs.frozen(kw_only=True)
class Limits:
    """Seconds: between two looks, that a collective may wait, and that a rank may stay silent."""

    period: float = 0.5
    timeout: float = 600.0
    silence: float = 60.0


def _client(store: Store) -> Store:
    """A connection of its own, so that two threads do not wait for each other."""
    return store.clone()  # type: ignore[attr-defined]


class Monitor:
    """A thread that tells the other ranks, through a store, where this one stands, and sees what becomes of them.

    It ends the process if another rank has failed, if a collective waits longer than `limits.timeout`, if the rank
    after this one is silent for `limits.silence` (each rank looks after one), and if the store is gone, and with it
    who started the ranks. Use it in a `with` statement: an error that leaves it is claimed as the first, or, if there
    was one before, gives way to a quiet end of the process.
    """

    def __init__(self, store: Store, rank: int, world: int, watch: Watch, limits: Limits) -> None:
        self._store, self._rank, self._world, self._watch, self._limits = _client(store), rank, world, watch, limits
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self._publish(0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        waiting = self._watch.waiting
        if isinstance(error, Exception) and waiting is not None:
            time.sleep(_GRACE)  # a collective fails for another rank's sake, which has a word first
        self._ended.set()
        self._thread.join()
        if not isinstance(error, Exception):
            return
        text = str(error) if waiting is None else self._of_waiting(f"failed: {self._watch.error or error}")
        if not self._claim(text):
            raise SystemExit(FAILED) from None
        if waiting is not None:
            raise PeerError(text) from error
        error.add_note(f"on rank {self._rank} of {self._world}")

    def _claim(self, text: str) -> bool:
        """Whether this is the first error of all ranks."""
        mine = json.dumps([self._rank, text])
        return bytes(self._store.compare_set("error", "", mine)).decode() == mine

    def _of_waiting(self, what: str) -> str:
        """What became of the collective that this rank is in, and which ranks are not in it."""
        waiting = self._watch.waiting
        assert waiting is not None
        axis, op, number, _ = waiting
        standing = [self._stand(rank) for rank in range(self._world)]
        behind = [rank for rank, stand in enumerate(standing) if stand is None or stand["calls"].get(axis, 0) < number]
        absent = f"; of all ranks {behind} have not come to it" if behind else ""
        return f"after step {self._watch.step}: {op} over the axis {axis!r} {what}{absent}"

    def _stand(self, rank: int) -> dict[str, Any] | None:
        key = f"stand/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _run(self) -> None:
        beats, seen, since = 0, None, time.monotonic()
        looked_after, limits = (self._rank + 1) % self._world, self._limits
        while not self._ended.wait(limits.period):
            beats += 1
            try:
                self._publish(beats)
                if self._store.check(["error"]):
                    self._give_way()
                stand = self._stand(looked_after)
            except RuntimeError as error:
                if not self._ended.is_set():
                    self._end(f"rank {self._rank}: whoever started the ranks cannot be reached any more ({error})")
                return
            if stand != seen or stand is None:
                seen, since = stand, time.monotonic()
            waiting = self._watch.waiting
            if waiting is not None and time.monotonic() - waiting.since > self._limits.timeout:
                text = self._of_waiting(f"has waited for {self._limits.timeout:g} s")
                self._fail(f"{text}; mesh.timeout is how long it may")
            elif time.monotonic() - since > self._limits.silence:
                self._fail(
                    f"rank {(self._rank + 1) % self._world} has not been heard of for {self._limits.silence:g} s"
                )

    def _publish(self, beats: int) -> None:
        calls = {axis: traffic.calls for axis, traffic in self._watch.traffic().items()}
        self._store.set(f"stand/{self._rank}", json.dumps({"beat": beats, "step": self._watch.step, "calls": calls}))

    def _give_way(self) -> None:
        """Ends the process some time after another rank's error, unless it ends by itself."""
        if json.loads(self._store.get("error"))[0] != self._rank and not self._ended.wait(_GRACE):
            self._end(None)

    def _fail(self, text: str) -> None:
        self._end(f"rank {self._rank}: {text}" if self._claim(text) else None)

    def _end(self, text: str | None) -> None:
        """Ends this process from a thread; the main one may be in a collective that never returns."""
        if text is not None:
            print(f"fppo: {text}", file=sys.stderr, flush=True)
        os._exit(FAILED)
