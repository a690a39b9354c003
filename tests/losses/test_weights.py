"""Weights and totals: any split of the mini-batch adds up to the definition over all of it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import losses
from fppo.laws import references

from .batches import batches, kept, spoil

HORIZON = 7.0


def horizon_of(mode):
    return HORIZON if mode == "seq-mean-token-sum-norm" else None


every_mode = pytest.mark.parametrize("mode", losses.MODES)


@every_mode
@given(batches(rows=(1, 7)), st.lists(st.integers(1, 6), max_size=6), st.randoms(use_true_random=False))
def test_any_split_adds_to_the_definition(mode, batch, cuts, random):
    x, mask = batch.advantages, batch.mask
    totals = losses.count_totals(mask)
    order = list(range(len(mask)))
    random.shuffle(order)
    bounds = [0, *sorted(c for c in set(cuts) if c < len(mask)), len(mask)]
    total = 0.0
    for low, high in pairwise(bounds):
        part = order[low:high]
        weights = losses.loss_weights(mask[part], mode, totals=totals, horizon=horizon_of(mode))
        assert weights.dtype == torch.float64
        total += (weights * x[part]).sum().item()
    expected = references.losses.mini_batch_loss(x, mask, mode, horizon=horizon_of(mode)).item()
    assert total == pytest.approx(expected, rel=1e-12, abs=1e-13)


@given(batches(rows=(2, 7)))
def test_totals_of_parts_add(batch):
    whole = losses.count_totals(batch.mask)
    parts = [losses.count_totals(row[None]) for row in batch.mask]
    assert sum(p.tokens for p in parts) == whole.tokens
    assert sum(p.sequences for p in parts) == whole.sequences
    assert whole.tokens.dtype == torch.float64
    assert whole.sequences.item() == sum(bool(row) for row in kept(batch.advantages, batch.mask))


@every_mode
@given(batches(), st.integers(1, 5))
def test_padding_width_changes_nothing(mode, batch, pad):
    mask = batch.mask
    wide = torch.nn.functional.pad(mask, (0, pad))
    weights = losses.loss_weights(mask, mode, totals=losses.count_totals(mask), horizon=horizon_of(mode))
    wider = losses.loss_weights(wide, mode, totals=losses.count_totals(wide), horizon=horizon_of(mode))
    assert torch.equal(wider[:, : mask.shape[1]], weights)
    assert (wider[:, mask.shape[1] :] == 0).all()


@every_mode
@given(batches(), st.integers(1, 3))
def test_empty_rows_change_nothing(mode, batch, extra):
    mask = batch.mask
    more = torch.cat([mask, mask.new_zeros(extra, mask.shape[1])])
    weights = losses.loss_weights(mask, mode, totals=losses.count_totals(mask), horizon=horizon_of(mode))
    found = losses.loss_weights(more, mode, totals=losses.count_totals(more), horizon=horizon_of(mode))
    assert torch.equal(found[: len(mask)], weights)


@every_mode
def test_nothing_to_count_gives_zeros(mode):
    mask = torch.zeros(3, 4, dtype=torch.bool)
    weights = losses.loss_weights(mask, mode, totals=losses.count_totals(mask), horizon=horizon_of(mode))
    assert torch.equal(weights, torch.zeros(3, 4, dtype=torch.float64))


@every_mode
@given(batches())
def test_loss_and_gradient_of_a_spoiled_batch_are_finite(mode, batch):
    """The whole way: all-masked rows and garbage outside the mask, policy loss times weights."""
    lp = spoil(batch.log_probs, batch.mask).requires_grad_()
    old, adv = spoil(batch.old_log_probs, batch.mask), spoil(batch.advantages, batch.mask)
    weights = losses.loss_weights(batch.mask, mode, totals=losses.count_totals(batch.mask), horizon=horizon_of(mode))
    loss = (weights * losses.ppo_clip(lp, old, adv, batch.mask)[0]).sum()
    (grad,) = torch.autograd.grad(loss, lp)
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert (grad[~batch.mask] == 0).all()


def test_modes_agree_on_rows_of_equal_length():
    mask = torch.ones(4, 5, dtype=torch.bool)
    totals = losses.count_totals(mask)
    token, sequence = (losses.loss_weights(mask, m, totals=totals) for m in ("token-mean", "seq-mean-token-mean"))
    norm = losses.loss_weights(mask, "seq-mean-token-sum-norm", totals=totals, horizon=5)
    torch.testing.assert_close(token, sequence)
    torch.testing.assert_close(token, norm)


@pytest.mark.usefixtures("unhooked")
def test_settings_that_cannot_be_meant():
    mask = torch.ones(1, 2, dtype=torch.bool)
    totals = losses.count_totals(mask)
    with pytest.raises(ValueError, match="horizon"):
        losses.loss_weights(mask, "seq-mean-token-sum-norm", totals=totals)
    with pytest.raises(ValueError, match="horizon"):
        losses.loss_weights(mask, "token-mean", totals=totals, horizon=3)
    with pytest.raises(ValueError, match="horizon must be > 0"):
        losses.loss_weights(mask, "seq-mean-token-sum-norm", totals=totals, horizon=0)
    with pytest.raises(ValueError, match="'token-mean'"):
        losses.loss_weights(mask, "token_mean", totals=totals)
    for wrong in (mask[0], mask.double()):
        with pytest.raises(ValueError, match="mask must be bool"):
            losses.loss_weights(wrong, "token-mean", totals=totals)
        with pytest.raises(ValueError, match="mask must be bool"):
            losses.count_totals(wrong)


def test_positive_weights_are_those_of_the_mean_over_tokens_of_positive_rows():
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False], [False, False, False]])
    weights = losses.positive_weights(torch.tensor([0.5, 0.0, -1.0, 1.0]), mask)
    assert weights.tolist() == [[0.5, 0.5, 0.0], [0.0] * 3, [0.0] * 3, [0.0] * 3]
    assert losses.positive_weights(torch.tensor([0.0, -1.0, 0.0, 1.0]), mask).abs().sum() == 0
