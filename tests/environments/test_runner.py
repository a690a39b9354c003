"""Calls of environments: at once, together or as they come, against the environment's own methods called in a loop."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.environments import Begin, EnvironmentRunner, Reply, Step
from fppo.environments.calls import EnvironmentCall, PlayedStep, message_problem
from fppo.environments.runner import is_asynchronous


class Adds:
    """A state counts what was said; "raise" fails, "wrong" is no step. Plain tuples do."""

    def __init__(self, *, plain=False):
        self.plain, self.calls = plain, 0

    def reset(self, row, seed):
        self.calls += 1
        if row["x"] == "raise":
            raise KeyError("no")
        made = Begin((row["x"], seed), [{"role": "user", "content": f"{row['x']}"}])
        return tuple(made) if self.plain else made

    def step(self, state, reply):
        self.calls += 1
        if reply.text == "raise":
            raise KeyError("no")
        said = [{"role": "tool", "content": reply.text, "name": "t"}]
        made = Step((*state, reply.ids), said, len(reply.ids) / 4, reply.end == "", {"n": len(state)})
        return tuple(made) if self.plain else made


class Later(Adds):
    """The methods as coroutines."""

    async def reset(self, row, seed):
        return super().reset(row, seed)

    async def step(self, state, reply):
        return super().step(state, reply)


def opened(state):
    """The value in a runner's state."""
    return pickle.loads(base64.b64decode(state))


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "raise"]),
        st.lists(
            st.tuples(st.sampled_from(["x", "y", "raise"]), st.lists(st.integers(0, 9), max_size=3), st.booleans()),
            max_size=3,
        ),
    ),
    min_size=1,
    max_size=4,
)


def same(got, expected, before, held=opened):
    """A step of a runner is the environment's own; a failure keeps the state."""
    if expected is None:
        assert (got.done, got.failed, got.messages, got.reward, dict(got.info)) == (True, True, (), 0.0, {})
        assert got.state == before
        assert got.why.startswith("KeyError: 'no' at ")
        return
    step = Step(*expected)
    assert held(got.state) == step.state
    assert (list(got.messages), got.reward, got.done) == (list(step.messages), step.reward, step.done)
    assert dict(got.info) == {name: float(x) for name, x in step.info.items()}
    assert (got.failed, got.why) == (False, "")


def attempt(call):
    try:
        return call()
    except KeyError:
        return None


@settings(max_examples=40)
@given(CALLS, st.sampled_from(["together", "as they come"]), st.booleans(), st.booleans())
def test_steps_are_those_of_the_environment(episodes, how, later, plain):
    by_hand, environment = Adds(), (Later if later else Adds)(plain=plain)
    runner = EnvironmentRunner(lambda: environment, name="own", asynchronous=later, inline=True)
    assert runner.judges
    seeds = [5 + number for number in range(len(episodes))]
    rows = [{"x": x} for x, _ in episodes]
    expected = [attempt(lambda row=row, seed=seed: by_hand.reset(row, seed)) for row, seed in zip(rows, seeds)]

    def played(numbers, at_once, one):
        if how == "together":
            return dict(zip(numbers, at_once(), strict=True)) if numbers else {}
        with runner.open() as open_calls:
            for number in numbers:
                one(open_calls, number)
            found: dict[int, PlayedStep] = {}
            while len(found) < len(numbers):
                found |= dict(open_calls.taken(wait=True))
            assert open_calls.taken(wait=True) == []
        return found

    now = played(
        [*range(len(rows))],
        lambda: runner.reset(rows, seeds),
        lambda calls, number: calls.reset(number, rows[number], seeds[number]),
    )
    for number, each in enumerate(expected):
        same(now[number], each, "")
    for turn in range(3):
        numbers = [n for n, (_, turns) in enumerate(episodes) if turn < len(turns) and not now[n].failed]
        replies = {
            n: Reply(text, tuple(ids), "" if cut else ".") for n in numbers for text, ids, cut in [episodes[n][1][turn]]
        }
        states = {n: now[n].state for n in numbers}
        new = played(
            numbers,
            lambda states=states, replies=replies: runner.step([*states.values()], [*replies.values()]),
            lambda calls, number, states=states, replies=replies: calls.step(number, states[number], replies[number]),
        )
        for n in numbers:
            same(new[n], attempt(lambda state=states[n], said=replies[n]: by_hand.step(opened(state), said)), states[n])
        now |= new
    assert environment.calls == by_hand.calls


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (3.0, "step returned a float, not a Step"),
        ((), "step returned a tuple, not a Step"),
        ((1,) * 6, "step returned a tuple, not a Step"),
        (Step(1, "text"), "step returned a str"),
        (Step(1, [{"role": "user"}]), "step returned a message without text as 'role' and 'content'"),
        (Step(1, [{"role": "assistant", "content": "x"}]), "step returned a message of the role 'assistant'"),
        (Step(1, [{"role": "user", "content": "x", "y": {1}}]), "step returned messages that do not fit JSON"),
        (Step(1, [{"role": "user", "content": "\ud800"}]), "step returned text with half of a surrogate pair"),
        (Step(1, (), "much"), "step returned the reward 'much', no number"),
        (Step(1, (), 1.0, False, {"a": None}), r"step returned info\['a'\] = None, no number"),
        (Step(lambda: 1), "step returned a state that does not pickle"),
    ],
)
def test_what_is_no_step_is_said(result, text):
    class Odd(Adds):
        def step(self, state, reply):
            return result

    runner = EnvironmentRunner(Odd, name="odd", inline=True)
    (begun,) = runner.reset([{"x": "a"}], [1])
    with pytest.raises(ValueError, match=f"the environment 'odd': {text}"):
        runner.step([begun.state], [Reply("x", (1,), ".")])


def test_a_beginning_has_a_state_and_messages_alone():
    class Odd(Adds):
        def reset(self, row, seed):
            return (1, [], 0.5)

    with pytest.raises(ValueError, match="reset returned a tuple, not a Begin"):
        EnvironmentRunner(Odd, name="odd", inline=True).reset([{}], [1])
    assert message_problem(({"role": "tool", "content": "x"},)) is None
    assert message_problem([]) is None


def test_the_environment_is_made_once_in_each_process():
    made = []
    call = EnvironmentCall(lambda: made.append(1) or Adds(), "own")
    call.reward_prepare()
    call.reward_prepare()
    assert made == [1]
    assert call.environment is call.environment
    other = EnvironmentCall(Adds, "own")
    assert isinstance(other.environment, Adds)
    again = pickle.loads(pickle.dumps(other))
    assert (again.__name__, "environment" in vars(again)) == ("own", False)  # it stays in its process


class Where:
    """Its steps say in which process they ran, and how many ran there at a time; a row may have it sleep longer."""

    def __init__(self):
        self.now = self.most = 0

    async def reset(self, row, seed):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(row.get("seconds", 0.2))
        finally:
            self.now -= 1
        return Begin(0, [{"role": "user", "content": f"{os.getpid()} {self.most}"}])

    def step(self, state, reply):
        raise AssertionError


@pytest.mark.slow
def test_calls_run_in_so_many_processes_so_many_at_a_time_and_so_long():
    limits = {"time_limit": 2.0, "workers": 2, "concurrency": 3}
    with EnvironmentRunner(Where, name="where", asynchronous=True, **limits) as runner:
        *begun, late = runner.reset([{}] * 7 + [{"seconds": 60}], range(8))
        where: list[list[str]] = []
        for _ in range(50):  # until the second process is ready, too
            begun += runner.reset([{}] * 7, range(7))
            where = [each.messages[0]["content"].split() for each in begun]
            if len({process for process, _ in where}) == 2:
                break
    assert late.failed
    assert len({process for process, _ in where}) == 2
    assert max(int(most) for _, most in where) == 3


def never():
    time.sleep(60)


def test_an_environment_that_is_not_ready_in_time_is_named():
    with (
        EnvironmentRunner(never, name="never", start_limit=2.0) as runner,
        pytest.raises(ValueError, match="environment never did not load within 2 s"),
    ):
        runner.reset([{}], [1])


def test_coroutines_are_found():
    class Half(Adds):
        async def step(self, state, reply):
            return super().step(state, reply)

    assert [is_asynchronous(each) for each in (Adds, Later, Half, Later(), object())] == [
        False,
        True,
        True,
        True,
        False,
    ]
