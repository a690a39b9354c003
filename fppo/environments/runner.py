"""The edge at which environments run: in worker processes with a time limit, or, where they are trusted, here."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fppo.environments.calls import CALL, EnvironmentCall, PlayedStep
from fppo.environments.protocol import Environment, Reply
from fppo.workers.runner import FunctionRunner
from fppo.workers.sample import Kind, Outcome, Sample

_log = logging.getLogger("fppo.environments")


class Player(Protocol):
    """Protocol of what engines play with: episodes of an environment, many at a time."""

    @property
    def judges(self) -> bool: ...  # rewards turns: it gets cut and last ones too, and gives prompts

    def reset(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[PlayedStep]: ...

    def step(self, states: Sequence[Any], replies: Sequence[Reply]) -> list[PlayedStep]: ...


class _EnvironmentFunction(NamedTuple):
    name: str
    fn: EnvironmentCall
    asynchronous: bool
    inline: bool
    kind: Kind = "sample"


class EnvironmentRunner(FunctionRunner):
    """An environment, ready to play; close it, or use it in a `with` statement.

    `make` gives the environment, as a class or a function that imports; it is called once in each of the `workers`
    processes, or with `inline` in this one: see `FunctionRunner`. `asynchronous` says that its methods are coroutines,
    of which `concurrency` run at a time. Where a call raises, ends its process or takes longer than `time_limit`
    seconds, the episode ends, and the step is `failed`. Failures are logged.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        *,
        name: str,
        asynchronous: bool = False,
        time_limit: float = 10.0,
        workers: int = 1,
        concurrency: int = 64,
        start_limit: float = 120.0,
        inline: bool = False,
    ) -> None:
        self._calls = _EnvironmentFunction(name, EnvironmentCall(make, name), asynchronous, inline)
        super().__init__(
            [self._calls],
            role="environment",
            time_limit=time_limit,
            workers=workers,
            concurrency=concurrency,
            start_limit=start_limit,
        )

    @property
    def judges(self) -> bool:
        """True: its steps have rewards."""
        return True

    def reset(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[PlayedStep]:
        """The beginnings of episodes. Raises ValueError for results that are no `Begin`."""
        calls = [(dict(row), seed, None, None) for row, seed in zip(rows, seeds, strict=True)]
        return self._played(calls, "episodes")

    def step(self, states: Sequence[Any], replies: Sequence[Reply]) -> list[PlayedStep]:
        """The answers to turns. Raises ValueError for results that are no `Step`."""
        calls = [(None, None, state, tuple(reply)) for state, reply in zip(states, replies, strict=True)]
        return self._played(calls, "turns")

    def _played(self, calls: Sequence[tuple[Any, ...]], what: str) -> list[PlayedStep]:
        samples = [Sample("", "", None, "", {CALL: call}, (), (), "stop") for call in calls]
        outcomes = self.logged_outcomes(self._calls, samples, what, _log)
        return [self._result(outcome, call) for outcome, call in zip(outcomes, calls, strict=True)]

    def _result(self, outcome: Outcome, call: tuple[Any, ...]) -> PlayedStep:
        if outcome.kind != "value" or outcome.answer is None:
            return PlayedStep(call[2] or "", done=True, failed=True)
        fields, wrong = json.loads(outcome.answer)
        if wrong is not None:
            raise ValueError(f"the environment {self._calls.name!r}: {wrong}")
        return PlayedStep(*fields)


def is_asynchronous(environment: Any) -> bool:
    """Whether a method of the environment, or of its class, is a coroutine."""
    return any(inspect.iscoroutinefunction(getattr(environment, name, None)) for name in ("reset", "step"))
