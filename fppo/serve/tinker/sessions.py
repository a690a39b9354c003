"""Sessions, samplers and custom losses of a server, in a log that the next server of the same folder reads."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import cattrs

from fppo._errors import json_of, printable
from fppo.serve.refusal import Refusal
from fppo.serve.tinker.journal import Journal, JournalRecord, read

Weights = Literal["base", "path", "snapshot", "inflight"]


def owner_of(key: str) -> str:
    """The name of a key's owner: a digest, so that no file holds the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


@attrs.frozen(kw_only=True)
class ClientSession:
    """A session of a client: its owner, and the client's description of it."""

    name: str
    owner: str
    created: float
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, str] | None = None
    display_name: str | None = None
    finished: str | None = None  # the client's reason


@attrs.frozen(kw_only=True)
class Sampler:
    """A sampling session: the weights that it samples from.

    The weights are the base's, those of a checkpoint at `path`, a snapshot of `run`, or the newest of `run` in flight.
    """

    name: str
    owner: str
    base: str
    weights: Weights
    path: str | None = None
    run: str | None = None


@attrs.frozen(kw_only=True)
class StoredLoss:
    """A custom loss that a client uploaded: the body of its request, for a session's data."""

    name: str
    session: str
    owner: str
    body: str


_KINDS: Mapping[str, type] = {"session": ClientSession, "sampler": Sampler, "loss": StoredLoss}


class Registry:
    """The sessions, samplers and losses of a server; any thread may call."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._lock, self._clock, self._path = threading.Lock(), clock, path
        self._sessions: dict[str, ClientSession] = {}
        self._samplers: dict[str, Sampler] = {}
        self._losses: dict[str, StoredLoss] = {}
        self._joined: dict[str, int] = {}
        self._seen: dict[str, float] = {}
        for record in read(path):
            self._take(record)
        self._journal = Journal(path)
        self._numbers = itertools.count(1)

    def add_session(self, session: ClientSession) -> None:
        """Begin a session."""
        self._append("session", session)

    def session(self, name: str, owner: str) -> ClientSession:
        """A session of the owner's. Raises Refusal; with status 410 for one that has finished."""
        session = self.any_session(name, owner)
        if session.finished is not None:
            raise Refusal(f"session {name} has finished", status=410)
        with self._lock:
            self._seen[name] = self._clock()
        return session

    def any_session(self, name: str, owner: str) -> ClientSession:
        """A session of the owner's, open or finished. Raises Refusal."""
        session = self._sessions.get(name)
        if session is None or session.owner != owner:
            raise Refusal(f"there is no session {printable(name, 80)!r}", status=404)
        return session

    def sessions(self, owner: str) -> list[ClientSession]:
        """The sessions of an owner, the newest first."""
        with self._lock:
            own = [each for each in self._sessions.values() if each.owner == owner]
        return sorted(own, key=lambda each: (-each.created, each.name))

    def has_finished(self, name: str) -> bool:
        """Whether a session has ended."""
        session = self._sessions.get(name)
        return session is None or session.finished is not None

    def silent(self, seconds: float) -> list[ClientSession]:
        """Open sessions whose client has been silent for `seconds`."""
        with self._lock:
            now = self._clock()
            left = [each for each in self._sessions.values() if each.finished is None]
            return [each for each in left if now - self._seen.setdefault(each.name, now) > seconds]

    def finish(self, name: str, owner: str, reason: str) -> bool:
        """End a session with its `reason`; False if it had ended, when the earlier reason stands."""
        session = self.any_session(name, owner)
        if session.finished is not None:
            return False
        self._append("session", attrs.evolve(session, finished=reason))
        return True

    def add_sampler(self, sampler: Sampler, *, keep: bool = True) -> None:
        """Begin a sampling session; with `keep` it is logged, so that the next server has it."""
        if keep:
            self._append("sampler", sampler)
        else:
            with self._lock:
                self._samplers[sampler.name] = sampler

    def has_sampler(self, name: str) -> bool:
        """Whether there is a sampling session of this name."""
        return name in self._samplers

    def sampler(self, name: str, owner: str) -> Sampler:
        """A sampling session of the owner's. Raises Refusal."""
        sampler = self._samplers.get(name)
        if sampler is None or sampler.owner != owner:
            raise Refusal(f"there is no sampling session {printable(name, 80)!r}", status=404)
        return sampler

    def samplers_of(self, session: str) -> list[Sampler]:
        """The sampling sessions of a session."""
        with self._lock:
            return [each for name, each in self._samplers.items() if name.startswith(f"{session}:")]

    def join(self, sampler: Sampler) -> int:
        """A number that no other client of the sampling session has, from 1 on."""
        with self._lock:
            number = self._joined[sampler.name] = self._joined.get(sampler.name, 0) + 1
            body = json.dumps({"sampler": sampler.name, "number": number}).encode()
            self._journal.append(JournalRecord(next(self._numbers), "join", body))
            return number

    def add_loss(self, loss: StoredLoss) -> None:
        """Store a custom loss."""
        self._append("loss", loss)

    def loss(self, name: str) -> StoredLoss | None:
        """A custom loss by its name; None if there is none."""
        return self._losses.get(name)

    def close(self) -> None:
        """Close the log."""
        self._journal.close()

    def _append(self, kind: str, value: Any) -> None:
        with self._lock:
            record = JournalRecord(next(self._numbers), kind, json.dumps(cattrs.unstructure(value)).encode())
            self._journal.append(record)
            self._take(record)

    def _take(self, record: JournalRecord) -> None:
        fields = json_of(record.body)
        if record.kind == "join":
            self._joined[fields["sampler"]] = fields["number"]
            return
        value = cattrs.structure(fields, _KINDS[record.kind])
        held: dict[str, Any] = {"session": self._sessions, "sampler": self._samplers, "loss": self._losses}[record.kind]
        held[value.name] = value
