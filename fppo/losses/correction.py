"""Correction for rollouts whose sampling policy differs from the trained one: importance weights and rejection.

Truncated importance sampling (https://fengyao.notion.site/off-policy-rl), IcePop (arXiv:2510.18855) and rejection by
divergence, as verl defines them, and metrics of the distance between both policies. Every function takes the whole
batch, the rows of all ranks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fppo.losses._common import LEVELS, LOG_RATIO_BOUND, check_tokens, clean, row_mean, unknown
from fppo.metrics import Mean, Metrics, masked_max, masked_mean, masked_min, mean
from fppo.shapes import Mask, Rows, Tokens

REJECTIONS = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)


class Correction(NamedTuple):
    """Importance weights for the rows of a batch, and the tokens that remain in its mask."""

    weights: Tokens | None  # constants, 0 where `mask` is False; None without importance weights
    mask: Mask
    metrics: Metrics


def _numbers(setting: str, value: str | float | tuple[float, float]) -> tuple[float, ...]:
    """One or two positive numbers, ascending, for a `setting`: from a number, a pair, "2.0" or "0.5_2.0"."""
    words = value.split("_") if isinstance(value, str) else value if isinstance(value, tuple) else (value,)
    try:
        numbers = tuple(float(word) for word in words)
    except ValueError:
        numbers = ()
    if len(numbers) not in (1, 2) or not all(n > 0 for n in numbers) or list(numbers) != sorted(numbers):
        raise ValueError(f"{setting}={value!r} must be a number > 0, or two of them, low first, such as '0.5_2.0'")
    return numbers


def _rejections(reject: str, threshold: str | float | tuple[float, float]) -> dict[str, tuple[float, float]]:
    """The bounds (low, high) of the statistic of each rejection option in the list `reject`: for k1 the logarithms of
    its thresholds, for the others (-inf, threshold)."""
    options = list(dict.fromkeys(word.strip() for word in reject.split(",") if word.strip()))
    for option in options:
        if option not in REJECTIONS:
            unknown("rejection", option, REJECTIONS)
    thresholds = threshold.split(",") if isinstance(threshold, str) else [threshold]
    if not options or len(thresholds) not in (1, len(options)):
        raise ValueError(
            f"reject={reject!r} names {len(options)} options and reject_threshold={threshold!r} {len(thresholds)}: "
            "give at least one option, and one threshold for all or one for each"
        )
    bounds: dict[str, tuple[float, float]] = {}
    for option, value in zip(options, thresholds * (len(options) // len(thresholds)), strict=True):
        numbers = _numbers(f"reject_threshold of {option}", value.strip() if isinstance(value, str) else value)
        if option.endswith("k1"):
            low = numbers[0] if len(numbers) == 2 else 1 / numbers[0]
            if low > numbers[-1] or low == 0:
                raise ValueError(f"reject_threshold of {option} is {value!r}: a single bound must be >= 1 and finite")
            bounds[option] = (math.log(low), math.log(numbers[-1]))
        elif len(numbers) == 2:
            raise ValueError(
                f"reject_threshold of {option} is {value!r}, but only k1 has a lower bound: give one number"
            )
        else:
            bounds[option] = (-math.inf, numbers[0])
    return bounds


def _moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The count, mean and population variance of `x` where `mask` is True, each 0-d float64; 0 for an empty mask."""
    numbers = x.detach().double().where(mask, 0.0)
    count = mask.sum().double()
    middle = numbers.sum() / count.clamp(min=1)
    # a second pass: the mean of squares less the squared mean would cancel
    return count, middle, (numbers - middle).square().where(mask, 0.0).sum() / count.clamp(min=1)


def _deviation(x: Tensor, mask: Tensor, *, unbiased: bool = False) -> Mean:
    """The standard deviation of `x` where `mask` is True; 0 for fewer than two numbers."""
    count, _, variance = _moments(x, mask)
    if unbiased:
        variance = variance * count / (count - 1).clamp(min=1)
    return mean(variance.sqrt())


def _prefixed(prefix: str, metrics: Metrics) -> Metrics:
    return {prefix + name: metric for name, metric in metrics.items()}


def _outside(x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return x < low, x > high


def _sequence_metrics(rows: Rows, valid: Tensor, *, center: float) -> Metrics:
    return {
        "seq_mean": masked_mean(rows, valid),
        "seq_std": _deviation(rows, valid, unbiased=True),
        "seq_max": masked_max(rows, valid),
        "seq_min": masked_min(rows, valid),
        "seq_max_deviation": masked_max((rows - center).abs(), valid),
    }


def _weight_metrics(
    weights: Tokens, raw: Tokens, row_log: Rows | None, mask: Mask, bounds: tuple[float, float]
) -> Metrics:
    """Metrics of the applied weights [B, T]: their extremes, and the fraction of `raw` ones out of bounds; if given,
    both are of the rows' log-weights [B]."""
    valid = mask.any(-1)
    low, high = bounds
    _, middle, variance = _moments(weights, mask)
    square = variance + middle.square()
    if row_log is None:
        extremes: Metrics = {"max": masked_max(weights, mask), "min": masked_min(weights, mask)}
        over, where = raw, mask
    else:
        top = row_log.clamp(max=LOG_RATIO_BOUND).exp()
        extremes = {"max": masked_max(top, valid), "min": masked_min(row_log.exp(), valid)}
        over, where = row_log.exp(), valid
    below, above = _outside(over, low, high)
    row_below, row_above = _outside(row_mean(raw, mask), low, high)
    metrics: Metrics = extremes | {
        "mean": masked_mean(weights, mask),
        "std": mean(variance.sqrt()),
        "eff_sample_size": mean(torch.where(square > 0, middle.square() / square.where(square > 0, 1.0), 0.0)),
        "ratio_fraction_high": masked_mean(above, where),
        "ratio_fraction_low": masked_mean(below, where),
        "seq_fraction_high": masked_mean(row_above, valid),
        "seq_fraction_low": masked_mean(row_below, valid),
    }
    metrics |= _sequence_metrics(row_mean(weights, mask), valid, center=1.0)
    return _prefixed("rollout_corr/rollout_is_", metrics)


def _importance_weights(
    delta: Tokens, mask: Mask, level: str, threshold: str | float | tuple[float, float], batch_normalize: bool
) -> tuple[Tokens, Metrics]:
    """Importance weights [B, T], float64, and their metrics; `delta` is log(training / rollout), 0 outside the mask."""
    if level not in LEVELS:
        unknown("level", level, LEVELS)
    numbers = _numbers("threshold", threshold)
    low, high = numbers[0] if len(numbers) == 2 else 1 / numbers[0], numbers[-1]
    row_log = None
    if level == "sequence":
        row_log = delta.sum(-1)
        delta = row_log[..., None].expand_as(delta)
    raw = delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().where(mask, 0.0)
    below, above = _outside(raw, low, high)
    weights = raw.clamp(max=high) if len(numbers) == 1 else raw.where(~(below | above), 0.0)
    metrics = _weight_metrics(weights, raw, row_log, mask, (low, high))
    if len(numbers) == 2:
        metrics["rollout_corr/rollout_is_oob_ratio"] = masked_mean(below | above, mask)
    if batch_normalize:
        over = (weights, mask) if level == "token" else (row_mean(weights, mask), mask.any(-1))
        _, factor, _ = _moments(*over)
        factor = torch.where(factor > 1e-8, factor, 1.0)
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean(factor)
        weights = weights / factor
    return weights, metrics


def _statistic(delta: Tokens, mask: Mask, option: str) -> tuple[Tokens, Rows]:
    """The statistic of a rejection option at each token, [B, T], and of each row, [B]. With a "seq" option every token
    has its row's statistic."""
    x = delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    kind = option[-2:]
    tokens = (-x if kind == "k1" else 0.5 * x.square() if kind == "k2" else x.exp() - 1 - x).where(mask, 0.0)
    if option.startswith("seq_sum"):
        rows = tokens.sum(-1)
    elif option.startswith("seq_max"):
        rows = torch.cat([tokens, tokens.new_zeros(*tokens.shape[:-1], 1)], -1).amax(-1)  # k2 and k3 are >= 0
    else:
        rows = row_mean(tokens, mask)
    return (tokens if option.startswith("token") else rows[..., None].expand_as(tokens)), rows


def _reject(delta: Tokens, mask: Mask, option: str, bounds: tuple[float, float]) -> tuple[Mask, Metrics]:
    """The mask of tokens that a rejection option keeps, its statistic of `delta` within the bounds, bool [B, T], and
    its metrics."""
    valid = mask.any(-1)
    tokens, rows = _statistic(delta, mask, option)
    below, above = _outside(tokens, *bounds)
    keep = ~(below | above)
    row_below, row_above = _outside(rows, *bounds)
    at_tokens = option.startswith("token")
    x, where = (tokens, mask) if at_tokens else (rows, valid)
    # the statistic's own minimum is the lower clamp of the deviation: a log for k1, else 0
    floor = 0.0 if bounds[0] == -math.inf else bounds[0]
    metrics: Metrics = {
        "mean": masked_mean(tokens, mask),
        "std": _deviation(tokens.clamp(floor, bounds[1]), mask),
        "max": masked_max(x, where),
        "min": masked_min(x, where),
        "fraction_high": masked_mean(above, mask) if at_tokens else masked_mean(row_above, valid),
        "fraction_low": masked_mean(below, mask) if at_tokens else masked_mean(row_below, valid),
        "seq_fraction_high": masked_mean(row_above, valid),
        "seq_fraction_low": masked_mean(row_below, valid),
        "masked_fraction": masked_mean(~keep, mask),
        "seq_masked_fraction": masked_mean((~keep & mask).any(-1), valid),
    }
    metrics |= _sequence_metrics(rows, valid, center=0.0)
    return keep, _prefixed(f"rollout_corr/rollout_rs_{option}_", metrics)


def rollout_correction(
    old_log_probs: Tokens,
    rollout_log_probs: Tokens,
    mask: Mask,
    *,
    level: str | None = "token",
    threshold: str | float | tuple[float, float] = 2.0,
    batch_normalize: bool = False,
    reject: str | None = None,
    reject_threshold: str | float | tuple[float, float] | None = None,
) -> Correction:
    """Importance weights w = training / rollout probability, and the mask without rejected tokens.

    The log-probs are floating [B, T] and get no gradient; the mask is bool [B, T]. Values outside it have no effect.

    - `level`: "token" (each token's ratio), "sequence" (the product over the row, at each of its tokens) or None.
      Log-ratios are clamped to +-20.
    - `threshold`: a number cuts larger weights down to it (truncated importance sampling); a pair, or "low_high",
      sets weights outside it to 0 (IcePop).
    - `batch_normalize`: divides weights by their mean, of tokens or of rows, over the batch.
    - `reject`: options separated by commas, all of which a token must pass: token_k1|k2|k3, seq_sum_k1|k2|k3,
      seq_mean_k1|k2|k3, seq_max_k2|k3, of k1 = -log w, k2 = (log w)^2 / 2, k3 = w - 1 - log w. A row's statistic
      rejects the row. `reject_threshold`: one for all or one for each, an upper bound; for k1 a pair "low_high" (low
      defaults to 1 / high) that bounds rollout / training, 1 / w.

    Rejected tokens leave the mask, so counts and means over it leave them out. Weights, their normalisation and
    all metrics ("rollout_corr/...") are over the tokens of `mask`.

    Raises ValueError for another shape or dtype, and for an unknown level, threshold or rejection.
    """
    check_tokens(mask, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    if (reject is None) != (reject_threshold is None):
        raise ValueError(f"reject={reject!r} with reject_threshold={reject_threshold!r}: give both or neither")
    old, rollout = clean(mask, old_log_probs.detach().double(), rollout_log_probs.detach().double())
    delta = old - rollout
    metrics = off_policy_metrics(old, rollout, mask)
    weights, remaining = None, mask
    if level is not None:
        weights, weight_metrics = _importance_weights(delta, mask, level, threshold, batch_normalize)
        metrics |= weight_metrics
    if reject is not None and reject_threshold is not None:
        for option, bounds in _rejections(reject, reject_threshold).items():
            keep, option_metrics = _reject(delta, mask, option, bounds)
            remaining = remaining & keep
            metrics |= option_metrics
        lost = mask & ~remaining
        metrics["rollout_corr/rollout_rs_masked_fraction"] = masked_mean(lost, mask)
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = masked_mean(lost.any(-1), mask.any(-1))
    if weights is not None:
        weights = weights.where(remaining, 0.0).to(old_log_probs.dtype)
    return Correction(weights, remaining, metrics)


def geometric_mean(weights: Tokens, mask: Mask) -> Tokens:
    """The geometric mean of each row's weights at each of its tokens, [B, T]: the weight of a row in `gmpo`.

    `weights` floating [B, T], `mask` bool [B, T], else ValueError; 0 where it is False.
    """
    check_tokens(mask, weights=weights)
    logs = row_mean((weights.where(mask, 1.0) + 1e-10).log(), mask)
    return logs.exp()[..., None].expand_as(weights).where(mask, 0.0)


def off_policy_metrics(old_log_probs: Tokens, rollout_log_probs: Tokens, mask: Mask) -> Metrics:
    """Divergences and perplexities under "rollout_corr/"; log-probs floating, mask bool [B, T], else ValueError.

    kl and k3_kl estimate KL(rollout || training) per token; a perplexity is exp of a row's mean negative
    log-prob, and log_ppl_diff the training policy's less the rollout's; chi2_token and chi2_seq are the means of
    the squared ratio training / rollout less 1, over tokens and over rows (log-ratios clamped to +-20). Rows
    without tokens count nowhere.
    """
    check_tokens(mask, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    train, rollout = clean(mask, old_log_probs.detach().double(), rollout_log_probs.detach().double())
    rows = mask.any(-1)
    delta = train - rollout
    train_row, rollout_row = row_mean(train, mask), row_mean(rollout, mask)
    diff = rollout_row - train_row
    token_chi2 = (2 * delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp() - 1
    row_chi2 = (2 * delta.sum(-1).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp() - 1
    return {
        "rollout_corr/kl": masked_mean(-delta, mask),
        "rollout_corr/k3_kl": masked_mean(delta.exp() - delta - 1, mask),
        "rollout_corr/training_ppl": masked_mean((-train_row).exp(), rows),
        "rollout_corr/training_log_ppl": masked_mean(-train_row, rows),
        "rollout_corr/rollout_ppl": masked_mean((-rollout_row).exp(), rows),
        "rollout_corr/rollout_log_ppl": masked_mean(-rollout_row, rows),
        "rollout_corr/log_ppl_diff": masked_mean(diff, rows),
        "rollout_corr/log_ppl_abs_diff": masked_mean(diff.abs(), rows),
        "rollout_corr/log_ppl_diff_max": masked_max(diff, rows),
        "rollout_corr/log_ppl_diff_min": masked_min(diff, rows),
        "rollout_corr/ppl_ratio": masked_mean(diff.exp(), rows),
        "rollout_corr/chi2_token": masked_mean(token_chi2, mask),
        "rollout_corr/chi2_seq": masked_mean(row_chi2, rows),
    }
