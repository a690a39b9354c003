"""Restarts of lost processes, shared by all packages that start processes. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar


class Lost(RuntimeError):
    """Error for processes that are lost, with all that they held. `again`: whether a new start may help."""

    def __init__(self, text: str, *, again: bool = True) -> None:
        super().__init__(text)
        self.again = again


T = TypeVar("T")
L = TypeVar("L", bound=Lost)


class Restarts:
    """A budget of up to `limit` restarts. Threads may share it; each loss uses one, whichever thread meets it."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._lock = threading.Lock()

    def run(self, attempt: Callable[[], T], kind: type[L], restart: Callable[[L], None]) -> T:
        """Call `attempt` until it returns, and return its result.

        After a loss of this `kind`, `restart(loss)` is called, and then `attempt` again. `attempt` decides what work is
        kept, and may start the processes itself. Raises the loss that `use` does not take.
        """
        while True:
            try:
                return attempt()
            except kind as loss:
                self.use(loss)
                restart(loss)

    def use(self, loss: Lost) -> None:
        """Use a restart. Raises the loss if no restart is left, or if a restart cannot help."""
        with self._lock:
            if self.used == self.limit or not loss.again:
                raise loss
            self.used += 1

    def __str__(self) -> str:
        return f"{self.used} of {self.limit} times"
