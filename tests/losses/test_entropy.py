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
    return state.coef.item(), state.error.item(), state.start.item()


@given(
    st.lists(st.floats(1e-3, 3.0) | st.sampled_from([0.0, None]), max_size=6),
    st.sampled_from(["nats", "start"]),
    st.floats(-0.05, 0.2),
)
def test_the_controller_is_its_formula(entropies, unit, coef):
    """Entropies step by step; None is a step without tokens."""
    state, error, start = losses.EntropyState(coef=coef), None, None
    for entropy in entropies:
        tokens = 0.0 if entropy is None else 7.0
        given_ = Mean(torch.tensor(tokens * (entropy or 0.0)).double(), torch.tensor(tokens).double())
        state = losses.update_entropy(state, given_, unit=unit, **RULE)
        if entropy is not None:
            start = entropy if start is None else start
            goal = 0.24 * (start if unit == "start" else 1.0)
            if goal == 0:
                return  # a policy without entropy has none to keep
            now = max(-1.0, min(1 - entropy / goal, 1.0))
            rise = 0.0 if error is None else now - error
            coef, error = max(-0.05, min(coef + 0.02 * (now + 3.0 * rise), 0.2)), now
        expected = (coef, math.nan if error is None else error, math.nan if start is None else start)
        assert numbers(state) == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("gain", [2.0, 8.0, 30.0])
@pytest.mark.parametrize("fall", [0.02, 0.05])
def test_a_falling_entropy_is_held_at_its_target(gain, fall):
    """Where it falls by a part of itself each step, and each 0.01 of the bonus adds 0.01 * gain of it."""
    entropy, state, seen = 0.3, losses.EntropyState(coef=0.0), []
    for _ in range(60):
        entropy *= 1 - fall + gain * float(state.coef)
        seen.append(entropy)
        state = losses.update_entropy(state, metrics.mean(entropy), target=0.24)
    assert max(abs(x / 0.24 - 1) for x in seen[30:]) < 0.1


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
