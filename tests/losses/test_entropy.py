"""The controller of the entropy bonus against its formula in floats, and quantiles against sorted lists."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import losses, metrics
from fppo.metrics import Mean, merge

from .batches import spoil

RULE = {"target": 0.24, "rate": 0.02, "damping": 3.0, "low": -0.05, "high": 0.2}


def numbers(state):
    return state.coef.item(), state.level.item(), state.start.item()


@given(
    st.lists(st.floats(1e-3, 3.0) | st.sampled_from([0.0, None]), max_size=6),
    st.sampled_from(["nats", "start"]),
    st.floats(-0.05, 0.2),
)
def test_the_controller_is_its_formula(entropies, unit, coef):
    """Entropies step by step; None is a step without tokens."""
    state, level, start = losses.EntropyState(coef=coef), None, None
    for entropy in entropies:
        tokens = 0.0 if entropy is None else 7.0
        given_ = Mean(torch.tensor(tokens * (entropy or 0.0)).double(), torch.tensor(tokens).double())
        state = losses.update_entropy(state, given_, unit=unit, **RULE)
        if entropy is not None:
            start = entropy if start is None else start
            goal = 0.24 * (start if unit == "start" else 1.0)
            if goal == 0:
                return  # a policy without entropy has none to keep
            now = 1.0 if entropy == 0 else max(-1.0, min(math.log(goal / entropy), 1.0))
            level = math.asinh(coef / 0.003) if level is None else level
            level = max(math.asinh(-0.05 / 0.003), min(level + 0.02 * now, math.asinh(0.2 / 0.003)))
            coef = max(-0.05, min(0.003 * math.sinh(level + 3.0 * 0.02 * now), 0.2))
        expected = (coef, math.nan if level is None else level, math.nan if start is None else start)
        assert numbers(state) == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("needed", "fall"), [(0.001, 0.02), (0.001, 0.15), (0.01, 0.05), (0.01, 0.15), (0.3, 0.15), (0.13, 0.03)]
)
def test_a_target_alone_holds_a_falling_entropy_whatever_factor_it_needs(needed, fall):
    """A policy as a plant: its log-entropy falls by `fall` a step, less and less for a bonus, and by none where the
    factor is `needed`; the optimizer's momentum delays this, and the draw of prompts adds noise of 5 %."""
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.05
    level, slope, state, seen = math.log(1.25), 0.0, losses.EntropyState(coef=0.0), []
    for step in range(200):
        slope = 0.4 * slope + 0.6 * fall * (float(state.coef) / needed - 1)
        level += slope
        seen.append(math.exp(level + noise[step]))
        state = losses.update_entropy(state, metrics.mean(0.24 * seen[-1]), target=0.24)
    near = [abs(sum(seen[i : i + 10]) / 10 - 1) < 0.1 for i in range(50, 191)]
    assert sum(near) > 0.9 * len(near)
    assert all(near[50:])


def test_noise_alone_keeps_no_bonus_above_the_target():
    """An entropy well above its target has none, whatever the draws of prompts do to single steps."""
    draws = torch.randn(200, generator=torch.Generator().manual_seed(0)) * 0.13
    state, coefs = losses.EntropyState(coef=0.0), []
    for x in draws.tolist():
        state = losses.update_entropy(state, metrics.mean(0.24 * math.exp(0.3 + x)), target=0.24)
        coefs.append(float(state.coef))
    assert max(coefs) < 0.001


def test_a_bound_that_holds_for_long_is_left_at_once():
    state = losses.EntropyState(coef=0.0)
    for _ in range(200):
        state = losses.update_entropy(state, metrics.mean(0.48), target=0.24)
    assert float(state.coef) == 0
    assert float(losses.update_entropy(state, metrics.mean(0.12), target=0.24).coef) > 0.01


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_step_whose_entropy_is_no_number_leaves_the_controller(number):
    """The update of such a step is skipped, and the run goes on."""
    for state in (
        losses.EntropyState(coef=0.01),
        losses.update_entropy(losses.EntropyState(coef=0.01), metrics.mean(0.3), target=0.24),
    ):
        after = losses.update_entropy(state, metrics.mean(number), target=0.24)
        assert numbers(after) == pytest.approx(numbers(state), rel=0, abs=0, nan_ok=True)


def test_impossible_rules_are_named():
    state, entropy = losses.EntropyState(coef=0.0), metrics.mean(0.3)
    for changes, words in (
        ({"target": 0.0}, "target must be > 0"),
        ({"rate": 0.0}, "rate must be > 0"),
        ({"low": 0.2}, "low must be less than high"),
        ({"unit": "bits"}, "unknown unit of an entropy 'bits'"),
    ):
        with pytest.raises(ValueError, match=words):
            losses.update_entropy(state, entropy, **{**RULE, **changes})


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 999))
def test_quantiles_are_those_of_the_sorted_tokens_however_they_are_cut(rows, width, seed):
    g = torch.Generator().manual_seed(seed)
    entropy = torch.rand(rows, width, generator=g).double() ** 9 * 5
    entropy = entropy.where(torch.rand(rows, width, generator=g) < 0.8, 0.0)
    mask = torch.rand(rows, width, generator=g) < 0.7
    cut = seed % rows
    places = slice(None), slice(cut), slice(cut, None)
    counts = [losses.entropy_counts(spoil(entropy[at], mask[at]), mask[at], "a") for at in places]
    whole, pieces = (losses.entropy_quantiles(x, "a") for x in (counts[0], merge(*counts[1:])))
    assert whole.keys() == {"a/p10", "a/p50", "a/p90"}
    found = metrics.report(whole)
    assert found == pytest.approx(metrics.report(pieces), rel=0, abs=0, nan_ok=True)
    ordered = sorted(entropy[mask].tolist())
    for percent in (10, 50, 90):
        if not ordered:
            assert math.isnan(found[f"a/p{percent}"])
            continue
        exact = ordered[max(0, math.ceil(percent * len(ordered) / 100) - 1)]
        assert found[f"a/p{percent}"] == pytest.approx(exact, rel=0.006, abs=2**-20)


@pytest.mark.usefixtures("unhooked")
def test_other_metrics_pass_through():
    report = {"a": metrics.mean(1.0)}
    assert losses.entropy_quantiles(report, "a") == report
    with pytest.raises(ValueError, match="mask must be bool"):
        losses.entropy_counts(torch.zeros(1, 2), torch.ones(1, 2), "a")
