"""Rows that wait for places. Owners have turns, so that nobody's many rows keep another's few waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from fppo.rollout.rows import OpenRow

Fits = Callable[[OpenRow, Sequence[OpenRow], bool], bool]  # (row, the rows dealt before it, whether it is fresh)


class WaitingRows:
    """Waiting rows by owner: fresh prompts, and rows that come back. Rows that come back hold memory, and go before
    fresh prompts of their owner."""

    def __init__(self) -> None:
        self._coming: dict[str | None, deque[OpenRow]] = {}
        self._fresh: dict[str | None, deque[OpenRow]] = {}
        self._turns: list[str | None] = []  # owners of rows, the next one first

    @property
    def coming(self) -> Iterator[OpenRow]:
        """Rows that come back."""
        return (row for rows in self._coming.values() for row in rows)

    def __iter__(self) -> Iterator[OpenRow]:
        yield from self.coming
        yield from (row for rows in self._fresh.values() for row in rows)

    def __len__(self) -> int:
        return sum(len(rows) for queues in (self._coming, self._fresh) for rows in queues.values())

    def add(self, row: OpenRow, *, fresh: bool) -> None:
        """Put a row behind its owner's other rows, those that are `fresh` or those that come back."""
        self._queue(row, fresh=fresh).append(row)

    def put_back(self, rows: Sequence[OpenRow]) -> None:
        """Put back rows that had places: before the others of their owners, in their order, with their owners first in
        turn."""
        for row in reversed(rows):
            self._queue(row, fresh=False).appendleft(row)
        first = {row.owner: None for row in rows}
        self._turns = [*first, *(owner for owner in self._turns if owner not in first)]

    def remove(self, row: OpenRow) -> bool:
        """Take a row out. Returns whether it was waiting."""
        for queues in (self._coming, self._fresh):
            rows = queues.get(row.owner, ())
            if row in rows:
                queues[row.owner].remove(row)
                self._settle(row.owner)
                return True
        return False

    def deal(self, fits: Fits) -> list[OpenRow]:
        """Take out the rows that begin now: the first row of each owner in turn, as long as `fits` says that they fit.

        If a row does not fit, all rows of its kind (fresh or not) wait, and its owner keeps the turn.
        """
        dealt: list[OpenRow] = []
        blocked: set[bool] = set()
        place = 0
        while place < len(self._turns) and len(blocked) < 2:
            owner = self._turns[place]
            queues = {False: self._coming.get(owner), True: self._fresh.get(owner)}
            found = next(((fresh, rows) for fresh, rows in queues.items() if rows and fresh not in blocked), None)
            if found is None:
                place += 1
                continue
            fresh, rows = found
            if not fits(rows[0], dealt, fresh):
                blocked.add(fresh)
                continue
            dealt.append(rows.popleft())
            self._turns.append(self._turns.pop(place))
            self._settle(owner)
        return dealt

    def _queue(self, row: OpenRow, *, fresh: bool) -> deque[OpenRow]:
        if row.owner not in self._turns:
            self._turns.append(row.owner)
        return (self._fresh if fresh else self._coming).setdefault(row.owner, deque())

    def _settle(self, owner: str | None) -> None:
        """Forget an owner without rows."""
        for queues in (self._coming, self._fresh):
            if owner in queues and not queues[owner]:
                del queues[owner]
        if owner not in self._coming and owner not in self._fresh:
            self._turns.remove(owner)
