"""Run what answers the policy's turns in worker processes with a time limit or, if it is trusted, in this process."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, Self

import attrs

from fppo.environments.calls import CALL, EnvironmentCall, PlayedStep, PlayerCall
from fppo.environments.protocol import Environment, Reply
from fppo.workers.runner import FunctionRunner, WorkerFunction
from fppo.workers.sample import Outcome, sample_of
from fppo.workers.streams import CallStream


class Player(Protocol):
    """Protocol of what answers the policy's turns, in many episodes at a time: a tool, an environment or a game."""

    @property
    def judges(self) -> bool: ...  # it rewards turns, so it also gets cut and last turns; and it gives prompts

    def open(self) -> AbstractContextManager[PlayerCalls]: ...


class PlayerCalls(Protocol):
    """Protocol of a player's calls in progress, numbered by the caller: at most one call of each number at a time."""

    def reset(self, number: int, row: Mapping[str, Any], seed: int) -> None:
        """Start call `number`, which begins an episode from a row of data and a seed."""
        ...

    def step(self, number: int, state: Any, reply: Reply) -> None:
        """Start call `number`, which answers the policy's reply to an episode in `state`."""
        ...

    def taken(self, *, wait: bool) -> list[tuple[int, PlayedStep]]:
        """Take the results that are ready, as (number of the call, result); with `wait`, wait for at least one if any
        call is open."""
        ...


@attrs.frozen(eq=False)
class PlayerRunner:
    """A player whose calls one function answers; close it, or use it in a `with` statement.

    `result` makes a step from a call's outcome. Where `begun` returns a step for a row, its episode begins without a
    call. With `judges` it is a player that rewards turns.
    """

    runner: FunctionRunner
    function: WorkerFunction
    begun: Callable[[Mapping[str, Any]], PlayedStep | None]
    result: Callable[[Outcome, PlayerCall], PlayedStep]
    judges: bool
    log: logging.Logger

    def __enter__(self) -> Self:
        self.runner.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        self.runner.close()

    @contextmanager
    def open(self) -> Iterator[PlayerCalls]:
        """Open the player for calls, whose results can be taken as soon as each is ready."""
        with self.runner.stream(self.function, "calls", self.log) as calls:
            yield _OpenCalls(calls, self.begun, self.result)

    def reset(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[PlayedStep]:
        """Begin an episode for each row and seed. Raises ValueError for results that are no `Begin`."""
        with self.open() as calls:
            for number, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
                calls.reset(number, row, seed)
            return _all_taken(calls, len(rows))

    def step(self, states: Sequence[Any], replies: Sequence[Reply]) -> list[PlayedStep]:
        """Answer a turn of each episode, given its state and the policy's reply. Raises ValueError for invalid
        results."""
        with self.open() as calls:
            for number, (state, reply) in enumerate(zip(states, replies, strict=True)):
                calls.step(number, state, reply)
            return _all_taken(calls, len(states))


def _all_taken(calls: PlayerCalls, count: int) -> list[PlayedStep]:
    steps: dict[int, PlayedStep] = {}
    while len(steps) < count:
        steps |= dict(calls.taken(wait=True))
    return [steps[number] for number in range(count)]


class _OpenCalls:
    """`PlayerCalls` of a runner, by its functions `begun` and `result`."""

    def __init__(
        self,
        calls: CallStream,
        begun: Callable[[Mapping[str, Any]], PlayedStep | None],
        result: Callable[[Outcome, PlayerCall], PlayedStep],
    ) -> None:
        self._calls, self._begun, self._result = calls, begun, result
        self._ready: list[tuple[int, PlayedStep]] = []
        self._open: dict[int, PlayerCall] = {}

    def reset(self, number: int, row: Mapping[str, Any], seed: int) -> None:
        """Ask for a player's first step by its row of the dataset, unless the runner's `begun` has one."""
        begun = self._begun(row)
        if begun is None:
            self._put(number, PlayerCall(row=dict(row), seed=seed))
        else:
            self._ready.append((number, begun))

    def step(self, number: int, state: Any, reply: Reply) -> None:
        """Ask for a step of a player from the state that its last call returned."""
        self._put(number, PlayerCall(state=state, reply=reply))

    def taken(self, *, wait: bool) -> list[tuple[int, PlayedStep]]:
        """Take the results that are ready. Raises ValueError for invalid results."""
        ready, self._ready = self._ready, []
        outcomes = self._calls.taken(wait=wait and not ready)
        return [*ready, *((number, self._result(outcome, self._open.pop(number))) for number, outcome in outcomes)]

    def _put(self, number: int, call: PlayerCall) -> None:
        self._open[number] = call
        self._calls.put(number, sample_of({CALL: call}))


def EnvironmentRunner(
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
) -> PlayerRunner:
    """An environment, ready to play; close it, or use it in a `with` statement.

    `make` makes the environment; it is a class, or a function that imports one. It is called once in each of the
    `workers` processes, or with `inline` in this process: see `FunctionRunner`. With `asynchronous` the methods are
    coroutines, and `concurrency` of them run at a time. If a call raises, ends its process or takes longer than
    `time_limit` seconds, it is made again up to `retries` times; then the episode ends with a `failed` step. Failures
    are logged.
    """
    function = WorkerFunction(name, EnvironmentCall(make, name), asynchronous, inline)
    runner = FunctionRunner(
        [function],
        role="environment",
        time_limit=time_limit,
        workers=workers,
        concurrency=concurrency,
        start_limit=start_limit,
        retries=retries,
    )

    def result(outcome: Outcome, call: PlayerCall) -> PlayedStep:
        if outcome.kind != "value" or outcome.answer is None:
            return PlayedStep(call.state or "", done=True, failed=True, why=outcome.text)
        fields, wrong = json.loads(outcome.answer)
        if wrong is not None:
            raise ValueError(f"the environment {name!r}: {wrong}")
        return PlayedStep(*fields)

    log = logging.getLogger("fppo.environments")
    return PlayerRunner(runner, function, lambda _: None, result, judges=True, log=log)


def is_asynchronous(environment: Any) -> bool:
    """Whether a method of the environment, or of its class, is a coroutine."""
    return any(inspect.iscoroutinefunction(getattr(environment, name, None)) for name in ("reset", "step"))
