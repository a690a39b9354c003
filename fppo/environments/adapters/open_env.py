"""OpenEnv: environments on a server, with a session for each episode.

A session does not pickle. So a state holds the session's number, the seed and the episode's actions. The actions are
played again in a new session if the process has no such session, or if that session had other actions: one whose answer
was lost, or those of another call with the same state.
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
    """The state between two calls: a session, and the seed and actions that play its episode again."""

    session: tuple[int, int]  # process id, and a number in that process
    seed: int
    actions: tuple[dict[str, Any], ...] = ()


class _OpenSession(NamedTuple):
    """An open session, and the actions that it has answered."""

    client: Any
    actions: tuple[dict[str, Any], ...]


class OpenEnv:
    """Environments of the server at `url`. `action` (module:function) makes an action's dict from a text, and `shown` a
    text from an observation's dict; by default both use the key "message". Each process keeps only the `sessions` most
    recently used sessions open, since an episode that does not end by itself leaves one open."""

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
        self._sessions = dict[tuple[int, int], _OpenSession]()  # least recently used first

    def reset(self, row: Mapping[str, Any], seed: int) -> Begin:
        """Open a session, and return its first observation."""
        session = os.getpid(), next(self._numbers)
        client, seen = self._opened(seed)
        self._keep(session, _OpenSession(client, ()))
        return Begin(HeldSession(session, seed), [{"role": "user", "content": self._shown(seen.observation)}])

    def step(self, state: HeldSession, reply: Reply) -> Step:
        """Make the policy's action, and return the observation after it. The session is closed if the episode is over
        or the turn was cut."""
        session, action, actions = state.session, self._action(reply.text), state.actions
        held = self._sessions.pop(session, None)  # so that it is not kept if a call fails
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

    def _keep(self, session: tuple[int, int], opened: _OpenSession) -> None:
        self._sessions[session] = opened
        while len(self._sessions) > self._most:
            self._sessions.pop(next(iter(self._sessions))).client.close()

    def _opened(self, seed: int, actions: Sequence[dict[str, Any]] = ()) -> tuple[Any, Any]:
        """Open a session and play these actions in it; return its client and its first observation."""
        client = GenericEnvClient(base_url=self._url).sync()
        with _closed_by_errors(client):
            client.connect()
            seen = client.reset(seed=seed % SMALL)
            for earlier in actions:
                client.step(earlier)
        return client, seen


@contextlib.contextmanager
def _closed_by_errors(client: Any) -> Iterator[None]:
    """Close a client if the context raises."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            client.close()
        raise
