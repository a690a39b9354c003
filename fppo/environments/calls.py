"""Calls of environments in worker processes, as functions of samples; no torch is loaded here."""

from __future__ import annotations

import base64
import inspect
import json
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from fppo.data.plain import half_pairs
from fppo.environments.protocol import Begin, Environment, Message, Reply, Step
from fppo.workers.sample import Sample

CALL = "call"  # the key under which a worker's sample holds the arguments of a call


class PlayedStep(NamedTuple):
    """The result of a call: a step, whose state is pickled, or the failure that stands in for one."""

    state: Any = ""  # as text, which only the process of the environment opens; or what else a player holds
    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, float] = MappingProxyType({})
    failed: bool = False  # the environment raised, ended its process or took too long
    why: str = ""  # it failed


class EnvironmentCall:
    """An environment as worker processes call it: the arguments of a call in a sample, its result as JSON.

    `make` gives the environment, once in each process. States stay pickled in between: the one process that opens them
    is that of the environment.
    """

    def __init__(self, make: Callable[[], Environment], name: str) -> None:
        self._make, self.__name__ = make, name

    @cached_property
    def environment(self) -> Environment:
        """The environment of this process."""
        return self._make()

    def reward_prepare(self) -> None:
        """Makes the environment ahead of the first call."""
        _ = self.environment

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return EnvironmentCall, (self._make, self.__name__)  # an environment that was made stays in its process

    def __call__(self, sample: Sample) -> Any:
        row, seed, state, reply = sample.extras[CALL]
        if reply is None:
            result = self.environment.reset(row, seed)
        else:
            result = self.environment.step(pickle.loads(base64.b64decode(state)), Reply(*reply))
        kind = Begin if reply is None else Step
        return _later(result, kind) if inspect.isawaitable(result) else _packed(result, kind)


async def _later(result: Any, kind: type[Begin] | type[Step]) -> Any:
    return _packed(await result, kind)


def _packed(result: Any, kind: type[Begin] | type[Step]) -> dict[str, Any]:
    """{"score", "answer"}, where the answer is JSON: [the fields of `PlayedStep`, or what is wrong with the result]."""
    try:
        return {"score": 0.0, "answer": json.dumps([_played(result, kind), None])}
    except ValueError as error:
        return {"score": 0.0, "answer": json.dumps([None, str(error)])}


def _played(result: Any, kind: type[Begin] | type[Step]) -> tuple[Any, ...]:
    """The result's fields. Raises ValueError for a result that is no `Begin` or `Step`, naming what is wrong."""
    method = "reset" if kind is Begin else "step"
    if not isinstance(result, tuple) or not 1 <= len(result) <= len(kind._fields):
        fields = ", ".join(kind._fields)
        raise ValueError(f"{method} returned a {type(result).__name__}, not a {kind.__name__}({fields})")
    step = Step(*result)  # a Begin is the start of one
    if (wrong := message_problem(step.messages)) is not None:
        raise ValueError(f"{method} returned {wrong}")
    reward = _number(step.reward, f"{method} returned the reward")
    info = {str(name): _number(x, f"{method} returned info[{name!r}] =") for name, x in dict(step.info).items()}
    try:
        state = base64.b64encode(pickle.dumps(step.state)).decode()
    except Exception as error:  # pickle raises what objects do
        text = f"{method} returned a state that does not pickle ({error}); hold open things by number, or play again"
        raise ValueError(text) from error
    return state, list(step.messages), reward, bool(step.done), info


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} {value!r}, no number") from error
    if not math.isfinite(number):
        raise ValueError(f"{what} {value!r}; give a finite number")
    return number


def message_problem(result: Any) -> str | None:
    """The reason why a result is no list of messages; None for one that is."""
    if not isinstance(result, (list, tuple)):
        return f"a {type(result).__name__}"
    for message in result:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            return f"a message without text as 'role' and 'content': {message!r}"[:200]
        if message["role"] == "assistant":
            return "a message of the role 'assistant', which is the policy's own"
    try:
        json.dumps(result)
    except (TypeError, ValueError) as error:
        return f"messages that do not fit JSON: {error}"
    if (text := half_pairs(result)) is not None:
        return f"text with half of a surrogate pair, which is no character: {text!a}"[:200]
    return None
