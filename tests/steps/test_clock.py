"""Schedules by what a run has done: the rates of its updates, one after the other."""

import itertools

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import losses, metrics
from fppo.key import Key
from fppo.steps.actor import UpdateActor
from fppo.steps.clock import Clock, Timeline, UpdateTurn, after_update, at_step, before_update, between
from fppo.steps.confidence import UpdateConfidence, init_confidence
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.schedules import KINDS, schedule
from fppo.steps.train_state import init_state
from fppo.tree import replace
from tests import tiny

each_kind = st.sampled_from(KINDS)


def rates(kind, steps, *, warmup=0, first=0, each=lambda step: 2, planned=None, skipped=lambda number: False):
    """Of all updates of a run, of which the model has none before step `first`, and which is `planned` to have as many
    as settings can know; `each(step)` in a step, of which some are skipped."""
    clock, found, number = Clock(), [], 0
    for step in range(first, steps):
        count = each(step)
        total = (steps * count) if planned is None else planned
        rate = schedule(kind, 1.0, total_steps=total, warmup_steps=warmup, min_ratio=0.01)
        clock = at_step(clock, step, steps)
        for i in range(count):
            turn = UpdateTurn(Timeline(warmup, total), i, count)
            clock, place = before_update(clock, turn)
            found.append(rate(place))
            clock = after_update(clock, turn, {"skipped": metrics.mean(float(skipped(number)))})
            number += 1
        clock = between(clock)
    return found


@given(each_kind, st.integers(1, 12), st.integers(1, 4), st.integers(0, 10))
def test_a_run_as_the_settings_have_it_has_the_schedules_own_rates(kind, steps, each, warmup):
    """To the last bit."""
    total, warmup = steps * each, min(warmup, steps * each - 1)
    rate = schedule(kind, 1.0, total_steps=total, warmup_steps=warmup, min_ratio=0.01)
    assert rates(kind, steps, warmup=warmup, each=lambda step: each) == [rate(n) for n in range(total)]


@given(each_kind, st.integers(2, 12), st.data())
def test_a_model_that_is_updated_from_an_earlier_step_on_has_the_rates_of_that_many_updates(kind, steps, data):
    """Pretraining of the critic ended before its limit: the actor's schedule ends with the run, not before."""
    limit = data.draw(st.integers(1, steps - 1))
    first, warmup = data.draw(st.integers(0, limit)), data.draw(st.integers(0, 2 * (steps - limit) - 1))
    found = rates(kind, steps, warmup=warmup, first=first, planned=2 * (steps - limit))
    real = schedule(kind, 1.0, total_steps=2 * (steps - first), warmup_steps=warmup, min_ratio=0.01)
    if kind != "wsd" or warmup == 0:  # whose decay begins at the same part of what follows the warm-up
        assert found == pytest.approx([real(n) for n in range(2 * (steps - first))])


@given(st.sampled_from(["linear", "cosine", "exponential", "wsd"]), st.integers(2, 10), st.data())
def test_other_epochs_or_mini_batches_in_a_resumed_run_neither_raise_the_rate_nor_end_it_elsewhere(kind, steps, data):
    at, before, after = (data.draw(st.integers(1, n)) for n in (steps - 1, 4, 4))
    warmup = data.draw(st.integers(0, at * before))
    found = rates(kind, steps, warmup=warmup, each=lambda step: before if step < at else after)
    later = found[warmup:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(later))
    whole = rates(kind, steps, warmup=0, each=lambda step: after)
    if warmup == 0 and kind != "wsd":
        assert found[at * before :] == pytest.approx(whole[at * after :])
    # the last update is one before the end, as it always is
    left = (steps * after - warmup * after / before) if warmup else steps * after
    expected = schedule(kind, 1.0, total_steps=10**6, min_ratio=0.01)(10**6 * (1 - 1 / left))
    if kind != "wsd":
        assert found[-1] == pytest.approx(expected, rel=1e-3)


@given(st.integers(1, 6), st.sets(st.integers(0, 9)), st.sampled_from(["constant", "linear"]))
def test_skipped_updates_do_not_use_up_the_warm_up(warmup, skipped, kind):
    """As float16's search for a scale skips the first ones; the rate of a skipped update is that of the next again."""
    found = rates(kind, 20, warmup=warmup, skipped=skipped.__contains__)
    made = [rate for number, rate in enumerate(found) if number not in skipped]
    assert made[:warmup] == [(n + 1) / (warmup + 1) for n in range(warmup)]
    assert max(found) == 1.0
    if kind == "linear":
        ended = next(n for n in itertools.count() if n - len([s for s in skipped if s < n]) == warmup)
        left = 40 - ended
        assert found[ended:] == pytest.approx([1 - 0.99 * n / left for n in range(left)])


def test_an_update_loop_keeps_the_clock():
    """The first updates have no finite gradient, as in float16's search for a scale; a schedule is asked once more for
    each, for the metric."""
    model, params = tiny.model_and_params()
    asked, calls = [], []
    rate = schedule("linear", 0.1, total_steps=8, warmup_steps=2)

    def recorded(place):
        asked.append(rate(place))
        return asked[-1]

    def loss_fn(log_probs, old_log_probs, advantages, mask):
        calls.append(len(calls))
        per_token, report = losses.ppo_clip(log_probs, old_log_probs, advantages, mask)
        return per_token * (float("inf") if len(calls) <= 3 else 1.0), report

    optimizer = sgd(recorded)
    loop = Loop(mini_batch_size=1, micro_batching=MicroBatching(size=1), timeline=Timeline(2, 8))
    state = replace(init_state(params, optimizer), clock=Clock())
    batch = tiny.experience(0, 4)
    batch = attrs.evolve(batch, response_mask=batch.attention_mask[:, 5:])
    for step in range(2):
        state = replace(state, clock=at_step(state.clock, step, 2))
        state, _ = UpdateActor(forward=Forward(model), loss_fn=loss_fn, loop=loop, optimizer=optimizer)(
            state, batch, donate=False
        )
    first, second = 0.1 / 3, 0.1 * 2 / 3
    assert asked[::2] == pytest.approx([first] * 4 + [second] + [0.1, 0.1 * 2 / 3, 0.1 / 3])
    assert (state.step, state.clock.made, state.clock.ended) == (8, 2, 5)


def test_a_mini_batch_that_is_not_full_is_an_update_too():
    loop = Loop(mini_batch_size=4, micro_batching=MicroBatching(4), epochs=2, timeline=Timeline(1, 10))
    assert loop.turn(5, 10) == UpdateTurn(Timeline(1, 10), 5, 6)
    assert loop.turn(0, 8) == UpdateTurn(Timeline(1, 10), 0, 4)


def test_an_update_of_a_perceptron_counts_episodes_too():
    asked = []
    optimizer = sgd(lambda place: asked.append(place) or 0.1)
    batch = attrs.evolve(tiny.experience(0, 4), episodes=torch.tensor([0, 0, 1, 1]))
    batch = attrs.evolve(batch, entropy=batch.old_log_probs.exp())
    loop = Loop(mini_batch_size=1, micro_batching=MicroBatching(size=1), timeline=Timeline(0, 2))
    state = replace(init_state(init_confidence(Key(0), width=3), optimizer), clock=at_step(Clock(), 0, 1))
    UpdateConfidence(loop=loop, optimizer=optimizer)(state, batch)
    assert asked[::2] == [0, 1]
