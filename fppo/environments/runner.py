"""Run environments in worker processes with a time limit or, if they are trusted, in this process."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

from fppo.environments.calls import CALL, EnvironmentCall, PlayedStep
from fppo.environments.protocol import Environment, Reply
from fppo.workers.runner import FunctionRunner
from fppo.workers.sample import Kind, Outcome, Sample
from fppo.workers.streams import CallStream

_log = logging.getLogger("fppo.environments")


class Player(Protocol):
    """Protocol of environments as engines play them: many episodes at a time."""

    @property
    def judges(self) -> bool: ...  # it rewards turns, so it also gets cut and last turns; and it gives prompts

    def reset(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[PlayedStep]: ...

    def step(self, states: Sequence[Any], replies: Sequence[Reply]) -> list[PlayedStep]: ...


class PlayerCalls(Protocol):
    """Protocol of a player's calls in progress, numbered by the caller: at most one call of each number at a time."""

    def reset(self, number: int, row: Mapping[str, Any], seed: int) -> None: ...

    def step(self, number: int, state: Any, reply: Reply) -> None: ...

    def taken(self, *, wait: bool) -> list[tuple[int, PlayedStep]]: ...  # with `wait` at least one, if any is open


def calls_of(player: Player) -> AbstractContextManager[PlayerCalls]:
    """Open a player for calls: by its own `open`, or else as `CallsTogether`."""
    return player.open() if hasattr(player, "open") else nullcontext(CallsTogether(player))  # type: ignore


class CallsTogether:
    """Calls of a player without `open`, collected and made together when their results are taken."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self._resets: dict[int, tuple[Mapping[str, Any], int]] = {}
        self._steps: dict[int, tuple[Any, Reply]] = {}

    def reset(self, number: int, row: Mapping[str, Any], seed: int) -> None:
        """Implement `PlayerCalls.reset`."""
        self._resets[number] = row, seed

    def step(self, number: int, state: Any, reply: Reply) -> None:
        """Implement `PlayerCalls.step`."""
        self._steps[number] = state, reply

    def taken(self, *, wait: bool) -> list[tuple[int, PlayedStep]]:
        """Implement `PlayerCalls.taken`."""
        del wait
        (resets, self._resets), (steps, self._steps) = (self._resets, {}), (self._steps, {})
        results: list[tuple[int, PlayedStep]] = []
        for calls, make in ((resets, self._player.reset), (steps, self._player.step)):
            if calls:
                results += zip(calls, make(*map(list, zip(*calls.values(), strict=True))), strict=True)
        return results


class _EnvironmentFunction(NamedTuple):
    name: str
    fn: EnvironmentCall
    asynchronous: bool
    inline: bool
    kind: Kind = "sample"


class EnvironmentRunner(FunctionRunner):
    """An environment, ready to play; close it, or use it in a `with` statement.

    `make` makes the environment; it is a class, or a function that imports one. It is called once in each of the
    `workers` processes, or with `inline` in this process: see `FunctionRunner`. With `asynchronous` the methods are
    coroutines, and `concurrency` of them run at a time. If a call raises, ends its process or takes longer than
    `time_limit` seconds, it is made again up to `retries` times; then the episode ends with a `failed` step. Failures
    are logged.
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
        retries: int = 0,
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
            retries=retries,
        )

    @property
    def judges(self) -> bool:
        """True: an environment's steps have rewards."""
        return True

    def reset(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[PlayedStep]:
        """Begin an episode for each row and seed. Raises ValueError for results that are no `Begin`."""
        calls = [(dict(row), seed, None, None) for row, seed in zip(rows, seeds, strict=True)]
        return self._played(calls, "episodes")

    def step(self, states: Sequence[Any], replies: Sequence[Reply]) -> list[PlayedStep]:
        """Answer a turn of each episode, given its state and the policy's reply. Raises ValueError for results that are
        no `Step`."""
        calls = [(None, None, state, tuple(reply)) for state, reply in zip(states, replies, strict=True)]
        return self._played(calls, "turns")

    @contextmanager
    def open(self) -> Iterator[EnvironmentCalls]:
        """Open the environment for calls, whose results can be taken as soon as each is ready."""
        with self.stream(self._calls, "calls", _log) as calls:
            yield EnvironmentCalls(calls, self._result)

    def _played(self, calls: Sequence[tuple[Any, ...]], what: str) -> list[PlayedStep]:
        samples = [_sample(call) for call in calls]
        outcomes = self.logged_outcomes(self._calls, samples, what, _log)
        return [self._result(outcome, call) for outcome, call in zip(outcomes, calls, strict=True)]

    def _result(self, outcome: Outcome, call: tuple[Any, ...]) -> PlayedStep:
        if outcome.kind != "value" or outcome.answer is None:
            return PlayedStep(call[2] or "", done=True, failed=True, why=outcome.text)
        fields, wrong = json.loads(outcome.answer)
        if wrong is not None:
            raise ValueError(f"the environment {self._calls.name!r}: {wrong}")
        return PlayedStep(*fields)


class EnvironmentCalls:
    """`PlayerCalls` of an environment; `result` makes a step from an outcome and the call's arguments."""

    def __init__(self, calls: CallStream, result: Callable[[Outcome, tuple[Any, ...]], PlayedStep]) -> None:
        self._calls, self._result = calls, result
        self._open: dict[int, tuple[Any, ...]] = {}  # arguments of the open calls

    def reset(self, number: int, row: Mapping[str, Any], seed: int) -> None:
        """Implement `PlayerCalls.reset`."""
        self._put(number, (dict(row), seed, None, None))

    def step(self, number: int, state: Any, reply: Reply) -> None:
        """Implement `PlayerCalls.step`."""
        self._put(number, (None, None, state, tuple(reply)))

    def taken(self, *, wait: bool) -> list[tuple[int, PlayedStep]]:
        """Implement `PlayerCalls.taken`. Raises ValueError for results that are no `Begin` or `Step`."""
        outcomes = self._calls.taken(wait=wait)
        return [(number, self._result(outcome, self._open.pop(number))) for number, outcome in outcomes]

    def _put(self, number: int, call: tuple[Any, ...]) -> None:
        self._open[number] = call
        self._calls.put(number, _sample(call))


def _sample(call: tuple[Any, ...]) -> Sample:
    return Sample("", "", None, "", {CALL: call}, (), (), "stop")


def is_asynchronous(environment: Any) -> bool:
    """Whether a method of the environment, or of its class, is a coroutine."""
    return any(inspect.iscoroutinefunction(getattr(environment, name, None)) for name in ("reset", "step"))
