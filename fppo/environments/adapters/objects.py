"""Adapter for stateful environment objects with gym's interface, such as those of gymnasium and GEM.

The state between two calls is the pickled object. Many such objects use global random generators, which are seeded
before each call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from fppo.environments.calls import is_flag
from fppo.environments.protocol import Begin, Reply, Step
from fppo.workers.imports import imported

SMALL, LARGE = 1 << 31, 1 << 62  # exclusive bounds of generators' seeds, and of episodes' seeds
ANOTHER = 0x9E3779B97F4A7C15  # step from one seed to the next


class Kept(NamedTuple):
    """The state between two calls: the environment object, and its episode's seed and turn."""

    seed: int
    turn: int
    environment: Any  # must pickle


def seed_generators(seed: int, turn: int) -> None:
    """Seed the generators of random and numpy by an episode's seed and turn."""
    number = (seed + ANOTHER * turn) % (1 << 63)
    random.seed(number)
    with suppress(ImportError):
        import numpy

        numpy.random.seed(number % (1 << 32))


class Gym:
    """Environments with gym's interface: `reset(seed=)` returns (text, info), and `step(text)` returns (text, reward,
    terminated, truncated, info). `make` (module:name) is a class or function that makes an environment; with `rows` it
    is given the data row. Texts become messages of the role `role`."""

    def __init__(self, *, make: str | Callable[..., Any], role: str = "user", rows: bool = False) -> None:
        self._make = imported(make, "environment", also=type) if isinstance(make, str) else make
        self._role, self._rows = role, rows

    def reset(self, row: Mapping[str, Any], seed: int) -> Begin:
        """Make an environment, reset it by the seed, and return its first text as a message."""
        seed_generators(seed, 0)
        held = self._make(row) if self._rows else self._make()
        text, _ = held.reset(seed=seed % SMALL)
        return Begin(Kept(seed, 0, held), [{"role": self._role, "content": str(text)}])

    def step(self, state: Kept, reply: Reply) -> Step:
        """Make the policy's action. Returns the text after it, the reward, and the numbers in the environment's
        info."""
        seed_generators(state.seed, state.turn + 1)
        text, reward, terminated, truncated, info = state.environment.step(reply.text)
        odd = [x for x in (terminated, truncated) if not is_flag(x)]  # the caller raises ValueError for it
        done = odd[0] if odd else bool(terminated or truncated)
        numbers = {name: float(x) for name, x in info.items() if isinstance(x, bool | int | float)}
        messages = () if done else [{"role": self._role, "content": str(text)}]
        return Step(Kept(state.seed, state.turn + 1, state.environment), messages, reward, done, numbers)
