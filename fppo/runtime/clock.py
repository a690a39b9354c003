"""Time that counts against a limit: what a process was stopped for, or its machine, is nobody's delay."""

from __future__ import annotations

import time


class ProcessClock:
    """Seconds that a process has lived through: those in which it was stopped are no more than `most`."""

    def __init__(self, most: float) -> None:
        self._most, self._last, self._now = most, time.monotonic(), 0.0

    def now(self) -> float:
        last, self._last = self._last, time.monotonic()
        self._now += min(self._last - last, self._most)
        return self._now


def sleep(seconds: float) -> None:
    """Returns when the process has lived through so many seconds, in which others could do something too."""
    clock = ProcessClock(0.2)
    while clock.now() < seconds:
        time.sleep(0.1)


class Unchanged:
    """For how long something has been what it is."""

    def __init__(self) -> None:
        self._value: object = None
        self._since = 0.0

    def seconds(self, value: object, now: float) -> float:
        """How long it has been `value`, as it is at `now`."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since
