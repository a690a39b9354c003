"""Metrics of the distance between the rollout engine's policy and the trained one."""

from __future__ import annotations

from fppo.losses._common import LOG_RATIO_BOUND, check_tokens, clean, row_mean
from fppo.metrics import Metrics, masked_max, masked_mean, masked_min
from fppo.shapes import Mask, Tokens


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
