"""Learning rates: the first update moves, warm-up rises, decay ends where it should."""

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fppo.steps.schedules import KINDS, schedule


@given(st.sampled_from(KINDS), st.integers(0, 10), st.integers(11, 50), st.floats(1e-6, 1))
def test_every_schedule_starts_above_zero_rises_to_the_peak_and_stays_in_bounds(kind, warmup, total, ratio):
    rate = schedule(kind, 0.5, total_steps=total, warmup_steps=warmup, min_ratio=ratio)
    rates = [rate(step) for step in range(total + 1)]
    assert rates[0] > 0
    assert all(a < b for a, b in itertools.pairwise(rates[: warmup + 1]))
    assert rates[warmup] == pytest.approx(0.5)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rates[warmup:]))
    assert rates[-1] == pytest.approx(0.5 if kind == "constant" else 0.5 * ratio)


@given(st.integers(0, 10), st.integers(11, 50), st.floats(0, 1), st.floats(0, 1.2))
def test_linear_and_cosine_fall_from_the_peak_to_the_least_rate(warmup, total, ratio, part):
    """Along a line, and half a cosine, between the two: a least rate lifts all of the curve."""
    step = warmup + part * (total - warmup)
    for kind, left in (("linear", 1 - part), ("cosine", (1 + math.cos(math.pi * min(part, 1.0))) / 2)):
        rate = schedule(kind, 0.5, total_steps=total, warmup_steps=warmup, min_ratio=ratio)
        assert rate(step) == pytest.approx(0.5 * (ratio + (1 - ratio) * max(left, 0.0)))


@given(st.integers(0, 4), st.integers(1, 7), st.integers(1, 30), st.floats(0, 1))
@example(0, 22, 22, 0.1)  # 30 / 44 * 22 is less than 15 in floats
def test_a_cosine_of_several_cycles_begins_each_at_the_peak_and_ends_at_the_least_rate(warmup, cycles, more, ratio):
    """By a definition with whole numbers alone: the warm-up, then as many of the span's parts as there are cycles."""
    span, peak = cycles + more, 0.5
    expected = [peak * (n + 1) / (warmup + 1) for n in range(warmup)]
    for n in range(span):
        into = n * cycles - span * (n * cycles // span)  # how far into its cycle, of `span`
        expected.append(peak * (ratio + (1 - ratio) * (1 + math.cos(math.pi * into / span)) / 2))
    expected += [peak * ratio] * 2  # the end, and what comes after it
    rate = schedule("cosine", peak, total_steps=warmup + span, warmup_steps=warmup, min_ratio=ratio, num_cycles=cycles)
    assert [rate(step) for step in range(warmup + span + 2)] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_wsd_is_flat_until_the_decay():
    rate = schedule("wsd", 1.0, total_steps=100, decay_ratio=0.2)
    assert rate(79) == 1.0
    assert rate(90) == pytest.approx(0.5)


@given(st.integers(0, 99), st.integers(0, 100), st.sampled_from([0.1, 0.2, 0.5, 1.0]))
def test_wsd_decays_over_the_last_part_of_all_steps_with_a_warm_up_too(warmup, step, part):
    """Of 100 updates with a decay of 0.2 it begins at 80, or where the warm-up ends if that is later."""
    rate = schedule("wsd", 1.0, total_steps=100, warmup_steps=warmup, decay_ratio=part)
    start = max(100 * (1 - part), warmup)
    expected = (step + 1) / (warmup + 1) if step < warmup else min((100 - step) / (100 - start), 1.0)
    assert rate(step) == pytest.approx(expected)


def test_exponential_loses_the_same_part_with_every_update():
    rate = schedule("exponential", 1.0, total_steps=60, warmup_steps=10, min_ratio=2**-5)
    assert [rate(10 + 10 * n) for n in range(6)] == pytest.approx([2.0**-n for n in range(6)])
    assert rate(1000) == pytest.approx(2**-5)


def test_unknown_kind_and_missing_total_are_errors():
    with pytest.raises(ValueError, match="there are"):
        schedule("step", 1.0)
    with pytest.raises(ValueError, match="total_steps"):
        schedule("cosine", 1.0)
    with pytest.raises(ValueError, match="min_ratio"):
        schedule("exponential", 1.0, total_steps=9)
    with pytest.raises(ValueError, match="num_cycles must be 1 or more, got 0"):
        schedule("cosine", 1.0, total_steps=9, num_cycles=0)
