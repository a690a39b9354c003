"""Losses of the protocol against their definitions by hand, in float64: values, gradients, and who has no effect."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.serve.tinker.losses import LOSSES, Loss, first_problem

# (p, q, a, w, low, high, config, s) -> the loss of one target; p is a leaf's entry, s the datum's ratio of gspo
BY_HAND = {
    "cross_entropy": lambda p, q, a, w, low, high, config, s: -w * p,
    "importance_sampling": lambda p, q, a, w, low, high, config, s: -(p - q).exp() * a,
    "ppo": lambda p, q, a, w, low, high, config, s: -smaller((p - q).exp() * a, between((p - q).exp(), low, high) * a),
    "cispo": lambda p, q, a, w, low, high, config, s: -between((p - q).exp(), low, high).detach() * p * a,
    "dro": lambda p, q, a, w, low, high, config, s: -(p * a - 0.5 * config["beta"] * (p - q) ** 2),
    "gspo": lambda p, q, a, w, low, high, config, s: (
        -smaller(s * (p - p.detach()).exp() * a, between(s * (p - p.detach()).exp(), low, high) * a)
    ),
    "stable_reinforce": lambda p, q, a, w, low, high, config, s: (
        -min(math.exp(p.detach() - q), 2.0) * a * p + config["kl_coeff"] * 0.5 * (p - q) ** 2
    ),
}
CONFIGS = {
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 1.3},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.1},
    "stable_reinforce": {"kl_coeff": 0.2},
}


few = settings(max_examples=10)


def smaller(x, y):
    return x if x <= y else y


def between(x, low, high):
    if x < low:
        return torch.zeros_like(x) + low
    return torch.zeros_like(x) + high if x > high else x


def drawn(seed, rows=3, width=5, spread=0.4):
    g = torch.Generator().manual_seed(seed)
    real = torch.rand(rows, width, generator=g) < 0.9
    counts = real & (torch.rand(rows, width, generator=g) < 0.7)
    noise = lambda: torch.randn(rows, width, generator=g, dtype=torch.float64)  # noqa: E731
    nothing = torch.zeros((), dtype=torch.float64)
    log_probs = -noise().abs() - 1
    columns = {
        "weights": noise().where(counts, nothing),
        "advantages": noise().where(counts & (torch.rand(rows, width, generator=g) < 0.8), nothing),
        "logprobs": log_probs + spread * noise(),
        "sequence_ratio_mask": counts.double(),
        "sampled": counts.double(),
    }
    return log_probs, columns, real, counts


def by_hand(name, log_probs, columns, real, config):
    """The loss of rows, target by target."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(log_probs)):
        p, q, a = log_probs[row], columns["logprobs"][row], columns["advantages"][row]
        inside = [t for t in range(len(p)) if real[row, t] and columns["sequence_ratio_mask"][row, t] != 0]
        ratio = math.exp(sum(float(p[t].detach() - q[t]) for t in inside) / len(inside)) if inside else 1.0
        for t in range(len(p)):
            where = real[row, t] and (name == "dro" or columns["sampled"][row, t] != 0)
            if where:
                low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
                low = columns["clip_low_threshold"][row, t] if "clip_low_threshold" in columns else low
                high = columns["clip_high_threshold"][row, t] if "clip_high_threshold" in columns else high
                w = columns["weights"][row, t]
                total = total + BY_HAND[name](p[t], q[t], a[t], w, low, high, config, ratio)
    return total


def slope(fn, log_probs):
    leaf = log_probs.clone().requires_grad_()
    value = fn(leaf)
    return value.detach(), torch.autograd.grad(value, leaf)[0] if value.requires_grad else torch.zeros_like(leaf)


@pytest.mark.parametrize(
    ("name", "own"), [*((x, False) for x in LOSSES), ("ppo", True), ("cispo", True), ("gspo", True)]
)
@given(seed=st.integers(0, 2**20))
@few
def test_equals_its_definition_in_value_and_gradient(name, own, seed):
    """Thresholds of targets, where they have their `own`, come before those of the config."""
    log_probs, columns, real, _ = drawn(seed)
    loss = Loss(name, CONFIGS.get(name, {}))
    if own:
        g = torch.Generator().manual_seed(seed + 1)
        width = torch.rand(2, *real.shape, generator=g, dtype=torch.float64) * 0.5
        columns = columns | {"clip_low_threshold": 1 - width[0], "clip_high_threshold": 1 + width[1]}
    found = slope(lambda x: loss.per_token(x, columns, real).sum(), log_probs)
    expected = slope(lambda x: by_hand(name, x, columns, real, loss.full_config), log_probs)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 2**20))
@few
def test_targets_that_do_not_count_have_no_effect_whatever_they_hold(name, seed):
    log_probs, columns, real, _ = drawn(seed)
    loss = Loss(name)
    counts = loss.counts(columns)
    counts = real if counts is None else real & counts
    spoiled = {
        key: x.where(counts, torch.nan) if key in ("logprobs", "clip_low_threshold") else x
        for key, x in columns.items()
    }
    found = slope(lambda x: loss.per_token(x, spoiled, real).sum(), log_probs)
    torch.testing.assert_close(found, slope(lambda x: loss.per_token(x, columns, real).sum(), log_probs))
    assert (found[1][~counts] == 0).all()


NUMBERS = st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5, -1.0, math.nan, math.inf])
READ = {  # what each loss reads, in order, and what it may
    "cross_entropy": (("weights",), ()),
    "importance_sampling": (("logprobs", "advantages"), ()),
    "ppo": (("logprobs", "advantages"), ("clip_low_threshold", "clip_high_threshold")),
    "cispo": (("logprobs", "advantages"), ("clip_low_threshold", "clip_high_threshold")),
    "dro": (("logprobs", "advantages"), ()),
    "gspo": (("logprobs", "advantages"), ("clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask")),
    "stable_reinforce": (("logprobs", "advantages", "sampled"), ()),
}


def problems_of(name, kl, columns, real):
    """The problems of single targets by hand, as (the place of what is wrong in the order of looks, target, text)."""
    needs, may = READ[name]
    for target, there in enumerate(real):
        own = {key: x[target] for key, x in columns.items()}
        ratio = own.get("sequence_ratio_mask", own["advantages"])
        counts = {
            "cross_entropy": own["weights"] != 0,
            "dro": True,
            "gspo": ratio != 0,
            "stable_reinforce": (own["sampled"] if kl else own["advantages"]) != 0,
        }.get(name, own["advantages"] != 0)
        for place, key in enumerate((*needs, *may)):
            always = key in ("weights", "advantages", "sequence_ratio_mask", "sampled")
            if there and (always or counts) and key in own and not math.isfinite(own[key]):
                yield 2 * place, target, f"{key} that is not finite"
            if key.startswith("clip") and key in own and there and counts and own[key] < 0:
                yield 2 * place + 1, target, f"{key} below 0"
        inside = {"gspo": counts, "stable_reinforce": own["sampled"] != 0}
        if name in inside and there and own["advantages"] != 0 and not inside[name]:
            what = "sequence_ratio_mask" if name == "gspo" else "sampled tokens"
            yield 99, target, f"an advantage outside its {what}"


@pytest.mark.slow
@settings(max_examples=100)
@given(st.sampled_from(sorted(READ)), st.sampled_from([0.0, 0.5]), st.data())
def test_numbers_that_a_loss_cannot_take_are_found(name, kl, data):
    """Those without an effect may be anything, and inputs that the loss does not read."""
    count, (needs, may) = data.draw(st.integers(1, 4)), READ[name]
    chosen = data.draw(st.lists(NUMBERS, min_size=count * 8, max_size=count * 8))
    names = [*READ["stable_reinforce"][0], "weights", *(key for key in READ["gspo"][1] if data.draw(st.booleans()))]
    columns = {key: chosen[place * count : (place + 1) * count] for place, key in enumerate(names)}
    real = data.draw(st.lists(st.sampled_from([True, True, False]), min_size=count, max_size=count))
    loss = Loss(name, {"kl_coeff": kl} if name == "stable_reinforce" else {})
    assert (loss.needs, loss.takes) == (needs, (*needs, *may))
    tensors = {key: torch.tensor([x], dtype=torch.float64) for key, x in columns.items()}
    found = first_problem(loss, tensors, torch.tensor([real]))
    expected = sorted(problems_of(name, kl, columns, real))
    assert found == (expected[0][1:] if expected else None)


def test_without_a_config_the_documented_numbers_hold():
    ratio = torch.tensor([[0.5, 0.9, 1.1, 1.5]], dtype=torch.float64)
    columns = {"logprobs": torch.zeros_like(ratio), "advantages": -torch.ones_like(ratio)}
    found = Loss("ppo").per_token(ratio.log(), columns, torch.ones_like(ratio, dtype=torch.bool))
    torch.testing.assert_close(found, torch.tensor([[0.8, 0.9, 1.1, 1.5]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("ppoo", {}), "did you mean 'ppo'"),
        (("ppo", {"clip_low_treshold": 0.5}), "did you mean 'clip_low_threshold'"),
        (("cross_entropy", {"beta": 0.5}), "knows none"),
        (("dro", {"beta": math.nan}), "beta = nan"),
        (("dro", {"beta": -1.0}), "beta = -1.0"),
        (("ppo", {"clip_low_threshold": 1.3}), "clip_high_threshold = 1.2"),
        (("custom", {}), "needs the graph"),
    ],
)
def test_a_wrong_loss_is_refused_by_name(given, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        Loss(*given)
