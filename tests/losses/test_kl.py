"""KL estimators in value and gradient, and the controllers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import losses, tree
from fppo.laws import references
from fppo.losses import KLState

from .batches import batches, clip, gradient, kept, mean, spoil


@pytest.mark.parametrize("kind", losses.KL_KINDS)
@given(batches(spread=3.0))
def test_value_and_gradient_are_the_loop_s(kind, batch):
    for fn in (lambda of, x: of.kl_estimate(x, batch.old_log_probs, kind), lambda of, x: _slope(of, x, batch, kind)):
        found, expected = (fn(of, batch.log_probs) for of in (losses, references.losses))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def _slope(of, x, batch, kind):
    return gradient(lambda x: of.kl_estimate(x, batch.old_log_probs, kind), x)


@pytest.mark.parametrize("kind", losses.KL_KINDS)
@given(batches(spread=3.0))
def test_gradient(kind, batch):
    d = batch.log_probs - batch.old_log_probs
    expected = {
        "k1": torch.ones_like(d),
        "abs": d.sign(),
        "k2": d,
        "k3": torch.where((-d).exp() + d - 1 < 10, 1 - (-d).exp(), 0.0),
    }
    found = gradient(lambda x: losses.kl_estimate(x, batch.old_log_probs, kind), batch.log_probs)
    torch.testing.assert_close(found, d if kind.endswith("+") else expected[kind])
    reference = batch.old_log_probs.clone().requires_grad_()
    assert not losses.kl_estimate(batch.log_probs, reference, kind).requires_grad


@given(batches(spread=3.0))
def test_signs(batch):
    lp, ref = batch.log_probs, batch.old_log_probs
    assert (losses.kl_estimate(lp, ref, "k3") >= 0).all()
    assert (losses.kl_estimate(lp, ref, "k2") >= 0).all()
    assert torch.equal(losses.kl_estimate(lp, ref, "k1"), -losses.kl_estimate(ref, lp, "k1"))
    for kind in losses.KL_KINDS:
        assert (losses.kl_estimate(lp, lp, kind) == 0).all()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expectation_is_the_divergence(kind):
    """Summed over the vocabulary with the policy's probabilities, as is the expected k2+ gradient."""
    g = torch.Generator().manual_seed(0)
    logits, other = (0.3 * torch.randn(1, 50, generator=g, dtype=torch.float64) for _ in range(2))
    lp, ref = logits.log_softmax(-1), other.log_softmax(-1)
    exact = (lp.exp() * (lp - ref)).sum()
    assert (lp.exp() * losses.kl_estimate(lp, ref, kind)).sum().item() == pytest.approx(exact.item())
    divergence = gradient(lambda x: x.softmax(-1) * (x.log_softmax(-1) - ref), logits)
    sampled = gradient(lambda x: lp.exp() * losses.kl_estimate(x.log_softmax(-1), ref, f"{kind}+"), logits)
    torch.testing.assert_close(sampled, divergence)


def test_k3_clamps_both_exponent_and_value():
    ref = torch.zeros(1, 4, dtype=torch.float64)
    lp = torch.tensor([[-3.0, -50.0, 50.0, -1e4]], dtype=torch.float64)
    found = losses.kl_estimate(lp, ref, "k3")
    assert found.tolist() == [[10.0] * 4]
    assert (gradient(lambda x: losses.kl_estimate(x, ref, "k3"), lp) == 0).all()


@pytest.mark.parametrize("kind", losses.KL_KINDS)
@given(batches())
def test_what_is_masked_changes_nothing(kind, batch):
    lp, ref, _, mask = batch
    dirty, dirty_ref = spoil(lp, mask), spoil(ref, mask)
    found = losses.kl_estimate(dirty, dirty_ref, kind, mask=mask)
    expected = losses.kl_estimate(lp, ref, kind).where(mask, 0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    grad = gradient(lambda x: losses.kl_estimate(x, dirty_ref, kind, mask=mask), dirty)
    plain = gradient(lambda x: losses.kl_estimate(x, ref, kind), lp)
    torch.testing.assert_close(grad, plain.where(mask, 0.0), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "near"), [("k4", "k"), ("K3+", "k3+"), ("low_var_kl", "'k3'"), ("mse+", "'k2+'"), ("full", "abs")]
)
def test_unknown_kinds_name_a_near_one(kind, near):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=f"unknown kl kind .*{near.replace('+', '[+]')}"):
        losses.kl_estimate(x, x, kind)


@given(batches())
def test_sequence_kl_is_a_mean_of_rows(batch):
    rows = [row for row in kept(batch.advantages, batch.mask) if row]
    found = losses.sequence_kl(spoil(batch.advantages, batch.mask), batch.mask)
    assert found.count.item() == len(rows)
    assert found.total.item() == pytest.approx(sum(mean(row) for row in rows), abs=1e-13)


@given(st.floats(1e-4, 1.0), st.floats(-1.0, 2.0), st.integers(0, 4096), st.floats(0.01, 1.0), st.integers(1, 20000))
def test_adaptive_controller(coef, kl, count, target, horizon):
    state = KLState(coef=coef)
    found = losses.update_kl(state, kl, count, kind="adaptive", target=target, horizon=horizon)
    expected = coef * (1 + clip(kl / target - 1, -0.2, 0.2) * count / horizon)
    assert found.coef.item() == pytest.approx(expected, rel=1e-13)
    assert state.coef.item() == coef
    seen = torch.tensor(kl, dtype=torch.float64), torch.tensor(count)
    tensors = losses.update_kl(state, *seen, kind="adaptive", target=target, horizon=horizon)
    assert tree.digest(tensors) == tree.digest(found)


def test_controllers_at_the_edges():
    state = KLState(coef=0.3)
    assert losses.update_kl(state, 5.0, 100) is state
    assert losses.update_kl(state, math.nan, 0, kind="adaptive").coef.item() == 0.3
    assert losses.update_kl(state, math.nan, 4, kind="adaptive").coef.item() == 0.3  # the next step has a number again
    assert tree.leaves_with_paths(state)[0][0] == ".coef"
    assert state.coef.dtype == torch.float64
    with pytest.raises(ValueError, match="'adaptive'"):
        losses.update_kl(state, 0.1, 4, kind="adaptiv")
    with pytest.raises(ValueError, match="horizon"):
        losses.update_kl(state, 0.1, 4, kind="adaptive", horizon=0)


@pytest.mark.usefixtures("unhooked")
def test_shapes_that_would_broadcast_are_named():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^ref_log_probs must be floating .* \[2, 3\] as log_probs, got .* \[2, 1\]"):
        losses.kl_estimate(x, x[:, :1], "k3")
    with pytest.raises(ValueError, match=r"^ref_log_probs must be floating .* \[2, 3\] as the mask, got .* \[2, 1\]"):
        losses.kl_estimate(x, x[:, :1], "k3", mask=mask)
    with pytest.raises(ValueError, match="mask must be bool"):
        losses.kl_estimate(x, x, "k3", mask=x)
    for name in ("old_log_probs", "ref_log_probs", "correction"):
        for other in (x[:, :1], x[0], x.long()):
            given = {"old_log_probs": x, "ref_log_probs": x, "correction": x} | {name: other}
            with pytest.raises(ValueError, match=rf"^{name} must be floating .* \[2, 3\] as the mask, got"):
                losses.kl_term(x, **given, kind="k3", mask=mask)
    with pytest.raises(ValueError, match=r"^kl must be floating"):
        losses.sequence_kl(x[:1], mask)


DIVERGENCES = {
    "k2": lambda p, q: (p * (p / q).log()).sum(),
    "k1+": lambda p, q: (p * (p / q).log()).sum(),
    "abs+": lambda p, q: (p * (p / q).log()).sum(),
    "k3+": lambda p, q: (p * (p / q).log()).sum(),
    "k3": lambda p, q: (q * (q / p).log()).sum(),
    "abs": lambda p, q: (p - q).abs().sum(),
}


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("lag", [0.0, 0.7])
@pytest.mark.parametrize("engine", [0.0, 0.5])
@given(seed=st.integers(0, 99))
def test_the_expected_gradient_of_the_term_is_a_divergences(kind, lag, engine, seed):
    """On policy, after updates that moved it, and of tokens that another policy sampled: exactly, over all tokens."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(5, generator=g, dtype=torch.float64)  # noqa: E731
    logits = draw().requires_grad_()
    log_q = (logits.detach() + 0.3 * draw()).log_softmax(0)[None]  # so near that k3 is not clamped
    old = (logits.detach() + lag * draw()).log_softmax(0)[None]
    sampler = (old[0] + engine * draw()).log_softmax(0)[None]
    mask, log_p = torch.ones(1, 5, dtype=torch.bool), logits.log_softmax(0)[None]
    correction = (old - sampler).exp() if engine else None
    terms = losses.kl_term(log_p, old, log_q, kind, mask=mask, correction=correction)
    found = torch.autograd.grad((sampler.exp() * terms).sum(), logits)[0]
    p = logits.softmax(0)
    expected = torch.autograd.grad(DIVERGENCES[kind](p, log_q[0].exp()), logits)[0]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_what_is_masked_reaches_no_term():
    nan = torch.full((1, 3), math.nan, dtype=torch.float64)
    mask, leaf = torch.zeros(1, 3, dtype=torch.bool), nan.clone().requires_grad_()
    terms = losses.kl_term(leaf, nan, nan, "k3", mask=mask, correction=nan)
    assert not terms.any()
    assert not torch.autograd.grad(terms.sum(), leaf)[0].any()
