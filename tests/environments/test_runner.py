"""Calls of environments: at once, together or as they come, against the environment's own methods called in a loop."""

from __future__ import annotations

import base64
import pickle

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.environments import Begin, EnvironmentRunner, Reply, Step
from fppo.environments.calls import EnvironmentCall, PlayedStep, message_problem
from fppo.environments.runner import CallsTogether, EnvironmentCalls, calls_of, is_asynchronous


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
@given(CALLS, st.sampled_from(["together", "one by one", "as they come"]), st.booleans(), st.booleans())
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
        calls = calls_of(runner) if how == "as they come" else calls_of(_Together(runner))
        with calls as open_calls:
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


@attrs.frozen
class _Together:
    """A player that makes many calls at a time, and has none open."""

    runner: EnvironmentRunner

    @property
    def judges(self):
        return True

    def reset(self, rows, seeds):
        return self.runner.reset(rows, seeds)

    def step(self, states, replies):
        return self.runner.step(states, replies)


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


def test_calls_come_as_they_are_ready_where_a_player_can_have_them_open():
    runner = EnvironmentRunner(Adds, name="own", inline=True)
    with calls_of(runner) as one, calls_of(_Together(runner)) as other:
        assert isinstance(one, EnvironmentCalls)
        assert isinstance(other, CallsTogether)


def test_an_environment_runs_as_it_was_told():
    limits = {"time_limit": 2.5, "workers": 3, "concurrency": 5, "start_limit": 6.5, "retries": 4}
    runner = EnvironmentRunner(Adds, name="own", asynchronous=True, **limits)
    assert (runner._time_limit, runner._workers, runner._concurrency, runner._retries) == (2.5, 3, 5, 4)
    assert (runner._pool._count, runner._pool._start_limit, runner._pool._names) == (3, 6.5, "environment own")
    assert (runner._calls.name, runner._calls.asynchronous, runner._calls.inline) == ("own", True, False)
    assert runner._calls.fn._make is Adds
    here = EnvironmentRunner(Adds, name="own", inline=True)
    assert (here._pool, here._calls.asynchronous, here._calls.inline, here._retries) == (None, False, True, 0)


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
