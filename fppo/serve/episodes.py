"""Recorded episodes: rows of token ids with their log-probs, found again by the conversation that a client sends.

A row is a prompt and answers to it, with observations between. A request continues a row if it repeats the conversation
up to one of its answers; that answer keeps the ids that were sampled, whatever its text.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import attrs

from fppo.key import Key
from fppo.rollout.requests import FinishedRequest
from fppo.serve.protocol import Message

Kind = Literal["chat", "ids", "text"]
_ROWS = 1 << 62
_TURN_BYTES, _TOKEN_BYTES = 8 << 10, 48  # of memory: an answer's tensors and places, and each of its ids


@attrs.frozen(eq=False)
class RecordedTurn:
    """An answer, and the ids before it: a prompt, or the observation after the previous answer.

    The last `opened` ids of `before` open a call that the client forced. The policy drew none of them, but they begin
    the text.
    """

    before: tuple[int, ...]
    answer: FinishedRequest
    text: str
    opened: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids."""
        return (*self.before, *self.answer.tokens.tolist())

    @property
    def size(self) -> int:
        """How many ids there are."""
        return len(self.before) + len(self.answer.tokens)

    @property
    def memory(self) -> int:
        """The bytes of memory that it takes, approximately; a short answer takes far more than its ids."""
        return _TURN_BYTES + _TOKEN_BYTES * self.size + 4 * len(self.text)


@attrs.frozen(eq=False)
class EpisodeRow:
    """A prompt and answers to it, in turn, with the observations between them."""

    number: int  # among the rows of its episode
    turns: tuple[RecordedTurn, ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        """The ids before the first answer."""
        return self.turns[0].before

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids."""
        return tuple(token for turn in self.turns for token in turn.ids)


@attrs.frozen(eq=False)
class Items:
    """A sequence of comparable items: messages, ids or the characters of a text."""

    data: bytes
    ends: Sequence[int]  # of each item in `data`; a range for items of one width

    def __len__(self) -> int:
        return len(self.ends)

    def __add__(self, other: Items) -> Items:
        data, first = self.data + other.data, len(self.data)
        if isinstance(self.ends, range) and isinstance(other.ends, range):
            return _of_width(data, self.ends.step)
        return Items(data, [*self.ends, *(first + end for end in other.ends)])

    def between(self, start: int, end: int) -> bytes:
        """The bytes of the items from index `start` to before `end`."""
        return self.data[self.ends[start - 1] if start else 0 : self.ends[end - 1] if end else 0]


class Conversation(NamedTuple):
    """A request's conversation as comparable items.

    `cuts` are the numbers of items after which it may continue an earlier answer, the highest first; None: all.
    """

    kind: Kind
    head: bytes  # what else an earlier request must have in common with it
    items: Items
    cuts: Sequence[int] | None = None

    def with_answer(self, items: Items) -> Conversation:
        """The conversation followed by an answer's `items`."""
        return self._replace(items=self.items + items)


def of_messages(messages: Sequence[Message], tools: Sequence[Any]) -> Conversation:
    """The conversation of a chat. It may only continue its last assistant's message, and only if other messages
    follow."""
    last = max((place for place, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
    cuts = [last + 1] if 0 <= last < len(messages) - 1 else []
    head = json.dumps(tools, sort_keys=True).encode() if tools else b""
    return Conversation("chat", head, items_of(messages), cuts)


def items_of(messages: Sequence[Message]) -> Items:
    """Messages in the form in which they are compared: an assistant's by its content and its calls alone."""
    parts = [_message_bytes(message) for message in messages]
    return Items(b"".join(parts), [*accumulate(map(len, parts))])


def _message_bytes(message: Message) -> bytes:
    """The bytes of a message, after their count."""
    shown: Any = message
    if message["role"] == "assistant":
        calls = [[x["function"]["name"], x["function"]["arguments"]] for x in message.get("tool_calls", ())]
        shown = ["assistant", message["content"], calls]
    own = json.dumps(shown, sort_keys=True).encode()
    return len(own).to_bytes(8, "little") + own


def of_ids(ids: Sequence[int]) -> Conversation:
    """The conversation of a prompt of ids."""
    return Conversation("ids", b"", _of_width(array("q", ids).tobytes(), 8))


def of_text(text: str) -> Conversation:
    """The conversation of a prompt of text."""
    return Conversation("text", b"", _of_width(text.encode("utf-32-le"), 4))


def _of_width(data: bytes, width: int) -> Items:
    return Items(data, range(width, len(data) + 1, width))


@attrs.frozen(eq=False)
class AnswerPlace:
    """The place of a new answer: in a row of an episode, after `items_seen` items of the conversation."""

    name: str
    number: int  # of the row
    row: EpisodeRow | None  # that it continues; None: a new one
    prefix: tuple[int, ...] = ()  # ids of another row, with which a new one begins
    items_seen: int = 0
    after: str | None = None  # the request of the answer before, whose context may be kept
    end: int | None = None  # the last id of the answer before

    @property
    def before(self) -> tuple[int, ...]:
        """The ids before the new ones: those of the row that is continued, or the prefix of a new row."""
        return self.prefix if self.row is None else self.row.ids

    @property
    def used(self) -> int:
        """The number of response tokens in the row that is continued; 0 for a new row."""
        return 0 if self.row is None else sum(turn.size for turn in self.row.turns) - len(self.row.prompt)

    def key_of(self, key: Key) -> Key:
        """The random key for this answer's draws, made from the episode's `key` and the numbers of the row and the
        answer. In the first row of an episode it is the key that `rollout.TurnsEngine` uses for the turn of the same
        number."""
        own = key if self.number == 0 else key.fold("row", self.number)
        return own if self.row is None else own.fold("turn", len(self.row.turns) + 1)


def row_number(name: str) -> int:
    """The number by which an episode's answers are drawn: its name if that is a number, else a digest of the name."""
    if name.isascii() and name.isdigit() and int(name) < _ROWS:
        return int(name)
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") % _ROWS


class _Place(NamedTuple):
    name: str
    number: int
    turns: int  # the turns up to and including the answer's
    request: str


class Episodes:
    """The episodes of a server, by name; any thread may call.

    At most `most_tokens`, and `most_bytes` of memory, are held. Beyond that, episodes without an open answer are given
    to `on_dropped`, the least recently used first. `on_forgotten` gets the names of requests that nothing can continue
    any more.
    """

    def __init__(
        self,
        most_tokens: int,
        *,
        most_bytes: int = 1 << 29,
        on_dropped: Callable[[str, tuple[EpisodeRow, ...]], None] = lambda name, rows: None,
        on_forgotten: Callable[[Sequence[str]], None] = lambda names: None,
    ) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._most, self._on_dropped, self._on_forgotten = most_tokens, on_dropped, on_forgotten
        self._rows: dict[str, dict[int, EpisodeRow]] = {}  # the least recently used first
        self._answers: dict[bytes, _Place] = {}
        self._of: dict[str, list[tuple[bytes, Kind, int, str]]] = {}  # digests, lengths and requests, by episode
        self._lengths: dict[Kind, Counter[int]] = {"ids": Counter(), "text": Counter()}
        self._open: dict[str, set[int]] = {}  # rows in which an answer is being drawn
        self._unnamed: set[str] = set()
        self._count = self._tokens = 0
        self._lock = threading.RLock()

    def begin(self, name: str | None, conversation: Conversation) -> AnswerPlace:
        """Open a place for an answer to a conversation: in the episode `name` or, without a name, in the episode whose
        recorded conversation it continues, else in a new one.

        Close the place by `commit` or `abandon`. Two answers to the same conversation are in different rows; the second
        row begins with the ids of the first.
        """
        with self._lock:
            found = self._find(name, conversation)
            if found is None:
                own = self._new_name() if name is None else name
                start = AnswerPlace(own, self._free(own), None)
            else:
                start = self._continuation(*found)
            self._rows[start.name] = self._rows.pop(start.name, {})
            self._open.setdefault(start.name, set()).add(start.number)
            return start

    def commit(self, start: AnswerPlace, turn: RecordedTurn, whole: Conversation) -> None:
        """Record an answer; `whole` is the conversation that ends with it."""
        with self._lock:
            self._close(start)
            rows = self._rows.setdefault(start.name, {})
            before = () if start.row is None else start.row.turns
            held = () if start.number not in rows else before  # else the episode was taken meanwhile
            rows[start.number] = row = EpisodeRow(start.number, (*before, turn))
            *_, (size, digest) = _digests(self._scope(start.name), whole, {len(whole.items)})
            turns, request = len(before) + 1, turn.answer.name
            self._answers[digest] = _Place(start.name, start.number, turns, request)
            self._of.setdefault(start.name, []).append((digest, whole.kind, size, request))
            if whole.kind != "chat":
                self._lengths[whole.kind][size] += 1
            self._tokens += sum(each.size for each in row.turns[len(held) :])
            self._bytes += sum(each.memory for each in row.turns[len(held) :])
            self._thin()

    def abandon(self, start: AnswerPlace) -> None:
        """Close the place of an answer that nobody reads."""
        with self._lock:
            self._close(start)
            if not self._rows.get(start.name) and start.name not in self._open:
                self._forget(start.name)

    def names(self) -> list[str]:
        """The names of all episodes with an answer."""
        with self._lock:
            return [name for name, rows in self._rows.items() if rows]

    def rows(self, name: str) -> tuple[EpisodeRow, ...]:
        """The rows of an episode so far, in the order of their numbers; none for an unknown name."""
        with self._lock:
            return tuple(row for _, row in sorted(self._rows.get(name, {}).items()))

    def take(self, name: str) -> tuple[EpisodeRow, ...]:
        """Return the rows of an episode, and forget it."""
        with self._lock:
            rows = self.rows(name)
            self._forget(name)
            return rows

    def _find(self, name: str | None, conversation: Conversation) -> tuple[_Place, int] | None:
        known = self._lengths.get(conversation.kind, Counter[int]())
        cuts = {n for n in known if n < len(conversation.items)} if conversation.cuts is None else {*conversation.cuts}
        found = None
        for size, digest in _digests("" if name is None else self._scope(name), conversation, cuts):
            place = self._answers.get(digest)
            found = found if place is None else (place, size)
        return found

    def _continuation(self, place: _Place, seen: int) -> AnswerPlace:
        row = self._rows[place.name][place.number]
        end = int(row.turns[place.turns - 1].answer.tokens[-1])
        if len(row.turns) == place.turns and place.number not in self._open.get(place.name, ()):
            return AnswerPlace(place.name, place.number, row, (), seen, place.request, end)
        known = tuple(token for turn in row.turns[: place.turns] for token in turn.ids)
        return AnswerPlace(place.name, self._free(place.name), None, known, seen, place.request, end)

    def _free(self, name: str) -> int:
        taken = {*self._rows.get(name, ()), *self._open.get(name, ())}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def _new_name(self) -> str:
        while (name := f"unnamed-{self._count}") in self._rows:  # a client may have given that name
            self._count += 1
        self._count += 1
        self._unnamed.add(name)
        return name

    def _scope(self, name: str) -> str:
        return "" if name in self._unnamed else name

    def _close(self, start: AnswerPlace) -> None:
        numbers = self._open.get(start.name, set())
        numbers.discard(start.number)
        if not numbers:
            self._open.pop(start.name, None)

    @property
    def _full(self) -> bool:
        return self._tokens > self._most or self._bytes > self._most_bytes

    def _thin(self) -> None:
        """Drop episodes beyond the bounds, except for the newest."""
        if not self._full:
            return
        for name in [*self._rows][:-1]:
            if not self._full:
                return
            if name not in self._open and self._rows[name]:
                self._on_dropped(name, self.take(name))

    def _forget(self, name: str) -> None:
        rows = self._rows.pop(name, {})
        self._tokens -= sum(turn.size for row in rows.values() for turn in row.turns)
        self._bytes -= sum(turn.memory for row in rows.values() for turn in row.turns)
        gone = self._of.pop(name, [])
        for digest, kind, size, _ in gone:
            if self._answers.get(digest, _NOWHERE).name == name:
                del self._answers[digest]
            if kind != "chat":
                self._lengths[kind] -= Counter({size: 1})
        if name not in self._open:  # else its conversation may go on
            self._unnamed.discard(name)
        if gone:
            self._on_forgotten([request for *_, request in gone])


_NOWHERE = _Place("", -1, 0, "")


def _digests(scope: str, conversation: Conversation, sizes: set[int]) -> Iterator[tuple[int, bytes]]:
    """Yield (size, digest of the conversation's first `size` items) for each of the sizes, ascending."""
    state = hashlib.blake2b(digest_size=16)
    for part in (scope.encode(), conversation.kind.encode(), conversation.head):
        state.update(len(part).to_bytes(8, "little") + part)
    start = 0
    for size in sorted(size for size in sizes if 0 < size <= len(conversation.items)):
        state.update(conversation.items.between(start, size))
        start = size
        yield size, state.copy().digest()
