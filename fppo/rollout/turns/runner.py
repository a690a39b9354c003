"""The edge at which tools run: in worker processes with a time limit, or, where they are trusted, here."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Protocol

from fppo.rollout.turns.tools import CONVERSATION, Asked, Message, Respond
from fppo.workers.calls import Mode, call
from fppo.workers.pool import WorkerPool
from fppo.workers.sample import Outcome, Sample, name_of

_log = logging.getLogger("fppo.rollout")


class ToolResult(NamedTuple):
    """A tool's result for a conversation: messages to go on after, or None to end the response."""

    messages: list[Message] | None
    failed: bool = False  # the tool raised, ended its process or took too long, and this stands in


class Responder(Protocol):
    """What answers the policy's turns."""

    def respond(self, conversations: Sequence[list[Message]]) -> list[ToolResult]: ...


class ToolRunner:
    """A tool, ready to respond; close it, or use it in a `with` statement.

    It runs in `workers` processes, which are killed and started again when a call takes more than `time_limit` seconds;
    coroutines run up to `concurrency` at a time. With `inline` it runs in this process, where nothing stops it. Where a
    call raises, ends its process or takes too long, the policy gets `failure` in a message of the role tool; with no
    `failure` the response ends there. Such calls are logged.
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
        inline: bool = False,
    ) -> None:
        if not time_limit > 0 or workers < 1 or concurrency < 1:
            raise ValueError(
                f"time_limit = {time_limit}, workers = {workers}, concurrency = {concurrency}: all must be above 0"
            )
        asynchronous = any(map(inspect.iscoroutinefunction, (respond, type(respond).__call__)))
        self._mode = Mode("sample", asynchronous, time_limit, concurrency)
        self._name, self._asked, self._failure = name_of(respond), Asked(respond), failure
        self._pool = None
        if not inline:
            limits = {"time_limit": time_limit, "start_limit": start_limit}
            self._pool = WorkerPool([(self._name, self._asked)], workers=workers, kind="tool", **limits)

    def start(self) -> None:
        """Starts the worker processes ahead of the first turn, without waiting for them."""
        if self._pool is not None:
            self._pool.start()

    def close(self) -> None:
        """Ends the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> ToolRunner:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def respond(self, conversations: Sequence[list[Message]]) -> list[ToolResult]:
        """The tool's result for each conversation. Raises ValueError for a result that is neither messages nor None."""
        outcomes = self._outcomes([_sample(conversation) for conversation in conversations])
        failed = [number for number, outcome in enumerate(outcomes) if outcome.kind in ("error", "timeout")]
        if failed:
            _log.warning(
                "the tool %r failed on %d of %d turns; turn %d: %s",
                self._name,
                len(failed),
                len(outcomes),
                failed[0],
                outcomes[failed[0]].text,
            )
        return [self._result(outcome) for outcome in outcomes]

    def _outcomes(self, samples: list[Sample]) -> list[Outcome]:
        if not samples:
            return []
        if self._pool is not None:
            return self._pool.run(0, self._mode, samples)
        found: dict[int, Outcome] = {}
        with asyncio.Runner() as loop:
            call(self._asked, samples, self._mode, loop, found.__setitem__, None)
        return [found[number] for number in range(len(samples))]

    def _result(self, outcome: Outcome) -> ToolResult:
        if outcome.kind != "value":
            messages: list[Message] = [{"role": "tool", "content": self._failure}]
            return ToolResult(messages if self._failure else None, failed=True)
        assert outcome.answer is not None
        messages, wrong = json.loads(outcome.answer)
        if wrong is not None:
            raise ValueError(
                f"the tool {self._name!r} returned {wrong}: it must return a list of messages, dicts with text as "
                "'role' and 'content', or None to end the response"
            )
        return ToolResult(messages)


def _sample(conversation: list[Message]) -> Sample:
    return Sample("", "", None, "", {CONVERSATION: conversation}, (), (), "stop")
