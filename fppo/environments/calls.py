"""Environment calls as functions of samples, for worker processes; no torch is loaded here."""

from __future__ import annotations

import base64
import inspect
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from fppo._errors import shown, words_of
from fppo.data.plain import half_pairs
from fppo.environments.protocol import Begin, Environment, Message, Reply, Step
from fppo.workers.calls import note_columns
from fppo.workers.sample import LONGEST_NAME, NAMED, Sample, number_of

CALL = "call"  # the key under which a worker's sample holds the arguments of a call


class PlayerCall(NamedTuple):
    """A call of a player, the environment, tool or game that answers the policy's turns: a row and a seed begin an
    episode, a state and the policy's reply continue one."""

    row: Mapping[str, Any] | None = None
    seed: int = 0
    state: Any = None
    reply: Reply | None = None  # None: the call begins an episode


class PlayedStep(NamedTuple):
    """The result of a call: a step with a pickled state, or a failure in its place."""

    state: Any = ""  # pickled, as base64, which only the environment's process loads; any value of another player
    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, float] = MappingProxyType({})
    failed: bool = False  # the environment raised, ended its process or took too long
    why: str = ""  # the reason of a failure


class EnvironmentCall:
    """An environment as worker processes call it: a sample holds a call's arguments, and its result is JSON.

    `make` makes the environment, once in each process. Only the environment's process unpickles states.
    """

    def __init__(self, make: Callable[[], Environment], name: str) -> None:
        self._make, self.__name__ = make, name

    @cached_property
    def environment(self) -> Environment:
        """The environment of this process."""
        return self._make()

    def reward_prepare(self) -> None:
        """Make the environment ahead of the first call."""
        _ = self.environment

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return EnvironmentCall, (self._make, self.__name__)  # an environment that was made stays in its process

    def __call__(self, sample: Sample) -> Any:
        row, seed, state, reply = sample.extras[CALL]
        with _noted(row):
            if reply is None:
                result = self.environment.reset(row, seed)
            else:
                result = self.environment.step(pickle.loads(base64.b64decode(state)), reply)
        kind = Begin if reply is None else Step
        return _later(result, kind, row) if inspect.isawaitable(result) else _packed(result, kind)


@contextmanager
def _noted(row: Mapping[str, Any] | None) -> Iterator[None]:
    """Add a note of the row's columns, if there is a row, to a KeyError that the context raises."""
    try:
        yield
    except KeyError as error:
        if row is not None:
            note_columns(error, row)
        raise


async def _later(result: Any, kind: type[Begin] | type[Step], row: Mapping[str, Any] | None) -> Any:
    with _noted(row):
        return _packed(await result, kind)


def _packed(result: Any, kind: type[Begin] | type[Step]) -> dict[str, Any]:
    """Pack a result: the "answer" is JSON of [fields of `PlayedStep`, None], or of [None, what is wrong with it]."""
    try:
        return {"score": 0.0, "answer": json.dumps([_played(result, kind), None])}
    except ValueError as error:
        return {"score": 0.0, "answer": json.dumps([None, str(error)])}


def _played(result: Any, kind: type[Begin] | type[Step]) -> tuple[Any, ...]:
    """Check a result and return its fields, with the state pickled. Raises ValueError, which says what is wrong with
    it."""
    method = "reset" if kind is Begin else "step"
    fields = ", ".join(kind._fields)
    if not isinstance(result, tuple) or not 1 <= len(result) <= len(kind._fields):
        raise ValueError(f"{method} returned a {type(result).__name__}, not a {kind.__name__}({fields})")
    step = Step(*result)  # a Begin has the first fields of a Step
    if not isinstance(step.messages, list | tuple):
        what = f"a {type(step.messages).__name__} as {kind.__name__}.messages, {shown(step.messages)}"
        raise ValueError(f"{method} returned {what}; give a list of messages")
    if (wrong := message_problem(step.messages)) is not None:
        raise ValueError(f"{method} returned {wrong}")
    reward = _number(step.reward, f"{method} returned the reward")
    if not is_flag(step.done):
        raise ValueError(f"{method} returned done = {shown(step.done)}; give True or False")
    info = _info(step.info, f"{method} returned")
    try:
        state = base64.b64encode(pickle.dumps(step.state)).decode()
    except Exception as error:  # objects raise anything when they are pickled
        text = f"{method} returned a state that does not pickle ({words_of(error, 400)}); hold open things by number"
        raise ValueError(f"{text}, or play again") from error
    return state, list(step.messages), reward, bool(step.done), info


def _info(info: Any, prefix: str) -> dict[str, float]:
    """Check the numbers of a step by name. Raises ValueError, beginning with `prefix`, unless `info` maps at most
    `NAMED` short names to numbers."""
    if not isinstance(info, Mapping):
        raise ValueError(f"{prefix} info = {shown(info)}, no table of numbers")
    if len(info) > NAMED or any(not isinstance(name, str) or len(name) > LONGEST_NAME for name in info):
        most = f"at most {NAMED} numbers, named in texts of at most {LONGEST_NAME} characters, become metrics"
        raise ValueError(f"{prefix} {len(info):,} numbers in info, {shown([*islice(info, 3)])}, ...; {most}")
    return {name: _number(x, f"{prefix} info[{name!r}] =") for name, x in info.items()}


def is_flag(value: Any) -> bool:
    """Whether a value is True or False, Python's or numpy's."""
    return type(value).__name__ in ("bool", "bool_")


def _number(value: Any, prefix: str) -> float:
    number = number_of(value)
    if number is None:
        wrong = "; give a finite number" if isinstance(value, int | float) else ", no number"
        raise ValueError(f"{prefix} {shown(value)}{wrong}")
    return number


def message_problem(result: Any) -> str | None:
    """The reason why a tool's or environment's result is no list of messages; None if it is one."""
    if not isinstance(result, (list, tuple)):
        return f"a {type(result).__name__}"
    for message in result:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            return f"a message without text as 'role' and 'content': {shown(message)}"
        if message["role"] == "assistant":
            return "a message of the role 'assistant', which is the policy's own"
    try:
        json.dumps(result)
    except (TypeError, ValueError) as error:
        return f"messages that do not fit JSON: {words_of(error, 400)}"
    if (text := half_pairs(result)) is not None:
        return f"text with half of a surrogate pair, which is no character: {text!a}"[:200]
    return None
