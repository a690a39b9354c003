"""ToolRunner that answer turns: the calculator computes and nothing else, and any tool may fail."""

import asyncio
import logging
import os
import time

import pytest

from fppo.data.examples import MESSAGES
from fppo.environments.protocol import Reply
from fppo.rollout.turns import tools
from fppo.rollout.turns.runner import ToolResult, ToolRunner, player_of

HERE = __name__
ASK = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<<2*3=", "end": "="}]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", "24"),
        ("48+24", "72"),
        ("1,000*2", "2000"),
        (".5*3", "1.5"),
        ("10/3", "3.3333"),
        ("2/3", "0.6667"),
        ("-7/2", "-3.5"),
        ("+7/2 - +1", "2.5"),
        ("0.1+0.2", "0.3"),
        ("21/20", "1.05"),
        ("1/1000+2", "2.001"),
        ("1/30000-1/30000", "0"),
        ("-1/30000", "0"),
        ("2*(3+4)*5", "70"),
        (" 2 - -3 ", "5"),
        ("9" * 30 + "*" + "9" * 30, str((10**30 - 1) ** 2)),
    ],
)
def test_the_calculator_computes(expression, value):
    assert tools.evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", "1/0", "2**9", "7//2", "2(3)", "1+", "(" * 40 + "1" + ")" * 40, "x+1", "[1]", "1e9", "().a", "1;2", "05"),
        *("__import__('os')", "9" * 65, "(1).real", "True", "1\n+1", "0x1f", "1_000", "1j", "- -", "()", "1.2.3"),
    ],
)
def test_the_calculator_does_nothing_else(expression):
    assert tools.evaluate(expression) is None


def turn(content, end="="):
    return tools.calculator([ASK[0], {"role": "assistant", "content": content, "end": end}])


def test_the_calculator_answers_an_open_call_only():
    assert turn("so <<48/2=") == [{"role": "tool", "content": "24>>"}]
    assert turn("<<1+1=2>>2 <<2+2=", end=" =") == [{"role": "tool", "content": "4>>"}]
    for other in ("48/2 =", "<<48/2=24>>24 =", "<<a+1=", "<<1/0=", "<<="):
        assert turn(other) == []  # the response goes on by itself
    assert turn("#### 24", end="<eos>") is None
    assert turn("<<48/2", end="\n") is None
    assert turn("<<48/2=", end="<eos>") is None


def six(conversation):
    assert [message["role"] for message in conversation] == ["user", "assistant"]
    return [{"role": "tool", "content": "6"}]


async def six_later(conversation):
    await asyncio.sleep(0.01)
    return six(conversation)


def moody(conversation):
    """What the prompt tells it to do."""
    match conversation[0]["content"]:
        case "raise":
            raise RuntimeError("no")
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(60)
        case "change":
            conversation[0]["content"] = "changed"
    return None


def rubbish(conversation):
    return {
        "text": "6",
        "role": [{"content": "6"}],
        "assistant": [{"role": "assistant", "content": "6"}],
        "json": [{"role": "tool", "content": "6", "more": {1, 2}}],
        "number": 6.0,
    }[conversation[0]["content"]]


SIX = ToolResult([{"role": "tool", "content": "6"}])


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("fn", [six, six_later])
def test_functions_and_coroutines_answer(fn, inline):
    with ToolRunner(fn, inline=inline) as ready:
        assert ready.respond([ASK] * 5) == [SIX] * 5
        assert ready.respond([]) == []


def asked(*contents):
    return [[{"role": "user", "content": content}, ASK[1]] for content in contents]


def test_failures_are_told_counted_and_logged(caplog):
    conversations = asked("fine", "raise", "exit", "hang", "change", "fine")
    with caplog.at_level(logging.WARNING), ToolRunner(moody, failure="oops", time_limit=4.0) as ready:
        results = ready.respond(conversations)
    messages = ToolResult([{"role": "tool", "content": "oops"}], failed=True)
    assert results == [ToolResult(None), messages, messages, messages, ToolResult(None), ToolResult(None)]
    assert "the tool 'moody' failed on 3 of 6 turns; number 1: RuntimeError: no" in caplog.text
    assert conversations == asked("fine", "raise", "exit", "hang", "change", "fine")
    with ToolRunner(moody, failure="", inline=True) as ready:
        assert ready.respond(asked("raise", "change")) == [ToolResult(None, failed=True), ToolResult(None)]


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("text", "a str"),
        ("role", "a message without text as 'role' and 'content'"),
        ("assistant", "'assistant', which is the policy's own"),
        ("json", "do not fit JSON"),
        ("number", "a float"),
    ],
)
def test_a_result_that_is_no_messages_is_an_error(content, text, inline):
    if not inline and content != "text":
        return
    with ToolRunner(rubbish, inline=inline) as ready, pytest.raises(ValueError, match=f"'rubbish' returned .*{text}"):
        ready.respond(asked(content))


def test_a_tool_runs_as_it_was_told():
    limits = {"time_limit": 2.5, "workers": 3, "concurrency": 5, "start_limit": 6.5, "retries": 4}
    ready = ToolRunner(six_later, failure="no", **limits)
    assert (ready._time_limit, ready._workers, ready._concurrency, ready._retries) == (2.5, 3, 5, 4)
    assert (ready._pool._count, ready._pool._start_limit, ready._pool._names) == (3, 6.5, "tool six_later")
    assert (ready._tool.name, ready._tool.asynchronous, ready._tool.inline, ready._failure, ready._role) == (
        *("six_later", True, False, "no"),
        "tool",
    )
    here = ToolRunner(six, inline=True)
    assert (here._pool, here._tool.asynchronous, here._tool.inline, here._failure) == (None, False, True, "error")


def test_names():
    assert tools.resolve("calculator") is tools.calculator
    assert tools.resolve(f"{HERE}:six") is six
    for name, logged in [
        ("calculate", "there is no tool 'calculate'; there are"),
        ("no.such:six", "tool 'no.such:six': the module 'no.such' does not import"),
        (f"{HERE}:sixx", "has no 'sixx'; did you mean 'six'"),
        (f"{HERE}:ASK", "is a list, not a function"),
    ]:
        with pytest.raises(ValueError, match=logged):
            tools.resolve(name)
    with pytest.raises(ValueError, match="the tool 'broken' cannot be sent"):
        ToolRunner(broken())


def broken():
    numbers = (number for number in range(3))  # nothing can pickle it

    def broken(conversation):
        return next(numbers)

    return broken


class Echoes:
    """Answers to turns, without a `ToolRunner`: "end" ends a response, "=" is let go on, others are repeated."""

    def respond(self, conversations):
        said = [conversation[-1]["content"] for conversation in conversations]
        answers = {"end": ToolResult(None), "=": ToolResult([], failed=True)}
        return [answers.get(text, ToolResult([{"role": "tool", "content": f"{text}!"}])) for text in said]


def test_what_answers_all_turns_together_plays_like_a_tool():
    player, asked = player_of(Echoes()), [{"role": "user", "content": "x"}]
    assert not player.judges
    with player.open() as calls:
        for number in (4, 7, 9):
            calls.reset(number, {MESSAGES: asked}, 0)
        begun = dict(calls.taken(wait=True))
        assert [played.state for played in begun.values()] == [asked] * 3
        for number, text in zip(begun, ("a", "=", "end")):
            calls.step(number, begun[number].state, Reply(text, (1,), "."))
        again, on, over = (played for _, played in sorted(calls.taken(wait=True)))
    answer = [{"role": "tool", "content": "a!"}]
    assert (again.state, again.messages) == (
        [*asked, {"role": "assistant", "content": "a", "end": "."}, *answer],
        answer,
    )
    assert (on.state, on.messages, on.done, on.failed) == (asked, [], False, True)  # its turn goes on
    assert (over.state, over.done, over.failed) == (asked, True, False)
