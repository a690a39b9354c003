"""The protocol of environments: a reset and a step, which get the state and return the next one. Worker processes
import this module; it loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]  # {"role", "content"}, and any other keys that a chat template reads
State = Any  # any value that pickles


class Reply(NamedTuple):
    """A turn of the policy."""

    text: str  # without the special token that ended it
    ids: tuple[int, ...]
    end: str  # the text or the token that ended it; "" if it was cut


class Begin(NamedTuple):
    """The start of an episode."""

    state: State
    messages: Sequence[Message] = ()  # the prompt; () leaves the row's own


class Step(NamedTuple):
    """The answer to a turn: the next state and messages, and the turn's reward."""

    state: State
    messages: Sequence[Message] = ()  # read by the policy before its next turn
    reward: float = 0.0  # of this turn
    done: bool = False
    info: Mapping[str, float] = MappingProxyType({})  # numbers that become metrics; the last one of each name counts


class Environment(Protocol):
    """The protocol of environments. Either method may be a coroutine; plain tuples do for `Begin` and `Step`.

    `reset` gets a data row (a dict) and a seed of 62 bits. The beginning of the episode may depend on these alone, so
    that the responses to one prompt begin alike. `step` gets the state that the last call returned, and returns a new
    one. States are pickled between the calls, so that any process may make the next call. `step` also gets a cut turn
    (`end` is "") and the last turn allowed, for their reward; the response ends there.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Any: ...

    def step(self, state: State, reply: Reply) -> Any: ...
