"""Clip-Cov and KL-Cov: the losses given a choice, and the choice over the mini-batch."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import losses
from fppo.laws import references
from fppo.metrics import report

from .batches import batches, gradient, spoil

LOW, HIGH = 0.3, 0.4
BOUNDS = {"clip_low": LOW, "clip_high": HIGH}


def uniform(mask, seed):
    return torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(batches(), st.integers(0, 999), st.sampled_from([0.0002, 0.3, 1.0]), st.sampled_from([(0.0, 0.5), (-9.0, 9.0)]))
def test_clip_cov_choice_is_the_loop_s(batch, seed, ratio, bounds):
    noise = uniform(batch.mask, seed)
    low, high = bounds
    found = losses.select_clip_cov(*batch, noise=noise, ratio=ratio, low=low, high=high, **BOUNDS)
    expected = references.losses.select_clip_cov(*batch, noise=noise, ratio=ratio, low=low, high=high, **BOUNDS)
    assert torch.equal(found, expected)


@given(batches(), st.integers(0, 999), st.sampled_from([0.0002, 0.3, 1.0]))
def test_kl_cov_choice_is_the_loop_s(batch, seed, ratio):
    noise = uniform(batch.mask, seed)
    found = losses.select_kl_cov(*batch, noise=noise, ratio=ratio)
    assert torch.equal(found, references.losses.select_kl_cov(*batch, noise=noise, ratio=ratio))


@given(batches(), st.integers(0, 999), st.sampled_from([0.01, 0.3, 2.0]))
def test_m2po_choice_is_the_loop_s(batch, seed, threshold):
    new, old = ((x * 4).round() / 4 for x in batch[:2])
    batch = batch._replace(log_probs=new, old_log_probs=old)
    noise = uniform(batch.mask, seed)  # decides between equal ratios, of which there are some
    found = losses.select_m2po(*batch, noise=noise, threshold=threshold)
    assert torch.equal(found, references.losses.select_m2po(*batch, noise=noise, threshold=threshold))


@given(batches(), st.integers(0, 999), st.sampled_from([0.0002, 0.3, 1.0]))
def test_the_tokens_of_highest_entropy_are_the_loop_s(batch, seed, share):
    """Whatever the rounding of entropies: those after equal prefixes are equal but for it."""
    noise, mask = uniform(batch.mask, seed), batch.mask
    entropy = (uniform(mask, seed + 1) * 2).round()  # many are equal
    count = max(1, int(share * int(mask.sum())))
    order = sorted(mask.nonzero().tolist(), key=lambda place: (-entropy[*place], noise[*place]))
    expected = torch.zeros_like(mask)
    for place in order[:count]:
        expected[*place] = True
    rounding = 1e-6 * (uniform(mask, seed + 2) - 0.5)
    found = losses.select_entropy(spoil(entropy + rounding, mask), mask, noise=spoil(noise, mask), share=share)
    assert torch.equal(found, expected)


def test_a_share_of_entropies_is_above_0_and_at_most_1():
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match="share"):
            losses.select_entropy(x, mask, noise=x, share=share)


SELECTIONS = [
    partial(losses.select_clip_cov, ratio=0.3, low=-9.0, high=9.0),
    partial(losses.select_kl_cov, ratio=0.3),
    partial(losses.select_m2po, threshold=0.1),
]
every_selection = pytest.mark.parametrize("select", SELECTIONS, ids=["clip_cov", "kl_cov", "m2po"])


@every_selection
@given(batches(rows=(2, 6)), st.integers(0, 999), st.randoms(use_true_random=False))
def test_choice_goes_with_the_rows(select, batch, seed, random):
    noise = uniform(batch.mask, seed)
    order = list(range(len(batch.mask)))
    random.shuffle(order)
    found = select(*(x[order] for x in batch), noise=noise[order])
    assert torch.equal(found, select(*batch, noise=noise)[order])


@every_selection
@given(batches(), st.integers(0, 999))
def test_choice_does_not_look_outside_the_mask(select, batch, seed):
    noise = uniform(batch.mask, seed)
    dirty = [spoil(x, batch.mask) for x in batch[:3]]
    found = select(*dirty, batch.mask, noise=spoil(noise, batch.mask))
    assert torch.equal(found, select(*batch, noise=noise))
    assert not (found & ~batch.mask).any()


def test_noise_decides_between_equal_covariances():
    x, mask = torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool)
    noise = torch.arange(12.0).reshape(3, 4).flip(0)
    found = losses.select_kl_cov(x, x, x, mask, noise=noise, ratio=0.25)
    assert torch.equal(found, noise < 3)


def test_default_bounds_take_covariances_between_one_and_five():
    lp = torch.tensor([[-4.0, -0.5, -0.5, -4.0]], dtype=torch.float64)
    adv = torch.tensor([[-1.0, 1.0, -1.0, 1.0]], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    noise = torch.tensor([[0.5, 0.4, 0.1, 0.2]])
    assert losses.select_clip_cov(lp, lp, adv, mask, noise=noise).tolist() == [[False, True, False, False]]
    assert not losses.select_clip_cov(lp, lp, 9 * adv, mask, noise=noise).any()


@given(batches(), st.integers(0, 999))
def test_clip_cov_is_ppo_without_the_selected(batch, seed):
    lp, old, adv, mask = batch
    selected = uniform(mask, seed) < 0.4
    per_token, metrics = losses.clip_cov(*batch, selected=selected, **BOUNDS)
    torch.testing.assert_close(per_token, references.losses.clip_cov(*batch, selected=selected, **BOUNDS)[0])
    assert (per_token[~mask] == 0).all()
    plain = gradient(lambda x: losses.ppo_clip(x, old, adv, mask, **BOUNDS, dual_clip=None)[0], lp)
    found = gradient(lambda x: losses.clip_cov(x, old, adv, mask, selected=selected, **BOUNDS)[0], lp)
    torch.testing.assert_close(found, torch.where(selected, 0.0, plain))
    if mask.any():
        assert report(metrics)["actor/pg_clipfrac"] == pytest.approx(selected[mask].double().mean().item())


@given(batches(), st.integers(0, 999))
def test_kl_cov_holds_the_selected_back(batch, seed):
    lp, old, adv, mask = batch
    selected = uniform(mask, seed) < 0.4
    per_token, metrics = losses.kl_cov(*batch, selected=selected, kl_coef=0.7)
    torch.testing.assert_close(per_token, references.losses.kl_cov(*batch, selected=selected, kl_coef=0.7)[0])
    found = gradient(lambda x: losses.kl_cov(x, old, adv, mask, selected=selected, kl_coef=0.7)[0], lp)
    expected = -adv * (lp - old).exp() + torch.where(selected, 0.7 * (lp - old).sign(), 0.0)
    torch.testing.assert_close(found, torch.where(mask, expected, 0.0))
    if mask.any():
        assert report(metrics)["actor/ppo_kl"] == pytest.approx((lp - old).abs()[mask].mean().item())


@pytest.mark.parametrize("loss_fn", [losses.clip_cov, losses.kl_cov])
@given(batches(), st.integers(0, 999))
def test_what_is_masked_changes_nothing_and_old_equal_new_is_reinforce(loss_fn, batch, seed):
    lp, old, adv, mask = batch
    selected = uniform(mask, seed) < 0.4
    dirty = [spoil(x, mask) for x in batch[:3]]
    found = loss_fn(*dirty, mask, selected=selected)[0]
    torch.testing.assert_close(found, loss_fn(*batch, selected=selected)[0], rtol=0, atol=0)
    grad = gradient(lambda x: loss_fn(x, *dirty[1:], mask, selected=selected)[0], dirty[0])
    clean = gradient(lambda x: loss_fn(x, old, adv, mask, selected=selected)[0], lp)
    torch.testing.assert_close(grad, clean, rtol=0, atol=0)
    on_policy = gradient(lambda x: loss_fn(x, lp, adv, mask, selected=torch.zeros_like(mask))[0], lp)
    torch.testing.assert_close(on_policy, torch.where(mask, -adv, 0.0))


@given(batches(), st.integers(0, 999))
def test_vmap_is_a_loop(batch, seed):
    noise = uniform(batch.mask, seed)
    values = torch.tensor([0.1, 0.4, 0.9], dtype=torch.float64)

    def both(v):
        kl_choice = losses.select_kl_cov(*batch, noise=noise, ratio=v)
        choice = losses.select_clip_cov(*batch, noise=noise, ratio=v, low=-v, high=v, clip_low=v)
        loss = losses.clip_cov(*batch, selected=choice, clip_low=v, clip_high=v)[0]
        return loss, losses.kl_cov(*batch, selected=kl_choice, kl_coef=v)[0]

    found = torch.func.vmap(both)(values)
    for i, v in enumerate(values.tolist()):
        for a, b in zip(found, both(v), strict=True):
            torch.testing.assert_close(a[i], b)


@pytest.mark.usefixtures("unhooked")
def test_settings_that_cannot_be_meant():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for select in (losses.select_clip_cov, losses.select_kl_cov):
        with pytest.raises(ValueError, match="ratio must be > 0"):
            select(x, x, x, mask, noise=x, ratio=0.0)
        for i, name in enumerate(("log_probs", "old_log_probs", "advantages", "noise")):
            arguments = [x[:1] if n == i else x for n in range(4)]
            with pytest.raises(ValueError, match=rf"^{name} must be floating .* \[2, 3\] as the mask, got .* \[1, 3\]"):
                select(arguments[0], arguments[1], arguments[2], mask, noise=arguments[3])
    for loss_fn in (losses.clip_cov, losses.kl_cov):
        for selected in (mask[:1], x):
            with pytest.raises(ValueError, match="selected must be bool"):
                loss_fn(x, x, x, mask, selected=selected)
