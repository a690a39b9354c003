"""Objects that keep state in themselves, as values: gym's kind of environment, which GEM and gymnasium have.

A state is the pickled object. The global generators that many of them use are seeded anew before each call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from fppo.environments.calls import is_flag
from fppo.environments.protocol import Begin, Reply, Step
from fppo.workers.imports import imported

SMALL, LARGE = 1 << 31, 1 << 62  # seeds that generators take, and those of episodes
ANOTHER = 0x9E3779B97F4A7C15  # from one seed to the next


class Kept(NamedTuple):
    """An object between two calls."""

    seed: int
    turn: int
    held: Any  # it pickles


def seed_generators(seed: int, turn: int) -> None:
    """Seeds the generators of random and numpy by an episode's seed and turn."""
    number = (seed + ANOTHER * turn) % (1 << 63)
    random.seed(number)
    with suppress(ImportError):
        import numpy

        numpy.random.seed(number % (1 << 32))


class Gym:
    """Environments of gym's kind: `reset(seed=)` gives (text, info), and `step(text)` (text, reward, terminated,
    truncated, info). `make` is module:name of a class, or of a function of a row's fields, that gives one."""

    def __init__(self, *, make: str | Callable[..., Any], role: str = "user", rows: bool = False) -> None:
        self._make = imported(make, "environment", also=type) if isinstance(make, str) else make
        self._role, self._rows = role, rows

    def reset(self, row: Mapping[str, Any], seed: int) -> Begin:
        """A new object's first text; with `rows`, made of the row."""
        seed_generators(seed, 0)
        held = self._make(row) if self._rows else self._make()
        text, _ = held.reset(seed=seed % SMALL)
        return Begin(Kept(seed, 0, held), [{"role": self._role, "content": str(text)}])

    def step(self, state: Kept, reply: Reply) -> Step:
        """The text behind an action, and the numbers of its info."""
        seed_generators(state.seed, state.turn + 1)
        text, reward, terminated, truncated, info = state.held.step(reply.text)
        odd = [x for x in (terminated, truncated) if not is_flag(x)]  # which the caller refuses
        done = odd[0] if odd else bool(terminated or truncated)
        numbers = {name: float(x) for name, x in info.items() if isinstance(x, bool | int | float)}
        messages = () if done else [{"role": self._role, "content": str(text)}]
        return Step(Kept(state.seed, state.turn + 1, state.held), messages, reward, done, numbers)
