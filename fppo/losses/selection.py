"""Losses with a rule of their own for some tokens of a mini-batch, and the selection of those tokens.

Clip-Cov and KL-Cov (arXiv:2505.22617) select by covariance, M2PO (arXiv:2510.01161) by ratios. The selection is made
once over the whole mini-batch, before it is split, and passed to the loss: within a micro-batch it would depend on the
split. Shapes, dtypes and errors are those of `fppo.losses.policy`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fppo.losses._common import check_tokens, clean, clean_inputs, clip, log_ratio, positive, positive_all, scalar
from fppo.metrics import Metrics, masked_mean
from fppo.shapes import Mask, Scalar, Tokens


def _covariance(log_probs: Tokens, advantages: Tokens, mask: Mask) -> Tokens:
    """(A - mean A)(log_probs - mean log_probs) over the masked tokens of all rows, float64 [B, T]."""
    count = mask.sum().clamp(min=1).double()
    adv, logp = clean(mask, advantages.detach().double(), log_probs.detach().double())
    return (adv - adv.sum() / count) * (logp - logp.sum() / count)


def _smallest(candidates: Mask, keys: tuple[Tokens, ...], count: Tensor) -> Mask:
    """Select the first `count` of the `candidates`, in ascending order of the last of `keys`; equal ones are ordered by
    the key before it. bool [B, T]."""
    order = torch.arange(candidates.numel(), device=candidates.device)
    for key in (*keys, (~candidates).double()):
        order = order.gather(0, key.flatten().gather(0, order).argsort(stable=True))
    rank = order.argsort().reshape(candidates.shape)
    return candidates & (rank < count)


def _quota(mask: Mask, ratio: Scalar) -> Tensor:
    """The number of tokens to select, max(1, floor(ratio * tokens of the mask)), 0-d."""
    return (mask.sum().double() * ratio).floor().clamp(min=1)


def select_clip_cov(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    noise: Tokens,
    ratio: Scalar = 0.0002,
    low: Scalar = 1.0,
    high: Scalar = 5.0,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
) -> Mask:
    """The tokens whose loss `clip_cov` drops, bool [B, T]: max(1, ratio * tokens) random candidates.

    Candidates have a covariance in (low, high) and are not clipped by PPO's rule already. All tensors cover the whole
    mini-batch. `noise` [B, T] is uniform; the candidates of smallest noise are taken, so the draw does not depend on
    the order of rows.
    """
    _check_share(ratio)
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and not low < high:
        raise ValueError(f"low={low}, high={high}: low must be less than high")
    check_tokens(mask, log_probs=log_probs, advantages=advantages, noise=noise)
    cov = _covariance(log_probs, advantages, mask)
    log_probs, old_log_probs, adv = clean_inputs(log_probs.detach(), old_log_probs, advantages, mask)
    r = log_ratio(log_probs, old_log_probs, bound=None).exp()
    clipped = -adv * clip(r, 1 - clip_low, 1 + clip_high) > -adv * r
    candidates = mask & ~clipped & (cov > scalar(low, cov)) & (cov < scalar(high, cov))
    return _smallest(candidates, (noise.double(),), _quota(mask, ratio))


def select_kl_cov(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    noise: Tokens,
    ratio: Scalar = 0.0002,
) -> Mask:
    """The tokens that `kl_cov` holds back, bool [B, T]: the max(1, ratio * tokens) of highest covariance.

    All tensors cover the whole mini-batch. `noise` [B, T] decides between equal covariances alone; `old_log_probs`
    has no effect and completes the common signature of selections.
    """
    _check_share(ratio)
    check_tokens(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, noise=noise)
    cov = _covariance(log_probs, advantages, mask)
    return _smallest(mask, (noise.double(), -cov), _quota(mask, ratio))


def select_m2po(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    noise: Tokens,
    threshold: Scalar = 0.04,
) -> Mask:
    """The tokens whose loss `m2po` drops, bool [B, T]: as few as leave a mean of (log r)^2 of at most `threshold`.

    They are those of the largest (log r)^2, of all tokens but one at most. All tensors cover the whole mini-batch.
    `noise` [B, T] decides between equal ratios; `advantages` have no effect. M2PO (arXiv:2510.01161), as in AReaL: its
    authors' code counts only the tokens that PPO might clip.
    """
    positive("threshold", threshold)
    check_tokens(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, noise=noise)
    new, old = clean(mask, log_probs.detach().double(), old_log_probs.detach().double())
    moment = (new - old).square()
    ascending = moment.where(mask, torch.inf).flatten().sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=mask.device)
    kept = (means <= scalar(threshold, means)).sum().clamp(min=1)
    return _smallest(mask, (noise.double(), -moment), mask.sum() - kept)


def select_entropy(entropy: Tokens, mask: Mask, *, noise: Tokens, share: Scalar) -> Mask:
    """The max(1, share * tokens) of highest `entropy`, bool [B, T], to which Wang et al. (2025, arXiv:2506.01939,
    equation 5) bound the policy loss: the tokens at which a response may fork.

    All tensors cover the whole mini-batch. `noise` [B, T] decides between entropies that are equal when rounded to
    1/1024 nat: those after equal prefixes, as of the first tokens of all responses to a prompt, differ by rounding.
    """
    _check_share(share, "share")
    check_tokens(mask, entropy=entropy, noise=noise)
    (seen,) = clean(mask, entropy.detach().double())
    return _smallest(mask, (noise.double(), -(seen * 1024).round()), _quota(mask, share))


def _check_share(ratio: Scalar, name: str = "ratio") -> None:
    positive(name, ratio)
    if not isinstance(ratio, Tensor) and ratio > 1:
        raise ValueError(f"{name} must be at most 1, got {ratio}")


def _check_selected(selected: Tensor, mask: Tensor) -> None:
    if selected.shape != mask.shape or selected.dtype != torch.bool:
        kind = f"{selected.dtype} {list(selected.shape)}"
        raise ValueError(f"selected must be bool [B, T] = {list(mask.shape)} as the mask, got {kind}")


def clip_cov(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    selected: Mask,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
) -> tuple[Tokens, Metrics]:
    """PPO's clipped loss, without dual clip, and 0 on the `selected` tokens (bool [B, T], from `select_clip_cov`).

    The selected tokens stay in the denominator. The log-ratio is not clamped. "actor/pg_clipfrac" is the fraction of
    selected tokens.
    """
    positive_all(clip_low=clip_low, clip_high=clip_high)
    _check_selected(selected, mask)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs, bound=None)
    ratio = delta.exp()
    loss = torch.maximum(-adv * ratio, -adv * clip(ratio, 1 - clip_low, 1 + clip_high))
    metrics: Metrics = {
        "actor/pg_clipfrac": masked_mean(selected, mask),
        "actor/ppo_kl": masked_mean(-delta, mask),
    }
    return loss.where(mask & ~selected, 0.0), metrics


def m2po(
    log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Mask, *, selected: Mask
) -> tuple[Tokens, Metrics]:
    """-A r, and 0 on the `selected` tokens (bool [B, T], from `select_m2po`), which stay in the denominator.

    M2PO (arXiv:2510.01161), for batches from policies of many updates ago. "actor/pg_clipfrac" is the fraction of
    selected tokens.
    """
    _check_selected(selected, mask)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs)
    metrics: Metrics = {
        "actor/pg_clipfrac": masked_mean(selected, mask),
        "actor/ppo_kl": masked_mean(-delta, mask),
    }
    return (-adv * delta.exp()).where(mask & ~selected, 0.0), metrics


def kl_cov(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    selected: Mask,
    kl_coef: Scalar = 0.1,
) -> tuple[Tokens, Metrics]:
    """-A r, plus kl_coef |log_probs - old_log_probs| on the `selected` tokens (bool [B, T], from `select_kl_cov`).

    The log-ratio is not clamped. "actor/ppo_kl" is the mean of its absolute value here.
    """
    _check_selected(selected, mask)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs, bound=None)
    penalty = (scalar(kl_coef, delta) * delta.abs()).where(selected, 0.0)
    return (-adv * delta.exp() + penalty).where(mask, 0.0), {"actor/ppo_kl": masked_mean(delta.abs(), mask)}
