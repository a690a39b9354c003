"""Losses as pure functions: per-token values [B, T] and metrics; `loss_weights` turns them into one sum."""

from fppo.losses.correction import LEVELS, REJECTIONS, Correction, geometric_mean, rollout_correction
from fppo.losses.kl import KL_KINDS, KLState, kl_estimate, sequence_kl, update_kl
from fppo.losses.mismatch import off_policy_metrics
from fppo.losses.policy import cispo, dppo_kl, dppo_tv, dro, gmpo, gpg, gspo, ppo_clip, sapo
from fppo.losses.selection import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from fppo.losses.value import value_loss
from fppo.losses.weights import MODES, Totals, count_totals, loss_weights

__all__ = [
    "KL_KINDS",
    "LEVELS",
    "MODES",
    "REJECTIONS",
    "Correction",
    "KLState",
    "Totals",
    "cispo",
    "clip_cov",
    "count_totals",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geometric_mean",
    "gmpo",
    "gpg",
    "gspo",
    "kl_cov",
    "kl_estimate",
    "loss_weights",
    "off_policy_metrics",
    "ppo_clip",
    "rollout_correction",
    "sapo",
    "select_clip_cov",
    "select_kl_cov",
    "sequence_kl",
    "update_kl",
    "value_loss",
]
