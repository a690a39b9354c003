"""OpenEnv: environments behind a server, of which each episode has a session.

A session is no value: a state is its number, and the actions that play the episode again where the session is not, or
has had other actions: one whose answer was lost, or those of another call with the same state.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from openenv.core.generic_client import GenericEnvClient  # pyright: ignore[reportMissingImports]

from fppo.environments.adapters.objects import SMALL
from fppo.environments.protocol import Begin, Reply, Step
from fppo.workers.imports import imported


class HeldSession(NamedTuple):
    """An episode between two calls."""

    session: tuple[int, int]  # the process, and a number in it
    seed: int
    actions: tuple[dict[str, Any], ...] = ()


class _OpenSession(NamedTuple):
    """An open session, and the actions that it has answered."""

    client: Any
    actions: tuple[dict[str, Any], ...]


class OpenEnv:
    """Environments of the server at `url`. `action` and `shown`, module:function, make a dict of a text and a text of
    an observation's dict; without them both have a "message". Each process keeps `sessions` open at most, the newest:
    an episode that has no end of its own leaves one behind."""

    def __init__(
        self,
        *,
        url: str,
        action: str | Callable[..., Any] | None = None,
        shown: str | Callable[..., str] | None = None,
        sessions: int = 256,
    ) -> None:
        if sessions < 1:
            raise ValueError(f"OpenEnv: sessions = {sessions}: give 1 or more")
        given: list[Any] = [imported(fn, "environment") if isinstance(fn, str) else fn for fn in (action, shown)]
        self._action = given[0] or (lambda text: {"message": text})
        self._shown = given[1] or (lambda seen: str(seen.get("message", seen)))
        self._url, self._numbers, self._most = url, itertools.count(), sessions
        self._sessions = dict[tuple[int, int], _OpenSession]()  # the one used last is the last

    def reset(self, row: Mapping[str, Any], seed: int) -> Begin:
        """A new session's first observation."""
        session = os.getpid(), next(self._numbers)
        client, seen = self._opened(seed)
        self._keep(session, _OpenSession(client, ()))
        return Begin(HeldSession(session, seed), [{"role": "user", "content": self._shown(seen.observation)}])

    def step(self, state: HeldSession, reply: Reply) -> Step:
        """The observation behind an action, which ends the session where it is the last."""
        session, action, actions = state.session, self._action(reply.text), state.actions
        held = self._sessions.pop(session, None)  # and so it is not kept where a call fails
        if held is None or held.actions != actions:
            if held is not None:
                held.client.close()
            held = _OpenSession(self._opened(state.seed, actions)[0], actions)
            session = os.getpid(), next(self._numbers)
        with _closed_by_errors(held.client):
            seen = held.client.step(action)
        if seen.done or not reply.end:
            held.client.close()
        else:
            self._keep(session, _OpenSession(held.client, (*actions, action)))
        messages = () if seen.done else [{"role": "user", "content": self._shown(seen.observation)}]
        kept = HeldSession(session, state.seed, (*actions, action))
        return Step(kept, messages, 0.0 if seen.reward is None else seen.reward, seen.done)

    def _keep(self, session: tuple[int, int], held: _OpenSession) -> None:
        self._sessions[session] = held
        while len(self._sessions) > self._most:
            self._sessions.pop(next(iter(self._sessions))).client.close()

    def _opened(self, seed: int, actions: Sequence[dict[str, Any]] = ()) -> tuple[Any, Any]:
        """A new session behind these actions, and what it shows first."""
        client = GenericEnvClient(base_url=self._url).sync()
        with _closed_by_errors(client):
            client.connect()
            seen = client.reset(seed=seed % SMALL)
            for earlier in actions:
                client.step(earlier)
        return client, seen


@contextlib.contextmanager
def _closed_by_errors(client: Any) -> Iterator[None]:
    """A context whose errors close a client."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            client.close()
        raise
