"""What an environment returns is checked before it leaves its process."""

import base64
import json
import math
import pickle
import re

import pytest

from fppo.environments.calls import CALL, EnvironmentCall, PlayerCall
from fppo.environments.protocol import Begin, Reply, Step
from fppo.environments.runner import EnvironmentRunner
from fppo.workers.sample import sample_of


class Returns:
    """An environment that returns what it was given."""

    def __init__(self, result):
        self.result = result

    def reset(self, row, seed):
        return self.result

    def step(self, state, reply):
        return self.result


def answer(result):
    """What leaves an environment's process for a result: the fields, and what is wrong with them."""
    call = EnvironmentCall(lambda: Returns(result), "returns")
    state = base64.b64encode(pickle.dumps(None)).decode()
    asked = (
        PlayerCall(row={}, seed=1) if isinstance(result, Begin) else PlayerCall(state=state, reply=Reply("", (), ""))
    )
    return json.loads(call(sample_of({CALL: asked}))["answer"])


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, "much"])
@pytest.mark.parametrize("where", ["reward", "info"])
def test_a_number_that_is_not_finite_is_refused(number, where):
    step = Step(None, [], number, False, {}) if where == "reward" else Step(None, [], 0.0, False, {"depth": number})
    fields, wrong = answer(step)
    assert fields is None
    assert f"{number!r}" in wrong


def test_finite_numbers_pass():
    fields, wrong = answer(Step(None, [], 1, False, {"depth": 2}))
    assert wrong is None
    assert fields[2:] == [1.0, False, {"depth": 2.0}]


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Step(None, [], "0.5"), "step returned the reward '0.5', no number"),
        (Step(None, [], 1e39), r"step returned the reward 1e\+39; give a finite number"),
        (Step(None, [], "9" * 10**6), "step returned the reward '999"),
        (Step(None, [], 0.0, "no"), "step returned done = 'no'; give True or False"),
        (Step(None, [], 0.0, None), "step returned done = None; give True or False"),
        (Step(None, [], 0.0, False, None), "step returned info = None, no table of numbers"),
        (
            Step(None, [], 0.0, False, {f"n{i}": 1 for i in range(3000)}),
            r"3,000 numbers in info, \['n0', .*at most 100",
        ),
        (Step(None, [], 0.0, False, {"x" * 10**6: 1}), "1 numbers in info, .*at most 200 characters"),
        (Step(None, [], 0.0, False, {1: 1}), "named in texts"),
        (Step(None, [], 0.0, False, {"a": "1"}), r"step returned info\['a'\] = '1', no number"),
        (Step(None, None), r"step returned a NoneType as Step\.messages, None; give a list of messages"),
        (
            Step(None, [{"role": "user", "content": 1, "x": "y" * 10**6}]),
            "a message without text as 'role' and 'content'",
        ),
    ],
)
def test_what_is_wrong_with_a_step_is_said_in_short(step, text):
    fields, wrong = answer(step)
    assert fields is None
    assert re.search(text, wrong)
    assert len(wrong) < 600


def test_messages_of_a_beginning_are_named_as_such():
    for messages, kind in ((None, "NoneType"), ("hello", "str"), ({"role": "user"}, "dict")):
        _, wrong = answer(Begin(0, messages))
        assert wrong.startswith(f"reset returned a {kind} as Begin.messages, ")


def test_numbers_and_flags_of_numpy_pass():
    numpy = pytest.importorskip("numpy")
    step = Step(None, [], numpy.float32(0.5), numpy.bool_(True), {"a": numpy.int64(2), "b": True})
    assert answer(step)[0][2:] == [0.5, True, {"a": 2.0, "b": 1.0}]


class Reads:
    """An environment that reads a column of its row, and a key of its state."""

    def reset(self, row, seed):
        return ({}, [{"role": "user", "content": row["difficulty"]}])

    def step(self, state, reply):
        return (state["missing"],)


def test_a_column_that_the_row_lacks_is_named_with_those_there_are():
    runner = EnvironmentRunner(Reads, name="reads", inline=True)
    (begun, lost) = runner.reset([{"difficulty": "1"}, {"level": 3, "name": "x"}], [1, 2])
    assert not begun.failed
    assert re.search(r"KeyError: 'difficulty' at .*; the row has the columns \['level', 'name'\]$", lost.why)
    (stepped,) = runner.step([begun.state], [Reply("x", (1,), ".")])
    assert re.search(r"KeyError: 'missing' at [^;]*$", stepped.why)
