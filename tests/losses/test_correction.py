"""Rollout correction against loops over verl's definitions: weights, rejection, metrics."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import losses
from fppo.laws import references
from fppo.metrics import report

from .batches import batches, clip, kept, mean, spoil, std

P = "rollout_corr/"
PAIRS = [2.0, 1.5, (0.5, 2.0), "0.8_1.1"]


def bounds_of(threshold):
    if isinstance(threshold, str):
        threshold = tuple(float(part) for part in threshold.split("_"))
    return threshold if isinstance(threshold, tuple) else (None, threshold)


def ratios(batch):
    """Each row's log-ratios, training less rollout: here the batch's new log-probs train, its old ones sampled."""
    return kept(batch.log_probs - batch.old_log_probs, batch.mask)


def slow_weights(batch, level, threshold):
    """Rows of (weights after, weights before) the threshold."""
    low, high = bounds_of(threshold)
    rows = []
    for row in ratios(batch):
        logs = row if level == "token" else [sum(row)] * len(row)
        raw = [math.exp(clip(x, -20, 20)) for x in logs]
        cut = [min(w, high) if low is None else w if low <= w <= high else 0.0 for w in raw]
        rows.append((cut, raw))
    return rows


def correct(batch, **settings):
    return losses.rollout_correction(batch.log_probs, batch.old_log_probs, batch.mask, **settings)


def weights_of(correction: losses.Correction) -> torch.Tensor:
    assert correction.weights is not None
    return correction.weights


@pytest.mark.parametrize("level", losses.LEVELS)
@pytest.mark.parametrize("normalize", [False, True])
@given(batches(), st.sampled_from(PAIRS))
def test_weights_are_the_loop_s(level, normalize, batch, threshold):
    found = correct(batch, level=level, threshold=threshold, batch_normalize=normalize)
    low, high = bounds_of(threshold)
    plain = (*batch[:2], batch.mask)
    how = {"level": level, "threshold": high if low is None else (low, high)}
    expected = references.losses.rollout_correction(*plain, **how, batch_normalize=normalize)
    torch.testing.assert_close(weights_of(found), weights_of(expected), rtol=1e-12, atol=1e-14)
    if normalize and batch.mask.any():
        once = weights_of(references.losses.rollout_correction(*plain, **how))
        factor = once[batch.mask].mean() if level == "token" else once.amax(1)[batch.mask.any(1)].mean()
        name = P + "rollout_is_batch_norm_factor"
        assert report(found.metrics)[name] == pytest.approx(factor.item() if factor > 1e-8 else 1.0)
    assert (weights_of(found)[~batch.mask] == 0).all()
    assert torch.equal(found.mask, batch.mask)


@pytest.mark.parametrize("level", losses.LEVELS)
@given(batches(), st.sampled_from(PAIRS))
def test_weight_metrics_are_the_loop_s(level, batch, threshold):
    if not batch.mask.any():
        return
    numbers = report(correct(batch, level=level, threshold=threshold).metrics)
    low, high = bounds_of(threshold)
    floor = 1 / high if low is None else low
    rows = [(cut, raw) for cut, raw in slow_weights(batch, level, threshold) if cut]
    w = [x for cut, _ in rows for x in cut]
    raws = [x for _, raw in rows for x in raw]
    seq, raw_seq = [mean(cut) for cut, _ in rows], [mean(raw) for _, raw in rows]
    over = raws if level == "token" else [raw[0] for _, raw in rows]
    extremes = w if level == "token" else over
    expected = {
        "mean": mean(w),
        "std": std(w, unbiased=False),
        "max": max(extremes),
        "min": min(extremes),
        "eff_sample_size": mean(w) ** 2 / mean(x * x for x in w) if any(w) else 0.0,
        "ratio_fraction_high": mean(x > high for x in over),
        "ratio_fraction_low": mean(x < floor for x in over),
        "seq_mean": mean(seq),
        "seq_std": std(seq, unbiased=True),
        "seq_max": max(seq),
        "seq_min": min(seq),
        "seq_max_deviation": max(abs(x - 1) for x in seq),
        "seq_fraction_high": mean(x > high for x in raw_seq),
        "seq_fraction_low": mean(x < floor for x in raw_seq),
    }
    if low is not None:
        expected["oob_ratio"] = mean(not low <= x <= high for x in raws)
    found = {k.removeprefix(P + "rollout_is_"): v for k, v in numbers.items() if "rollout_is_" in k}
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-7)


@pytest.mark.parametrize("option", losses.REJECTIONS)
@given(batches(spread=0.6))
def test_each_rejection_is_the_loop_s(option, batch):
    low, high, text = (math.log(0.7), math.log(1.5), "0.7_1.5") if option[-1] == "1" else (0.0, 0.15, "0.15")
    found = correct(batch, level=None, reject=option, reject_threshold=text)
    assert found.weights is None
    stats = [references.losses.rejection_statistic(row, option) if row else None for row in ratios(batch)]
    keeps = [[low <= s <= high for s in st[0]] if st else [] for st in stats]
    for i, columns in enumerate(batch.mask.tolist()):
        verdicts = iter(keeps[i])
        assert found.mask[i].tolist() == [keep and next(verdicts) for keep in columns]
    if not batch.mask.any():
        return
    tokens = [s for st in stats if st for s in st[0]]
    rows = [st[1] for st in stats if st]
    x = tokens if option.startswith("token") else rows
    rejected = [not all(row) for row in keeps if row]
    expected = {
        "mean": mean(tokens),
        "max": max(x),
        "min": min(x),
        "std": std([clip(s, low, high) for s in tokens], unbiased=False),
        "fraction_high": mean(s > high for s in x),
        "fraction_low": mean(s < low for s in x),
        "seq_mean": mean(rows),
        "seq_std": std(rows, unbiased=True),
        "seq_max": max(rows),
        "seq_min": min(rows),
        "seq_max_deviation": max(abs(s) for s in rows),
        "seq_fraction_high": mean(s > high for s in rows),
        "seq_fraction_low": mean(s < low for s in rows),
        "masked_fraction": 1 - mean(k for row in keeps for k in row),
        "seq_masked_fraction": mean(rejected),
    }
    numbers = report(found.metrics)
    prefix = f"{P}rollout_rs_{option}_"
    got = {k.removeprefix(prefix): v for k, v in numbers.items() if k.startswith(prefix)}
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert numbers[P + "rollout_rs_masked_fraction"] == pytest.approx(expected["masked_fraction"])
    assert numbers[P + "rollout_rs_seq_masked_fraction"] == pytest.approx(expected["seq_masked_fraction"])


@given(batches(spread=0.4), st.sampled_from(["0.5_2,0.1,1.5", "2.0"]))
def test_options_are_joined_by_and(batch, thresholds):
    options = ["token_k1", "seq_max_k3", "seq_mean_k1"]
    each = thresholds.split(",") if "," in thresholds else [thresholds] * 3
    found = correct(batch, level="token", reject=", ".join(options), reject_threshold=thresholds)
    expected = batch.mask
    for option, threshold in zip(options, each, strict=True):
        expected = expected & correct(batch, level=None, reject=option, reject_threshold=threshold).mask
    assert torch.equal(found.mask, expected)
    assert (weights_of(found)[~found.mask] == 0).all()
    plain = weights_of(correct(batch, level="token"))
    torch.testing.assert_close(found.weights, plain.where(found.mask, 0.0))


def test_rejected_tokens_leave_the_denominator():
    rollout = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    train = torch.tensor([[-1.0, -5.0, -1.0], [-4.0, -4.0, -4.0]], dtype=torch.float64)
    mask = torch.ones(2, 3, dtype=torch.bool)
    found = losses.rollout_correction(train, rollout, mask, reject="token_k2", reject_threshold=1.0)
    assert found.mask.tolist() == [[True, False, True], [False, False, False]]
    totals = losses.count_totals(found.mask)
    assert (totals.tokens.item(), totals.sequences.item()) == (2, 1)
    weights = losses.loss_weights(found.mask, "token-mean", totals=totals)
    assert weights.tolist() == [[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]


def test_k1_bounds_rollout_over_training():
    rollout, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    half = rollout - math.log(2)  # training gives half the probability: rollout / training is 2
    for bounds, keeps in (("0.9_2.5", True), ("0.4_1.5", False), ("2.1", True), ("1.9", False)):
        found = losses.rollout_correction(half, rollout, mask, reject="token_k1", reject_threshold=bounds)
        assert found.mask.item() is keeps


@given(batches(columns=(1, 1)))
def test_scopes_agree_on_rows_of_one_token(batch):
    token, sequence = (correct(batch, level=level) for level in losses.LEVELS)
    torch.testing.assert_close(token.weights, sequence.weights)
    for kind, threshold in (("k1", 1.3), ("k2", 0.1), ("k3", 0.1)):
        scopes = [o for o in losses.REJECTIONS if o.endswith(kind)]
        masks = [correct(batch, level=None, reject=o, reject_threshold=threshold).mask for o in scopes]
        assert all(torch.equal(mask, masks[0]) for mask in masks)


@pytest.mark.slow
@given(batches())
def test_equal_policies_weigh_one_and_reject_nothing(batch):
    for level, threshold, reject_threshold in product(losses.LEVELS, ((0.999, 1.001), (1.0, 1.0)), (1.01, 1.0)):
        found = losses.rollout_correction(
            batch.log_probs,
            batch.log_probs,
            batch.mask,
            level=level,
            threshold=threshold,
            batch_normalize=True,
            reject=",".join(losses.REJECTIONS),
            reject_threshold=reject_threshold,
        )
        assert torch.equal(weights_of(found), batch.mask.double())
        assert torch.equal(found.mask, batch.mask)


EVERYTHING = {
    "threshold": (0.2, 3.0),
    "batch_normalize": True,
    "reject": "token_k1,seq_mean_k3,seq_max_k2",
    "reject_threshold": "4.0,2.0,3.0",
}


@pytest.mark.parametrize("level", losses.LEVELS)
@given(batches())
def test_what_is_masked_changes_nothing(level, batch):
    dirty = batch._replace(
        log_probs=spoil(batch.log_probs, batch.mask), old_log_probs=spoil(batch.old_log_probs, batch.mask)
    )
    found, expected = (correct(b, level=level, **EVERYTHING) for b in (dirty, batch))
    assert torch.equal(weights_of(found), weights_of(expected))
    assert torch.equal(found.mask, expected.mask)
    assert report(found.metrics) == pytest.approx(report(expected.metrics), nan_ok=True)
    empty = batch._replace(mask=torch.zeros_like(batch.mask))
    assert (correct(empty, level=level, **EVERYTHING).weights == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratios_are_clamped(dtype):
    """No ratio overflows, not that of a row either, and the squares of none."""
    apart = torch.tensor([[300.0, -0.5], [-300.0, 0.25], [15.0, 15.0]], dtype=dtype)
    sampled = torch.full_like(apart, -301.0)
    mask, top = torch.ones(3, 2, dtype=torch.bool), math.exp(20)
    given = {"threshold": 1e30, "reject": "token_k1,token_k2,token_k3", "reject_threshold": 1e30}
    found = losses.rollout_correction(sampled + apart, sampled, mask, **given)
    assert found.weights is not None
    expected = [[top, math.exp(-0.5)], [1 / top, math.exp(0.25)], [math.exp(15), math.exp(15)]]
    assert found.weights.tolist() == [pytest.approx(row, rel=1e-6) for row in expected]
    numbers = report(found.metrics)
    assert numbers[P + "rollout_rs_token_k1_min"] == -20
    assert numbers[P + "rollout_rs_token_k2_max"] == 200
    assert numbers[P + "rollout_rs_token_k3_max"] == pytest.approx(top - 21)
    rows = losses.rollout_correction(sampled + apart, sampled, mask, level="sequence", threshold=1e30)
    assert rows.weights is not None
    assert rows.weights[:, 0].tolist() == pytest.approx([top, 1 / top, top], rel=1e-6)


def test_small_differences_of_single_precision_are_seen():
    """k3 of a ratio of 1 + 1e-4 is 5e-9: less than what float32 leaves of exp(x) - 1 - x."""
    old = torch.full((2, 3), -1.0)
    apart = (old + 1e-4).double() - old.double()
    mask = torch.ones(2, 3, dtype=torch.bool)
    found = losses.rollout_correction(old + 1e-4, old, mask, reject="token_k3", reject_threshold=1.0)
    expected = (apart.exp() - 1 - apart).mean().item()
    assert report(found.metrics)[P + "rollout_rs_token_k3_mean"] == pytest.approx(expected, rel=1e-4)


@given(batches())
def test_weights_are_constants_of_the_input_s_dtype(batch):
    single = batch._replace(log_probs=batch.log_probs.float().requires_grad_())
    found = correct(single)
    assert weights_of(found).dtype == torch.float32
    assert not weights_of(found).requires_grad


@given(batches(spread=0.5))
def test_geometric_mean_of_a_row(batch):
    weights = spoil((batch.log_probs - batch.old_log_probs).exp(), batch.mask)
    found = losses.geometric_mean(weights, batch.mask)
    for got, row in zip(kept(found, batch.mask), kept(weights, batch.mask), strict=True):
        assert got == pytest.approx([math.prod(row) ** (1 / len(row))] * len(row) if row else [], rel=1e-8)
    assert (found[~batch.mask] == 0).all()


@given(batches())
def test_off_policy_metrics_are_the_loop_s(batch):
    rows = [(t, r) for t, r in zip(kept(batch.log_probs, batch.mask), kept(batch.old_log_probs, batch.mask)) if t]
    if not rows:
        return
    deltas = [[a - b for a, b in zip(t, r, strict=True)] for t, r in rows]
    flat = [d for row in deltas for d in row]
    diff = [mean(r) - mean(t) for t, r in rows]
    expected = {
        "kl": -mean(flat),
        "k3_kl": mean(math.exp(d) - d - 1 for d in flat),
        "training_ppl": mean(math.exp(-mean(t)) for t, _ in rows),
        "training_log_ppl": mean(-mean(t) for t, _ in rows),
        "rollout_ppl": mean(math.exp(-mean(r)) for _, r in rows),
        "rollout_log_ppl": mean(-mean(r) for _, r in rows),
        "log_ppl_diff": mean(diff),
        "log_ppl_abs_diff": mean(abs(d) for d in diff),
        "log_ppl_diff_max": max(diff),
        "log_ppl_diff_min": min(diff),
        "ppl_ratio": mean(math.exp(d) for d in diff),
        "chi2_token": mean(math.exp(clip(d, -20, 20)) ** 2 for d in flat) - 1,
        "chi2_seq": mean(math.exp(clip(sum(row), -20, 20)) ** 2 for row in deltas) - 1,
    }
    numbers = report(losses.off_policy_metrics(batch.log_probs, batch.old_log_probs, batch.mask))
    assert {k.removeprefix(P): v for k, v in numbers.items()} == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": "tokens"}, "did you mean 'token'"),
        ({"threshold": -1.0}, "threshold=-1.0 must be"),
        ({"threshold": (2.0, 0.5)}, "low first"),
        ({"threshold": "a_b"}, "must be a number"),
        ({"reject": "token_k4", "reject_threshold": 1.0}, "did you mean 'token_k"),
        ({"reject": "seq_max_k1", "reject_threshold": 1.0}, "unknown rejection"),
        ({"reject": "token_k1"}, "give both or neither"),
        ({"reject_threshold": 1.0}, "give both or neither"),
        ({"reject": "token_k1,token_k2", "reject_threshold": "1,2,3"}, "2 options"),
        ({"reject": "token_k2", "reject_threshold": "0.5_2.0"}, "only k1 has a lower bound"),
        ({"reject": "token_k1", "reject_threshold": 0.5}, "must be >= 1"),
        ({"reject": "token_k1", "reject_threshold": math.inf}, "must be >= 1 and finite"),
        ({"reject": " ,", "reject_threshold": 0.5}, "at least one option"),
    ],
)
def test_settings_that_cannot_be_meant(settings, message):
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        losses.rollout_correction(x, x, mask, **settings)


@pytest.mark.usefixtures("unhooked")
def test_shapes_must_agree():
    x = torch.zeros(2, 3)
    for fn in (losses.rollout_correction, losses.off_policy_metrics):
        with pytest.raises(ValueError, match=r"rollout_log_probs must be floating \[B, T\] = \[2, 3\].*got.* \[2, 2\]"):
            fn(x, x[:, :2], x.bool())
        with pytest.raises(ValueError, match="mask must be bool"):
            fn(x, x, x)
    with pytest.raises(ValueError, match="weights must be floating"):
        losses.geometric_mean(x[:1], x.bool())
