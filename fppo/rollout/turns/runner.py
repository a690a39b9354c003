"""Run tools in worker processes with a time limit or, if they are trusted, in this process."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fppo.data.examples import MESSAGES
from fppo.environments.calls import PlayedStep, PlayerCall
from fppo.environments.protocol import Message
from fppo.environments.runner import PlayerRunner
from fppo.rollout.turns.tools import Respond, SampleTool, with_turn
from fppo.workers.runner import FunctionRunner, WorkerFunction
from fppo.workers.sample import Outcome, is_asynchronous, name_of


def ToolRunner(
    respond: Respond,
    *,
    failure: str = "error",
    time_limit: float = 10.0,
    workers: int = 1,
    concurrency: int = 64,
    start_limit: float = 120.0,
    retries: int = 0,
    inline: bool = False,
) -> PlayerRunner:
    """A tool, ready to answer turns; close it, or use it in a `with` statement.

    It runs in worker processes, or with `inline` in this one: see `FunctionRunner`. Where a call raises, ends its
    process or takes too long, the policy gets `failure` in a message of the role tool; with no `failure` the response
    ends there. Such calls are logged.

    An episode begins with the messages of its row, and its state is the conversation. A turn that the tool continues
    without a message is left out of it, since the turn has not ended.
    """
    function = WorkerFunction(name_of(respond), SampleTool(respond), is_asynchronous(respond), inline)
    runner = FunctionRunner(
        [function],
        role="tool",
        time_limit=time_limit,
        workers=workers,
        concurrency=concurrency,
        start_limit=start_limit,
        retries=retries,
    )

    def result(outcome: Outcome, call: PlayerCall) -> PlayedStep:
        messages, failed = _messages(function.name, outcome, failure), outcome.kind != "value"
        if messages is None:
            return PlayedStep(call.state, done=True, failed=failed)
        after = [*with_turn(call), *messages] if messages else call.state
        return PlayedStep(after, messages, failed=failed)

    return PlayerRunner(runner, function, _begun, result, judges=False, log=logging.getLogger("fppo.rollout"))


def _begun(row: Mapping[str, Any]) -> PlayedStep:
    return PlayedStep([dict(message) for message in row[MESSAGES]])


def _messages(name: str, outcome: Outcome, failure: str) -> list[Message] | None:
    """The messages of the tool `name` after which the policy continues; None to end the response. Raises ValueError for
    a result that is neither messages nor None."""
    if outcome.kind != "value":
        return [{"role": "tool", "content": failure}] if failure else None
    assert outcome.answer is not None
    messages, wrong = json.loads(outcome.answer)
    if wrong is not None:
        raise ValueError(
            f"the tool {name!r} returned {wrong}: it must return a list of messages, dicts with text as 'role' and "
            "'content', or None to end the response"
        )
    return messages
