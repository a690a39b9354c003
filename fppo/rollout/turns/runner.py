"""Run tools in worker processes with a time limit or, if they are trusted, in this process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import attrs

from fppo.data.examples import MESSAGES
from fppo.environments.calls import PlayedStep
from fppo.environments.protocol import Message, Reply
from fppo.environments.runner import CallsTogether, Player, PlayerCalls
from fppo.rollout.turns.tools import CONVERSATION, Respond, SampleTool
from fppo.workers.runner import FunctionRunner
from fppo.workers.sample import Kind, Outcome, Sample, is_asynchronous, name_of
from fppo.workers.streams import CallStream

_log = logging.getLogger("fppo.rollout")


class ToolResult(NamedTuple):
    """A tool's result for a conversation: messages after which the policy continues, or None to end the response."""

    messages: list[Message] | None
    failed: bool = False  # the tool raised, ended its process or took too long, and this stands in


class Responder(Protocol):
    """Protocol of objects that answer the policy's turns."""

    def respond(self, conversations: Sequence[list[Message]]) -> list[ToolResult]: ...


class _Tool(NamedTuple):
    name: str
    fn: SampleTool
    asynchronous: bool
    inline: bool
    kind: Kind = "sample"


class ToolRunner(FunctionRunner):
    """A tool, ready to respond; close it, or use it in a `with` statement.

    It runs in worker processes, or with `inline` in this one: see `FunctionRunner`. Where a call raises, ends its
    process or takes too long, the policy gets `failure` in a message of the role tool; with no `failure` the response
    ends there. Such calls are logged.
    """

    def __init__(
        self,
        respond: Respond,
        *,
        failure: str = "error",
        time_limit: float = 10.0,
        workers: int = 1,
        concurrency: int = 64,
        start_limit: float = 120.0,
        retries: int = 0,
        inline: bool = False,
    ) -> None:
        self._tool = _Tool(name_of(respond), SampleTool(respond), is_asynchronous(respond), inline)
        self._failure = failure
        super().__init__(
            [self._tool],
            role="tool",
            time_limit=time_limit,
            workers=workers,
            concurrency=concurrency,
            start_limit=start_limit,
            retries=retries,
        )

    @contextmanager
    def open(self) -> Iterator[PlayerCalls]:
        """Open the tool for calls; their results can be taken as soon as each is ready."""
        with self.stream(self._tool, "turns", _log) as calls:
            yield _ToolCalls(calls, self._result)

    def respond(self, conversations: Sequence[list[Message]]) -> list[ToolResult]:
        """The tool's result for each conversation. Raises ValueError for a result that is neither messages nor None."""
        samples = [_sample(conversation) for conversation in conversations]
        outcomes = self.logged_outcomes(self._tool, samples, "turns", _log)
        return [self._result(outcome) for outcome in outcomes]

    def _result(self, outcome: Outcome) -> ToolResult:
        if outcome.kind != "value":
            messages: list[Message] = [{"role": "tool", "content": self._failure}]
            return ToolResult(messages if self._failure else None, failed=True)
        assert outcome.answer is not None
        messages, wrong = json.loads(outcome.answer)
        if wrong is not None:
            raise ValueError(
                f"the tool {self._tool.name!r} returned {wrong}: it must return a list of messages, dicts with text as "
                "'role' and 'content', or None to end the response"
            )
        return ToolResult(messages)


@attrs.frozen
class ToolPlayer:
    """A tool as a player. An episode's state is its conversation. A turn that the tool continues without a message is
    left out of it, since the turn has not ended."""

    tools: Responder

    @property
    def judges(self) -> bool:
        """False: a tool rewards nothing, and gives no prompts."""
        return False

    def reset(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[PlayedStep]:
        """Begin episodes with the messages of their rows."""
        del seeds
        return [_begun(row) for row in rows]

    def step(self, states: Sequence[Any], replies: Sequence[Reply]) -> list[PlayedStep]:
        """Answer turns with the tool's messages."""
        asked = [_with_turn(state, reply) for state, reply in zip(states, replies, strict=True)]
        results = zip(asked, states, self.tools.respond(asked), strict=True)
        return [_played(conversation, before, result) for conversation, before, result in results]

    def open(self) -> AbstractContextManager[PlayerCalls]:
        """Open the tool for calls. Results of a `ToolRunner` can be taken as soon as each is ready; other tools make
        waiting calls together."""
        return self.tools.open() if isinstance(self.tools, ToolRunner) else nullcontext(CallsTogether(self))


class _ToolCalls:
    """`PlayerCalls` of a tool; `result` makes a tool's result of an outcome."""

    def __init__(self, calls: CallStream, result: Callable[[Outcome], ToolResult]) -> None:
        self._calls, self._result = calls, result
        self._begun: list[tuple[int, PlayedStep]] = []
        self._open: dict[int, tuple[list[Message], list[Message]]] = {}  # conversations with the turn, and without it

    def reset(self, number: int, row: Mapping[str, Any], seed: int) -> None:
        """Implement `PlayerCalls.reset`."""
        del seed
        self._begun.append((number, _begun(row)))

    def step(self, number: int, state: Any, reply: Reply) -> None:
        """Implement `PlayerCalls.step`."""
        self._open[number] = _with_turn(state, reply), state
        self._calls.put(number, _sample(self._open[number][0]))

    def taken(self, *, wait: bool) -> list[tuple[int, PlayedStep]]:
        """Implement `PlayerCalls.taken`."""
        begun, self._begun = self._begun, []
        outcomes = self._calls.taken(wait=wait and not begun)
        answers = [(number, _played(*self._open.pop(number), self._result(outcome))) for number, outcome in outcomes]
        return [*begun, *answers]


def _begun(row: Mapping[str, Any]) -> PlayedStep:
    return PlayedStep([dict(message) for message in row[MESSAGES]])


def _with_turn(conversation: list[Message], reply: Reply) -> list[Message]:
    return [*conversation, {"role": "assistant", "content": reply.text, "end": reply.end}]


def _played(conversation: list[Message], before: list[Message], result: ToolResult) -> PlayedStep:
    if result.messages is None:
        return PlayedStep(before, done=True, failed=result.failed)
    after = [*conversation, *result.messages] if result.messages else before
    return PlayedStep(after, result.messages, failed=result.failed)


def player_of(tools: Responder | Player) -> Player:
    """Make a player of a tool; a player is returned as it is."""
    return tools if isinstance(tools, ToolPlayer) or hasattr(tools, "judges") else ToolPlayer(tools)  # type: ignore


def _sample(conversation: list[Message]) -> Sample:
    return Sample("", "", None, "", {CONVERSATION: conversation}, (), (), "stop")
