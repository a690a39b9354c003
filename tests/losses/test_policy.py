"""Policy losses against loops over the papers' formulas, and the laws that all of them keep."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import losses
from fppo.laws import references
from fppo.metrics import report

from .batches import batches, gradient, mean, spoil

LOW, HIGH = 0.3, 0.4


BOUNDS = {"clip_low": LOW, "clip_high": HIGH}
SCALARS = {
    "ppo_clip": BOUNDS,
    "ppo_clip_single": {**BOUNDS, "dual_clip": None},
    "gspo": BOUNDS,
    "sapo": {"tau_pos": 0.8, "tau_neg": 1.3},
    "gpg": {},
    "cispo": BOUNDS,
    "gmpo": BOUNDS,
    "dppo_tv": {**BOUNDS, "max_ratio": 2.0},
    "dppo_kl": {**BOUNDS, "max_ratio": 2.0},
    "dro": {"beta": 0.7},
    "vespo": {"k_pos": 1.5, "lam_pos": 2.5, "k_neg": 2.0, "lam_neg": 0.5},
    "dcpo": {**BOUNDS, "max_ratio": 1.8},
    "ce_gppo": {**BOUNDS, "beta_low": 0.6, "beta_high": 0.8},
    "aspo": {**BOUNDS, "max_ratio": 1.5},
    "drpo": BOUNDS,
    "opsm": {**BOUNDS, "max_kl": 0.05},
    "topr": {},
    "topr_single": {"level": "token", "low": 0.8, "high": 1.3},
}
CASES = {
    name: tuple(partial(getattr(of, name.removesuffix("_single")), **scalars) for of in (losses, references.losses))
    for name, scalars in SCALARS.items()
}
every_loss = pytest.mark.parametrize("loss_fn", [fn for fn, _ in CASES.values()], ids=CASES)


@pytest.mark.parametrize(("loss_fn", "reference"), CASES.values(), ids=CASES)
@given(batches())
def test_equals_the_loop_in_value_and_gradient(loss_fn, reference, batch):
    for found, expected in (
        (loss_fn(*batch)[0], reference(*batch)[0]),
        (_slope(loss_fn, batch), _slope(reference, batch)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        assert (found[~batch.mask] == 0).all()


@pytest.mark.parametrize(
    "name", ["ppo_clip", "sapo", "gpg", "gmpo", "dro", "dcpo", "drpo"]
)  # the others hold a ratio constant
@given(batches(rows=(1, 1), columns=(1, 4)))
def test_gradient_is_that_of_central_differences(name, batch):
    (_, reference), h = CASES[name], 1e-6
    found = _slope(CASES[name][0], batch)
    for t in batch.mask[0].nonzero().flatten().tolist():
        step = h * (torch.arange(batch.mask.shape[1]) == t)
        up, down = (reference(batch.log_probs + x, *batch[1:])[0].sum().item() for x in (step, -step))
        assert found[0, t].item() == pytest.approx((up - down) / (2 * h), rel=1e-4, abs=1e-6)


def _slope(loss_fn, batch):
    leaf = batch.log_probs.clone().requires_grad_()
    loss = loss_fn(leaf, *batch[1:])[0].sum()
    return torch.autograd.grad(loss, leaf)[0] if loss.requires_grad else torch.zeros_like(leaf)


@pytest.mark.parametrize("name", ["cispo", "dppo_tv", "dppo_kl", "vespo", "topr"])
@given(batches())
def test_gradient_of_constant_ratios_is_loss_over_log_prob(name, batch):
    loss_fn, _ = CASES[name]
    found = gradient(lambda x: loss_fn(x, *batch[1:])[0], batch.log_probs)
    torch.testing.assert_close(found, loss_fn(*batch)[0] / batch.log_probs)


@given(batches())
def test_gspo_gradient_is_the_row_s_ratio_where_unclipped(batch):
    lp, old, adv, mask = batch
    found = gradient(lambda x: CASES["gspo"][0](x, old, adv, mask)[0], lp)
    expected = torch.zeros_like(lp)
    for i in range(len(lp)):
        if mask[i].any():
            s = (lp - old)[i][mask[i]].mean().exp()
            bound = torch.where(adv[i] > 0, s < 1 + HIGH, s > 1 - LOW)
            expected[i] = torch.where(mask[i] & bound, -adv[i] * s, 0.0)
    torch.testing.assert_close(found, expected)


@every_loss
@given(batches())
def test_what_is_masked_changes_nothing(loss_fn, batch):
    lp, old, adv, mask = batch
    dirty = [spoil(x, mask) for x in (lp, old, adv)]
    clean, clean_metrics = loss_fn(*batch)
    found, metrics = loss_fn(*dirty, mask)
    torch.testing.assert_close(found, clean, rtol=0, atol=0)
    assert report(metrics) == pytest.approx(report(clean_metrics), nan_ok=True)
    grad = gradient(lambda x: loss_fn(x, dirty[1], dirty[2], mask)[0], dirty[0])
    assert (grad[~mask] == 0).all()
    torch.testing.assert_close(grad, gradient(lambda x: loss_fn(x, old, adv, mask)[0], lp), rtol=0, atol=0)


@every_loss
@given(batches())
def test_old_equal_new_is_reinforce(loss_fn, batch):
    lp, _, adv, mask = batch
    adv = adv[:, :1].expand_as(adv)  # one advantage per row: what gmpo is defined for
    grad = gradient(lambda x: loss_fn(x, lp, adv, mask)[0], lp)
    torch.testing.assert_close(grad, torch.where(mask, -adv, 0.0))
    numbers = report(loss_fn(lp, lp, adv, mask)[1])
    assert all(value == 0 for value in numbers.values() if mask.any())


@every_loss
@given(batches(rows=(2, 5)))
def test_old_log_probs_and_advantages_are_constants(loss_fn, batch):
    lp, old, adv, mask = batch
    inputs = [lp.clone().requires_grad_(), old.clone().requires_grad_(), adv.clone().requires_grad_()]
    per_token, metrics = loss_fn(*inputs, mask)
    grads = torch.autograd.grad(per_token.sum(), inputs, allow_unused=True)
    assert grads[1] is None
    assert grads[2] is None
    assert not any(x.requires_grad for metric in metrics.values() for x in metric)
    for given_input, before in zip(inputs, (lp, old, adv), strict=True):
        assert torch.equal(given_input.detach(), before)


@every_loss
@given(batches(rows=(2, 5)), st.randoms(use_true_random=False))
def test_rows_are_independent(loss_fn, batch, random):
    order = list(range(len(batch.mask)))
    random.shuffle(order)
    per_token, metrics = loss_fn(*batch)
    shuffled, shuffled_metrics = loss_fn(*(x[order] for x in batch))
    torch.testing.assert_close(shuffled, per_token[order], rtol=1e-14, atol=0)
    assert report(shuffled_metrics) == pytest.approx(report(metrics), nan_ok=True)
    single = torch.cat([loss_fn(*(x[i : i + 1] for x in batch))[0] for i in range(len(batch.mask))])
    torch.testing.assert_close(single, per_token, rtol=1e-14, atol=0)


@every_loss
def test_loss_of_float32_is_float32_and_of_no_rows_is_empty(loss_fn):
    x = torch.full((2, 3), -1.0)
    assert loss_fn(x, x, x, torch.ones(2, 3, dtype=torch.bool))[0].dtype == torch.float32
    assert loss_fn(x[:0], x[:0], x[:0], torch.ones(0, 3, dtype=torch.bool))[0].shape == (0, 3)


@given(batches())
def test_ppo_gradient_is_zero_where_clipped_and_the_dual_clip_bounds(batch):
    lp, old, adv, mask = batch
    ratio = (lp - old).exp()
    per_token, _ = losses.ppo_clip(*batch, **BOUNDS)
    grad = gradient(lambda x: losses.ppo_clip(x, old, adv, mask, **BOUNDS)[0], lp)
    clipped = torch.where(adv > 0, ratio > 1 + HIGH, (ratio < 1 - LOW) | (ratio > 3.0))
    assert (grad[clipped] == 0).all()
    torch.testing.assert_close(grad, torch.where(mask & ~clipped, -adv * ratio, 0.0))
    assert (per_token <= torch.where(adv < 0, -adv * 3.0, torch.inf)).all()
    single, _ = losses.ppo_clip(*batch, **BOUNDS, dual_clip=None)
    assert (per_token <= single).all()
    assert (single >= torch.where(mask, -adv * ratio, 0.0)).all()


@given(batches())
def test_ppo_metrics(batch):
    lp, old, adv, mask = batch
    if not mask.any():
        return
    numbers = report(losses.ppo_clip(*batch, **BOUNDS)[1])
    x, y, a = lp[mask], old[mask], adv[mask]
    r = (x - y).exp()
    assert numbers["actor/ppo_kl"] == pytest.approx((y - x).mean().item())
    clipped = torch.where(a > 0, r > 1 + HIGH, r < 1 - LOW)
    assert numbers["actor/pg_clipfrac"] == pytest.approx(clipped.double().mean().item())
    assert numbers["actor/pg_clipfrac_lower"] == pytest.approx(((a < 0) & (r > 3)).double().mean().item())


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "cispo", "gspo", "gmpo"])
@given(batches())
def test_clip_fraction_is_the_tokens_without_their_full_gradient(name, batch):
    lp, old, adv, mask = batch
    if not mask.any():
        return
    numbers = report(CASES[name][0](*batch)[1])
    r = (lp - old).exp()
    if name == "cispo":
        clipped = (r < 1 - LOW) | (r > 1 + HIGH)
    elif name == "gmpo":
        clipped = (adv > 0) & ((lp - old > HIGH) | (lp - old < -LOW))
    else:
        clipped = gradient(lambda x: CASES[name][0](x, old, adv, mask)[0], lp) == 0
    assert numbers["actor/pg_clipfrac"] == pytest.approx(clipped[mask].double().mean().item())


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "gmpo"])
@given(batches())
def test_the_lower_clip_fraction_is_the_tokens_of_the_other_bound(name, batch):
    """Of dppo those within the trust region whose ratio is cut; of gmpo those of negative advantages, 0 is of none."""
    lp, old, adv, mask = batch
    adv = adv.where(torch.arange(adv.shape[1]) % 3 > 0, 0.0)
    if not mask.any():
        return
    numbers, delta = report(CASES[name][0](lp, old, adv, mask)[1]), lp - old
    if name == "gmpo":
        outside = (delta > HIGH) | (delta < -LOW)
        lower = outside & (adv < 0)
        assert numbers["actor/pg_clipfrac"] == pytest.approx((outside & (adv > 0))[mask].double().mean().item())
    else:
        ones = torch.where(adv > 0, 1.0, -1.0).double()  # whose gradients are 0 where the token is not trusted
        trusted = gradient(lambda x: CASES[name][0](x, old, ones, mask)[0], lp) != 0
        lower = trusted & (delta.exp() > 2.0)
    assert numbers["actor/pg_clipfrac_lower"] == pytest.approx(lower[mask].double().mean().item())


@every_loss
def test_far_off_policy_is_finite(loss_fn):
    if loss_fn in (CASES["gmpo"][0],):
        return  # its exponent is not clamped
    lp = torch.tensor([[-1e4, -1e-4, -1.0]])
    old = torch.tensor([[-1e-4, -1e4, -1.0]])
    for sign in (1.0, -1.0):
        adv = torch.full_like(lp, sign)
        mask = torch.ones_like(lp, dtype=torch.bool)
        assert loss_fn(lp, old, adv, mask)[0].isfinite().all()
        assert gradient(lambda x, adv=adv, mask=mask: loss_fn(x, old, adv, mask)[0], lp).isfinite().all()


def test_gspo_caps_the_log_ratio_at_ten():
    lp, old = torch.zeros(1, 2, dtype=torch.float64), torch.full((1, 2), -30.0, dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    adv = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    per_token, _ = losses.gspo(lp, old, adv, mask, **BOUNDS)
    assert per_token[0].tolist() == pytest.approx([-(1 + HIGH), math.exp(10)])
    assert (gradient(lambda x: losses.gspo(x, old, adv, mask, **BOUNDS)[0], lp) == 0).all()


VMAPPED = ["ppo_clip", "gspo", "cispo", "gmpo", "dppo_tv", "dppo_kl", "dcpo", "ce_gppo", "aspo", "drpo", "opsm"]


@pytest.mark.parametrize("name", VMAPPED)
@given(batches())
def test_vmap_over_clip_ranges_is_a_loop(name, batch):
    loss_fn = getattr(losses, name)
    lows = torch.tensor([0.05, 0.2, 0.5], dtype=torch.float64)
    highs = torch.tensor([0.1, 0.3, 0.9], dtype=torch.float64)

    def value_and_grad(low, high):
        def total(lp):
            per_token, metrics = loss_fn(lp, *batch[1:], clip_low=low, clip_high=high)
            return per_token.sum(), metrics["actor/pg_clipfrac"].total

        return torch.func.grad(total, has_aux=True)(batch.log_probs)

    grads, fractions = torch.func.vmap(value_and_grad)(lows, highs)
    for i, (low, high) in enumerate(zip(lows.tolist(), highs.tolist(), strict=True)):
        grad, fraction = value_and_grad(low, high)
        torch.testing.assert_close(grads[i], grad)
        torch.testing.assert_close(fractions[i], fraction)


@pytest.mark.parametrize(
    ("name", "scalar"),
    [("ppo_clip", "dual_clip"), ("sapo", "tau_pos"), ("sapo", "tau_neg"), ("dro", "beta"), ("dppo_tv", "max_ratio")],
)
@given(batches())
def test_vmap_over_other_scalars_is_a_loop(name, scalar, batch):
    loss_fn = getattr(losses, name)
    values = torch.tensor([1.1, 2.0, 5.0], dtype=torch.float64)
    found = torch.func.vmap(lambda v: loss_fn(*batch, **{scalar: v})[0])(values)
    for i, v in enumerate(values.tolist()):
        torch.testing.assert_close(found[i], loss_fn(*batch, **{scalar: v})[0])


def test_vmap_over_batches():
    g = torch.Generator().manual_seed(0)
    lp, old, adv = (torch.randn(3, 4, 5, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(3, 4, 5, generator=g) < 0.6
    for loss_fn, _ in CASES.values():
        found = torch.func.vmap(lambda *x, f=loss_fn: f(*x)[0])(lp, old, adv, mask)
        torch.testing.assert_close(found, torch.stack([loss_fn(*x)[0] for x in zip(lp, old, adv, mask)]))


def test_gmpo_counts_a_row_once():
    g = torch.Generator().manual_seed(1)
    lp, old = (-torch.rand(3, 4, generator=g, dtype=torch.float64) for _ in range(2))
    adv = torch.tensor([[1.0], [-0.5], [2.0]], dtype=torch.float64).expand(3, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    per_token, _ = losses.gmpo(lp, old, adv, mask, clip_low=9.0, clip_high=9.0)
    weights = losses.loss_weights(mask, "seq-mean-token-mean", totals=losses.count_totals(mask))
    rows = [-a * (lp - old)[i][mask[i]].mean().exp().item() for i, a in ((0, 1.0), (1, -0.5))]
    assert (weights * per_token).sum().item() == pytest.approx(mean(rows))


@every_loss
@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("spoiled", ["log_probs", "old_log_probs", "advantages"])
def test_shapes_that_would_broadcast_are_named(loss_fn, spoiled):
    tensors = {name: torch.zeros(2, 3) for name in ("log_probs", "old_log_probs", "advantages")}
    mask = torch.ones(2, 3, dtype=torch.bool)
    for wrong in (torch.zeros(2, 1), torch.zeros(3), torch.zeros(2, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=rf"^{spoiled} must be floating \[B, T\] = \[2, 3\] as the mask, got"):
            loss_fn(*(tensors | {spoiled: wrong}).values(), mask)
    for wrong in (torch.ones(2, 3), mask[0]):
        with pytest.raises(ValueError, match="mask must be bool"):
            loss_fn(*tensors.values(), wrong)


@pytest.mark.parametrize(
    ("loss_fn", "setting"),
    [
        (partial(losses.ppo_clip, dual_clip=1.0), "dual_clip"),
        (partial(losses.dro, beta=0.0), "beta"),
        (partial(losses.dcpo, max_ratio=1.0), "max_ratio"),
        (partial(losses.topr, level="row"), "unknown level 'row'"),
    ],
)
def test_impossible_scalars_are_named(loss_fn, setting):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=setting):
        loss_fn(x, x, x, x.bool())


def test_the_divergence_of_dppo_is_from_the_old_policy_to_the_new():
    """Of two outcomes, from p = 0.9 to 0.5: 0.9 log(9/5) + 0.1 log(1/5) = 0.368 is in bounds of 0.4; the other way
    round 0.5 log(5/9) + 0.5 log(5) = 0.511 is not."""
    old, new = torch.tensor([[0.9]]).double().log(), torch.tensor([[0.5]]).double().log()
    there = torch.ones(1, 1, dtype=torch.bool)
    for bound, out in ((0.4, 0.0), (0.36, 1.0)):
        _, said = losses.dppo_kl(new, old, -torch.ones(1, 1).double(), there, clip_low=bound)
        assert report(said)["actor/pg_clipfrac"] == out


def test_without_an_advantage_the_lower_bound_of_dppo_holds():
    old, new = torch.tensor([[0.2]]).double().log(), torch.tensor([[0.6]]).double().log()
    there = torch.ones(1, 1, dtype=torch.bool)
    for advantage, out in ((0.0, 0.0), (1.0, 1.0)):
        _, said = losses.dppo_tv(new, old, torch.full((1, 1), advantage).double(), there)
        assert report(said)["actor/pg_clipfrac"] == out
