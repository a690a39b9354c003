"""Clocks for time limits, which do not count the time that a process, or its machine, was suspended."""

from __future__ import annotations

import time


class ProcessClock:
    """A clock of a process's running time: a gap between two readings counts as `max_gap` seconds at most."""

    def __init__(self, max_gap: float) -> None:
        self._most, self._last, self._now = max_gap, time.monotonic(), 0.0

    def now(self) -> float:
        last, self._last = self._last, time.monotonic()
        self._now += min(self._last - last, self._most)
        return self._now


def sleep(seconds: float) -> None:
    """Sleep for `seconds` of running time, in which other processes can run."""
    clock = ProcessClock(0.2)
    while clock.now() < seconds:
        time.sleep(0.1)


class Unchanged:
    """The time since a value last changed."""

    def __init__(self) -> None:
        self._value: object = None
        self._since = 0.0

    def seconds(self, value: object, now: float) -> float:
        """The seconds at `now` since the value became `value`."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since
