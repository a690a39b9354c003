"""A lock that threads get in the order in which they ask."""

from __future__ import annotations

import threading
from collections import deque


class InOrder:
    """A lock for one thread at a time, first come, first served, even if a thread asks again at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._there: deque[object] = deque()  # the first holds the lock

    def __enter__(self) -> None:
        own = object()
        with self._changed:
            self._there.append(own)
            try:
                self._changed.wait_for(lambda: self._there[0] is own)
            except BaseException:  # an interrupt from the keyboard: nobody is to wait for this thread
                self._there.remove(own)
                self._changed.notify_all()
                raise

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._there.popleft()
            self._changed.notify_all()
