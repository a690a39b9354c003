"""Tools that answer turns: the calculator computes and nothing else, and any tool may fail."""

import asyncio
import logging
import os
import time

import pytest

from fppo.data.examples import MESSAGES
from fppo.environments.calls import PlayedStep
from fppo.environments.protocol import Reply
from fppo.rollout.turns import tools
from fppo.rollout.turns.runner import ToolRunner

HERE = __name__
ASK = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<<2*3=", "end": "="}]
SAID = Reply("<<2*3=", (1,), "=")


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


def answers(ready, *contents):
    """What a tool answers to a turn after prompts with these contents."""
    begun = ready.reset(
        [{MESSAGES: [{"role": "user", "content": content}]} for content in contents], [0] * len(contents)
    )
    return ready.step([played.state for played in begun], [SAID] * len(contents))


def goes_on(content, text, *, failed=False):
    """The step of a tool that answered `text`."""
    told = [{"role": "tool", "content": text}]
    return PlayedStep([{"role": "user", "content": content}, ASK[1], *told], told, failed=failed)


def ends(content, *, failed=False):
    """The step of a tool that ended the response."""
    return PlayedStep([{"role": "user", "content": content}], done=True, failed=failed)


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("fn", [six, six_later])
def test_functions_and_coroutines_answer(fn, inline):
    with ToolRunner(fn, inline=inline) as ready:
        assert answers(ready, *"xxxxx") == [goes_on("x", "6")] * 5
        assert answers(ready) == []


@pytest.mark.slow
def test_failures_are_told_counted_and_logged(caplog):
    asked = ("fine", "raise", "exit", "hang", "change", "fine")
    with caplog.at_level(logging.WARNING), ToolRunner(moody, failure="oops", time_limit=4.0) as ready:
        results = answers(ready, *asked)
    oops = [goes_on(content, "oops", failed=True) for content in asked[1:4]]
    assert results == [ends("fine"), *oops, ends("change"), ends("fine")]
    assert "the tool 'moody' failed on 3 of 6 calls: RuntimeError: no" in caplog.text
    with ToolRunner(moody, failure="", inline=True) as ready:
        assert answers(ready, "raise", "change") == [ends("raise", failed=True), ends("change")]


def test_a_turn_that_goes_on_without_a_message_is_left_out_of_the_conversation():
    with ToolRunner(lambda conversation: [], inline=True) as ready:
        assert not ready.judges
        assert answers(ready, "x") == [PlayedStep([{"role": "user", "content": "x"}], [])]


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
        answers(ready, content)


async def slow(conversation):
    await asyncio.sleep(60)


def test_an_episode_begins_while_another_waits_for_its_tool():
    with ToolRunner(slow, inline=True, time_limit=90.0) as ready, ready.open() as calls:
        calls.step(1, ASK[:1], SAID)
        calls.reset(2, {MESSAGES: ASK[:1]}, 0)
        assert calls.taken(wait=True) == [(2, PlayedStep(ASK[:1]))]


class Unsteady:
    """A tool that fails, or sleeps, at its first call in a process."""

    def __init__(self, seconds):
        self.seconds, self.called = seconds, False

    def __call__(self, conversation):
        first, self.called = not self.called, True
        if first and self.seconds is None:
            raise RuntimeError("not yet")
        time.sleep(self.seconds if first else 0)


@pytest.mark.slow
def test_a_tool_has_its_own_time_limit_and_retries():
    for seconds, retries in ((None, 0), (None, 1), (60, 1)):  # a process that was killed begins anew, and sleeps again
        with ToolRunner(Unsteady(seconds), time_limit=1.0, retries=retries, failure="") as ready:
            assert answers(ready, "x") == [ends("x", failed=(seconds, retries) != (None, 1))]


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
