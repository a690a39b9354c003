"""Drafts of the next tokens of rows, which one pass checks: speculative decoding without a draft model.

A token is drawn by a uniform number of its own, so a draft is checked by drawing. One pass over the k drafted tokens of
a row gives k + 1 distributions, and each is drawn from with the number of its position. Drawn tokens are kept up to the
first that differs from the draft, which is the right one in its place. So drafts change neither tokens nor log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import attrs

from fppo.rollout.requests import DraftCounts
from fppo.rollout.rows import OpenRow

# drafts (row, ids, most): up to `most` tokens that may follow a row's `ids` so far, a list that grows between calls
Draft = Callable[[int, Sequence[int], int], Sequence[int]]
# makes the drafts of rows with one prompt
Drafter = Callable[[], Draft]

_LONGEST, _SHORTEST = 4, 2  # tokens of the n-grams that are looked up
_PAUSE = 64  # the most steps in which a row has no draft, after drafts that failed


def text_drafts() -> Draft:
    """Drafts from the texts of one prompt's rows: what followed the last occurrence of a row's last four tokens in any
    of these texts, else of its last three, else of two."""
    after: dict[tuple[int, ...], tuple[Sequence[int], int]] = {}  # n-gram: a text, and the place behind the n-gram
    indexed: dict[int, int] = {}  # by row, how many of its tokens are in `after`
    texts: list[Sequence[int]] = []

    def draft(row: int, ids: Sequence[int], most: int) -> Sequence[int]:
        if row not in indexed:
            indexed[row] = _shared(ids, texts[0]) if texts else 0
            texts.append(ids)
        for place in range(indexed[row], len(ids)):
            for size in range(_SHORTEST, min(_LONGEST, place) + 1):
                after[tuple(ids[place - size : place])] = ids, place
        indexed[row] = len(ids)
        for size in range(min(_LONGEST, len(ids)), _SHORTEST - 1, -1):
            found = after.get(tuple(ids[-size:]))
            if found is not None:
                text, place = found
                own = text[place : place + most]
                # a text that repeats itself goes on as it did
                return [own[number % len(own)] for number in range(most)] if text is ids else own
        return ()

    return draft


def _shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ids), len(others)))


@attrs.define
class DraftLength:
    """The length of a row's next draft, by what became of the earlier ones: twice the last one if all of it was kept,
    else what was kept of it. After drafts of which nothing was kept, the row pauses for 1, 2, 4, ... steps."""

    most: int
    size: int = attrs.field(init=False)
    rest: int = attrs.field(default=0, init=False)  # steps of the pause that are left
    pause: int = attrs.field(default=1, init=False)

    def __attrs_post_init__(self) -> None:
        self.size = min(2, self.most)

    def next(self) -> int:
        """The length in this step."""
        if self.rest:
            self.rest -= 1
            return 0
        return self.size

    def learn(self, drafted: int, accepted: int) -> None:
        """Take in how many tokens were drafted and accepted."""
        if accepted:
            self.size = min(self.most, 2 * self.size) if accepted == drafted else accepted
            self.pause = 1
        else:
            self.size = max(1, self.size // 2)
            self.rest, self.pause = self.pause, min(_PAUSE, 2 * self.pause)


@attrs.define(eq=False)
class _Group:
    """Rows with one prompt."""

    draft: Draft
    rows: int = 0  # so far
    open: int = 0


@attrs.define(eq=False)
class _DraftedRow:
    ids: list[int]
    group: _Group
    key: Hashable
    number: int
    length: DraftLength
    drafted: int = 0
    accepted: int = 0


class RowDrafts:
    """The drafts of open rows, of at most `most` tokens of a vocabulary of `size`; each prompt's rows have a `drafter`.
    All of this depends on the rows' tokens alone."""

    def __init__(self, drafter: Drafter, most: int, size: int) -> None:
        self._drafter, self._most, self._size = drafter, most, size
        self._groups: dict[Hashable, _Group] = {}
        self._rows: dict[str, _DraftedRow] = {}

    def extend(self, drawn: Iterable[tuple[OpenRow, int]]) -> None:
        """Append drawn tokens to their rows."""
        for row, token in drawn:
            own = self._rows.get(row.name)
            if own is None:
                own = self._rows[row.name] = self._begun(row)
            own.ids.append(token)

    def _begun(self, row: OpenRow) -> _DraftedRow:
        request = row.request
        key = (request.ids, request.adapter) if request.after is None else request.name
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(self._drafter())
            for text in request.earlier:  # rows that have ended
                group.draft(group.rows, [*request.ids, *text], 0)
                group.rows += 1
        group.rows += 1
        group.open += 1
        return _DraftedRow([*row.ids], group, key, group.rows - 1, DraftLength(self._most))

    def propose(self, rows: Sequence[OpenRow], room: Sequence[int]) -> list[Sequence[int]]:
        """Draft tokens for each of the rows, fewer than its `room`. Raises ValueError for tokens that the vocabulary
        does not have."""
        found = list[Sequence[int]]()
        for row, most in zip(rows, room, strict=True):
            own = self._rows.get(row.name)
            most = 0 if own is None or most < 2 else min(own.length.next(), most - 1)
            draft = own.group.draft(own.number, own.ids, most)[:most] if own is not None and most else ()
            if any(not 0 <= token < self._size for token in draft):
                text = f"tokens that the model's vocabulary of {self._size} tokens does not have"
                raise ValueError(f"drafter: it drafted {[*draft]} for request {row.name!r}, {text}")
            found.append(draft)
        return found

    def learn(self, rows: Sequence[OpenRow], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take in how many tokens of each row were drafted, and how many of them were accepted."""
        for row, many, kept in zip(rows, drafted, accepted, strict=True):
            if many:
                own = self._rows[row.name]
                own.length.learn(many, kept)
                own.drafted += many
                own.accepted += kept

    def end(self, row: OpenRow) -> DraftCounts:
        """Forget a row, and its prompt's texts with the last of its rows; returns the row's counts."""
        own = self._rows.pop(row.name, None)
        if own is None:  # it drew nothing
            return DraftCounts(0, 0)
        own.group.open -= 1
        if not own.group.open:
            del self._groups[own.key]
        return DraftCounts(own.drafted, own.accepted)
