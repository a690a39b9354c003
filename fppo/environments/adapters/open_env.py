"""OpenEnv: environments behind a server, of which each episode has a session.

A session is no value: a state is its number, and the actions that play the episode again where the session is not.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
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


class OpenEnv:
    """Environments of the server at `url`. `action` and `shown`, module:function, make a dict of a text and a text of
    an observation's dict; without them both have a "message"."""

    def __init__(
        self, *, url: str, action: str | Callable[..., Any] | None = None, shown: str | Callable[..., str] | None = None
    ) -> None:
        given: list[Any] = [imported(fn, "environment") if isinstance(fn, str) else fn for fn in (action, shown)]
        self._action = given[0] or (lambda text: {"message": text})
        self._shown = given[1] or (lambda seen: str(seen.get("message", seen)))
        self._url, self._numbers, self._sessions = url, itertools.count(), dict[tuple[int, int], Any]()

    def reset(self, row: Mapping[str, Any], seed: int) -> Begin:
        """A new session's first observation."""
        session, seen = self._open(seed)
        return Begin(HeldSession(session, seed), [{"role": "user", "content": self._shown(seen.observation)}])

    def step(self, state: HeldSession, reply: Reply) -> Step:
        """The observation behind an action, which ends the session where it is the last."""
        session, action = state.session, self._action(reply.text)
        if session not in self._sessions:
            session, _ = self._open(state.seed)
            _ = [self._sessions[session].step(earlier) for earlier in state.actions]
        seen, kept = self._sessions[session].step(action), HeldSession(session, state.seed, (*state.actions, action))
        if seen.done or not reply.end:
            self._sessions.pop(session).close()
        messages = () if seen.done else [{"role": "user", "content": self._shown(seen.observation)}]
        return Step(kept, messages, float(seen.reward or 0.0), bool(seen.done))

    def _open(self, seed: int) -> tuple[tuple[int, int], Any]:
        session = os.getpid(), next(self._numbers)
        client = self._sessions[session] = GenericEnvClient(base_url=self._url).sync()
        client.connect()
        return session, client.reset(seed=seed % SMALL)
