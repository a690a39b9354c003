"""Rows move on their own: no row waits for another's environment, and what is sampled does not depend on any delay."""

import functools
from functools import cache

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import models
from fppo._errors import RunFailed
from fppo.environments import Reply
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.spread import SpreadEngine
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.micro_batching import MicroBatching
from tests.models.families import make
from tests.rollout import environments
from tests.rollout.talks import only_generate
from tests.rollout.test_embedded import make_prompts
from tests.rollout.test_environments import asked, engine_of, moods, runner, same, sampled
from tests.rollout.test_turns import SAMPLING, embedded


@cache
def one_turn_of_all_rows_at_a_time():
    """The rollout of an engine that reads whole contexts anew."""
    model, params = make("qwen2")
    return engine_of(only_generate(embedded(model)), runner(environments.Count)).generate(params, asked())


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(delays=st.lists(st.integers(0, 40), min_size=1, max_size=6), max_rows=st.sampled_from((2, 5, 1024)))
def test_rollouts_do_not_depend_on_delays(delays, max_rows):
    expected, (model, params) = one_turn_of_all_rows_at_a_time(), make("qwen2")
    slow = runner(functools.partial(environments.Slow, delays=delays), asynchronous=True)
    rollout = engine_of(embedded(model, max_rows=max_rows), slow).generate(params, asked())
    same(rollout, expected)
    torch.testing.assert_close(rollout.rollout_log_probs, expected.rollout_log_probs, rtol=0, atol=1e-12)
    passed = compute_log_probs(
        params, rollout, forward=Forward(model), micro_batching=MicroBatching(size=4), temperature=SAMPLING.temperature
    )
    torch.testing.assert_close(rollout.rollout_log_probs, passed, rtol=0, atol=1e-12)


def test_no_row_waits_for_anothers_environment():
    """The first row's environment waits for the other rows' last turns: with a barrier it would wait for ever."""
    model, params = make("qwen2")
    prompts = attrs.evolve(make_prompts((3, 2, 4, 3)), extras=batches.Column({"number": i} for i in range(4)))
    turn = Sampling(max_tokens=40, stop_token_ids=tuple(range(31)))  # of one token
    with runner(environments.Held, asynchronous=True, time_limit=60.0) as player:
        rollout = engine_of(embedded(model), player).generate(params, Ask(prompts, turn, Key(3)))
    assert rollout.turn_rewards.sum(1).tolist() == [4.0] * 4


@pytest.mark.slow
def test_ranks_that_answer_together_agree_on_what_has_come():
    expected, (model, params) = one_turn_of_all_rows_at_a_time(), make("qwen2")

    def on_rank(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        placed = models.place(model, mesh)
        own = models.own_params(placed, params, mesh)
        inner = embedded(placed, mesh=mesh)
        spread = SpreadEngine(engine=inner, mesh=mesh, pad_token_id=0, together=inner.together)
        slow = runner(functools.partial(environments.Slow, delays=(3, 0, 11)), asynchronous=True)
        return engine_of(spread, slow, mesh=mesh).generate(own, asked())

    for rollout in simulate({"shard": 2, "tensor": 2}, on_rank):
        same(rollout, expected)


@pytest.mark.parametrize(("failure", "scores"), [("drop", [1.0, None]), ("score", [1.0, 0.0])])
def test_a_failure_means_what_the_setting_says(failure, scores):
    ask = Ask(moods("fine", "raise"), attrs.evolve(SAMPLING, n=1), Key(3))
    rollout = sampled(runner(environments.Moody), ask, failure=failure)
    found = [None if x != x else x for x in rollout.turn_rewards.sum(1).tolist()]
    assert found == scores
    assert [extra.get("tool_failures", 0) for extra in rollout.extras] == [0, 1]


@pytest.mark.parametrize("mood", ["raise", "reset"])
def test_a_failure_may_end_the_run(mood):
    ask = Ask(moods("fine", mood), attrs.evolve(SAMPLING, n=1), Key(3))
    with pytest.raises(RunFailed, match='failure = "raise": RuntimeError: no'):
        sampled(runner(environments.Moody), ask, failure="raise")
    with pytest.raises(RunFailed, match="its prompt is too long, or another than that of its group"):
        sampled(runner(environments.Restless), failure="raise")


def test_calls_that_fail_are_made_again():
    ask = Ask(moods("fine", "fine", "fine"), attrs.evolve(SAMPLING, n=1), Key(3))
    with (
        runner(environments.Flaky) as once,
        runner(environments.Flaky, retries=1) as again,
    ):
        assert sampled(once, ask).turn_rewards.sum(1).isnan().any()
        rollout = sampled(again, ask)
        assert rollout.turn_rewards.sum(1).tolist() == [1.0] * 3
        assert not any(extra.get("tool_failures") for extra in rollout.extras)
        states = [played.state for played in again.reset([{}], [0])]
        (played,) = again.step(states, [Reply("5", (), "x")])
        assert not played.failed
