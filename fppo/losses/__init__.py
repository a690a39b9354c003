"""Losses as pure functions: per-token values [B, T] and metrics; `loss_weights` turns them into one sum.

In: log-probs, old log-probs, advantages [B, T] and the mask bool [B, T], or values and returns. Out: per-token losses,
0 outside the mask, and metrics that add up over any split of the rows. Weights are counted over a whole mini-batch.
Begin with `policy.ppo_clip`; `weights` has the modes, `correction` off-policy weights, `kl` divergences.
"""

from fppo.losses.correction import (
    LEVELS,
    REJECTIONS,
    Correction,
    geometric_mean,
    off_policy_metrics,
    rollout_correction,
)
from fppo.losses.divergences import forward_kl, jensen_shannon, reverse_kl, with_tail
from fppo.losses.kl import KL_KINDS, REWARD_KINDS, KLState, kl_estimate, kl_term, sequence_kl, update_kl
from fppo.losses.policy import cispo, dppo_kl, dppo_tv, dro, gmpo, gpg, gspo, ppo_clip, sapo, vespo
from fppo.losses.selection import clip_cov, kl_cov, select_clip_cov, select_entropy, select_kl_cov
from fppo.losses.value import (
    ValueHead,
    binned_values,
    hl_gauss,
    hl_gauss_head,
    huber_head,
    huber_value_loss,
    mean_of_quantiles,
    mse_head,
    placed_values,
    quantile_head,
    quantile_loss,
    two_hot,
    two_hot_head,
    value_loss,
)
from fppo.losses.weights import MODES, Totals, count_totals, loss_weights, positive_weights

DIVERGENCES = {fn.__name__: fn for fn in (reverse_kl, forward_kl, jensen_shannon)}
POLICY_LOSSES = {  # by name: those that need no selection of tokens
    fn.__name__: fn for fn in (ppo_clip, gspo, sapo, gpg, cispo, gmpo, dppo_tv, dppo_kl, dro, vespo)
}

__all__ = [
    "DIVERGENCES",
    "KL_KINDS",
    "LEVELS",
    "MODES",
    "POLICY_LOSSES",
    "REJECTIONS",
    "REWARD_KINDS",
    "Correction",
    "KLState",
    "Totals",
    "ValueHead",
    "binned_values",
    "cispo",
    "clip_cov",
    "count_totals",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "forward_kl",
    "geometric_mean",
    "gmpo",
    "gpg",
    "gspo",
    "hl_gauss",
    "hl_gauss_head",
    "huber_head",
    "huber_value_loss",
    "jensen_shannon",
    "kl_cov",
    "kl_estimate",
    "kl_term",
    "loss_weights",
    "mean_of_quantiles",
    "mse_head",
    "off_policy_metrics",
    "placed_values",
    "positive_weights",
    "ppo_clip",
    "quantile_head",
    "quantile_loss",
    "reverse_kl",
    "rollout_correction",
    "sapo",
    "select_clip_cov",
    "select_entropy",
    "select_kl_cov",
    "sequence_kl",
    "two_hot",
    "two_hot_head",
    "update_kl",
    "value_loss",
    "vespo",
    "with_tail",
]
