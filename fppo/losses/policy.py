"""Policy losses per token, [B, T], to be minimised.

All take (log_probs, old_log_probs, advantages, mask), the first three floating [B, T], the mask bool [B, T], and
return (per-token loss, metrics). `old_log_probs` and `advantages` are constants to the gradient. Where the mask is
False the loss and the gradient are 0, whatever the inputs hold. Scalars may be 0-d tensors (for vmap), and the clip
ranges of `ppo_clip`, `gspo` and `cispo` also [B, T].
Other shapes or dtypes raise ValueError: they would broadcast.
r is exp(log_probs - old_log_probs), with the log-ratio clamped to +-20 unless said otherwise, and A the advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fppo.losses._common import (
    LEVELS,
    clean_inputs,
    clip,
    log_ratio,
    positive,
    positive_all,
    row_counts,
    row_mean,
    scalar,
    unknown,
)
from fppo.metrics import Metrics, masked_mean
from fppo.shapes import Mask, Scalar, Tokens


def _above_one(name: str, value: Scalar) -> None:
    if not isinstance(value, Tensor) and not value > 1:
        raise ValueError(f"{name} must be > 1 (it bounds the ratio of actions that got worse), got {value}")


def ppo_clip(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Scalar | Tokens = 0.2,
    clip_high: Scalar | Tokens = 0.2,
    dual_clip: Scalar | None = 3.0,
) -> tuple[Tokens, Metrics]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and at most -A dual_clip where A < 0.

    PPO (arXiv:1707.06347) with the dual clip of arXiv:1912.09729; `dual_clip=None` leaves that out, otherwise it
    must be > 1.
    """
    positive_all(clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None:
        _above_one("dual_clip", dual_clip)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs)
    ratio = delta.exp()
    plain = -adv * ratio
    clipped = -adv * clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics: Metrics = {
        "actor/pg_clipfrac": masked_mean(clipped > plain, mask),
        "actor/ppo_kl": masked_mean(-delta, mask),
    }
    if dual_clip is not None:
        ceiling = -adv * scalar(dual_clip, adv)
        cut = (loss > ceiling) & (adv < 0)
        loss = torch.where(cut, ceiling, loss)
        metrics["actor/pg_clipfrac_lower"] = masked_mean(cut, mask)
    return loss.where(mask, 0.0), metrics


def gspo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Scalar | Tokens = 3e-4,
    clip_high: Scalar | Tokens = 4e-4,
) -> tuple[Tokens, Metrics]:
    """PPO's clipped loss on s = exp(mean over the row of the log-ratio), the row's ratio at each of its tokens.

    GSPO-token (arXiv:2507.18071): the value is s, the gradient s times that of the token's own log-prob. The
    log-ratio is capped at 10 from above. Meant for the mode "seq-mean-token-mean".
    """
    positive_all(clip_low=clip_low, clip_high=clip_high)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs, bound=None)
    sequence = row_mean(delta.detach(), mask)[..., None]
    ratio = (log_probs - log_probs.detach() + sequence).clamp(max=10.0).exp()
    plain = -adv * ratio
    clipped = -adv * clip(ratio, 1 - clip_low, 1 + clip_high)
    metrics: Metrics = {
        "actor/pg_clipfrac": masked_mean(clipped > plain, mask),
        "actor/ppo_kl": masked_mean(-delta, mask),
    }
    return torch.maximum(plain, clipped).where(mask, 0.0), metrics


def sapo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    tau_pos: Scalar = 1.0,
    tau_neg: Scalar = 1.05,
) -> tuple[Tokens, Metrics]:
    """-A (4 / tau) sigmoid(tau (r - 1)), a soft gate in place of the clip; tau is tau_pos where A > 0, else tau_neg.

    SAPO (arXiv:2511.20347). Meant for the mode "seq-mean-token-mean".
    """
    positive_all(tau_pos=tau_pos, tau_neg=tau_neg)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs)
    tau = torch.where(adv > 0, scalar(tau_pos, adv), scalar(tau_neg, adv))
    gate = torch.sigmoid(tau * (delta.exp() - 1.0)) * (4.0 / tau)
    return (-adv * gate).where(mask, 0.0), {"actor/ppo_kl": masked_mean(-delta, mask)}


def gpg(log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Mask) -> tuple[Tokens, Metrics]:
    """-A log_probs: REINFORCE (GPG, arXiv:2504.02546). `old_log_probs` enters the metrics alone."""
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    metrics: Metrics = {"actor/ppo_kl": masked_mean(-log_ratio(log_probs, old_log_probs), mask)}
    return (-adv * log_probs).where(mask, 0.0), metrics


def cispo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Scalar | Tokens = 0.2,
    clip_high: Scalar | Tokens = 0.2,
) -> tuple[Tokens, Metrics]:
    """-A clip(r, 1 - clip_low, 1 + clip_high) log_probs with the clipped ratio held constant.

    CISPO (arXiv:2506.13585): a clipped token keeps its gradient.
    """
    positive_all(clip_low=clip_low, clip_high=clip_high)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs).detach()
    ratio = delta.exp()
    weight = clip(ratio, 1 - clip_low, 1 + clip_high)
    metrics: Metrics = {
        "actor/pg_clipfrac": masked_mean(ratio != weight, mask),
        "actor/ppo_kl": masked_mean(-delta, mask),
    }
    return (-adv * weight.detach() * log_probs).where(mask, 0.0), metrics


def gmpo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
) -> tuple[Tokens, Metrics]:
    """-mean(A) exp(mean(u)) over each row, at every token of the row.

    u is the log-ratio clipped to [-clip_low, clip_high] on the side where it would gain: sign(A) min(sign(A) delta,
    sign(A) clip(delta)). GMPO (arXiv:2507.20673; the paper's bounds are 0.4). The log-ratio is not clamped otherwise.
    Meant for the mode "seq-mean-token-mean", under which a row counts once.
    """
    positive_all(clip_low=clip_low, clip_high=clip_high)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs, bound=None)
    sign = adv.sign()
    bounded = clip(delta, -clip_low, clip_high)
    gained = sign * torch.minimum(sign * delta, sign * bounded)
    rows = -row_mean(adv, mask) * (gained.sum(-1) / row_counts(mask, adv.dtype)).exp()
    outside = delta != bounded
    metrics: Metrics = {
        "actor/pg_clipfrac": masked_mean(outside & (adv > 0), mask),
        "actor/pg_clipfrac_lower": masked_mean(outside & (adv < 0), mask),
        "actor/ppo_kl": masked_mean(-delta, mask),
    }
    return rows[..., None].expand_as(adv).where(mask, 0.0), metrics


def _dppo(
    log_probs: Tokens, delta: Tokens, adv: Tokens, mask: Mask, trusted: Mask, max_ratio: Scalar
) -> tuple[Tokens, Metrics]:
    """The DPPO loss -A min(r, max_ratio) log_probs, A = `adv`, on the `trusted` tokens, the ratio r = exp(`delta`) held
    constant, and its metrics; 0 on all other tokens."""
    ratio = delta.exp()
    cap = scalar(max_ratio, ratio)
    weight = torch.minimum(ratio, cap).where(trusted, 0.0).detach()
    metrics: Metrics = {
        "actor/pg_clipfrac": masked_mean(~trusted, mask),
        "actor/pg_clipfrac_lower": masked_mean((ratio > cap) & trusted, mask),
        "actor/ppo_kl": masked_mean(-delta, mask),
    }
    return (-adv * weight * log_probs).where(mask, 0.0), metrics


def dppo_tv(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    max_ratio: Scalar = 20.0,
) -> tuple[Tokens, Metrics]:
    """-A min(r, max_ratio) log_probs, ratio constant, where the sampled token's probability stays in bounds.

    With p the token's probability, in bounds means p - p_old <= clip_high where A > 0, and p - p_old >= -clip_low
    elsewhere. DPPO-Binary-TV (arXiv:2602.04879), which recommends a large `max_ratio`.
    """
    positive_all(clip_low=clip_low, clip_high=clip_high, max_ratio=max_ratio)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs).detach()
    moved = log_probs.detach().exp() - old_log_probs.detach().exp()
    trusted = torch.where(adv > 0, moved <= scalar(clip_high, moved), moved >= -scalar(clip_low, moved))
    return _dppo(log_probs, delta, adv, mask, trusted, max_ratio)


def dppo_kl(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    max_ratio: Scalar = 20.0,
) -> tuple[Tokens, Metrics]:
    """-A min(r, max_ratio) log_probs, ratio constant, where the sampled token's KL divergence stays in bounds.

    The divergence is that from the old to the new policy, of the two events "the sampled token" and "any other token".
    A token is in bounds if the divergence is at most clip_high (where A > 0) or clip_low (elsewhere), or if the token's
    probability moved against the advantage. DPPO-Binary-KL (arXiv:2602.04879).
    """
    positive_all(clip_low=clip_low, clip_high=clip_high, max_ratio=max_ratio)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs).detach()
    new_log, old_log = log_probs.detach(), old_log_probs.detach()
    new, old = new_log.exp(), old_log.exp()
    others = ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    kl = old * (old_log - new_log) + (1 - old) * others
    up = (kl <= scalar(clip_high, kl)) | (new <= old)
    down = (kl <= scalar(clip_low, kl)) | (new >= old)
    return _dppo(log_probs, delta, adv, mask, torch.where(adv > 0, up, down), max_ratio)


def dro(
    log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Mask, *, beta: Scalar = 0.1
) -> tuple[Tokens, Metrics]:
    """-A log_probs + beta / 2 (log_probs - old_log_probs)^2, the log-ratio unclamped; beta > 0.

    Direct reward optimisation with a quadratic pull to the old policy (arXiv:2405.19107).
    """
    positive("beta", beta)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs, bound=None)
    loss = -adv * log_probs + 0.5 * scalar(beta, delta) * delta.square()
    return loss.where(mask, 0.0), {"actor/ppo_kl": masked_mean(-delta, mask)}


def vespo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    k_pos: Scalar = 2.0,
    lam_pos: Scalar = 3.0,
    k_neg: Scalar = 3.0,
    lam_neg: Scalar = 2.0,
) -> tuple[Tokens, Metrics]:
    """-A phi(W) log_probs with the weight phi(W) = W^k exp(lam (1 - W)) held constant, at every token of the row.

    W is the row's ratio: the product of its tokens' ratios, not their geometric mean, with its logarithm clamped to
    +-20. k and lam are k_pos and lam_pos at tokens with A > 0, else k_neg and lam_neg. phi(1) = 1, and phi falls to 0
    on both sides of k / lam. VESPO (arXiv:2602.10693, equation 20). "actor/pg_clipfrac" is the share of tokens with a
    weight below 1/2.
    """
    positive_all(k_pos=k_pos, lam_pos=lam_pos, k_neg=k_neg, lam_neg=lam_neg)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs, bound=None).detach()
    total = delta.where(mask, 0.0).sum(-1, keepdim=True).clamp(-20.0, 20.0)
    k = torch.where(adv > 0, scalar(k_pos, adv), scalar(k_neg, adv))
    lam = torch.where(adv > 0, scalar(lam_pos, adv), scalar(lam_neg, adv))
    weight = (k * total + lam * (1 - total.exp())).exp()
    metrics: Metrics = {
        "actor/pg_clipfrac": masked_mean(weight < 0.5, mask),
        "actor/ppo_kl": masked_mean(-delta, mask),
    }
    return (-adv * weight * log_probs).where(mask, 0.0), metrics


def dcpo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Scalar = 0.1,
    clip_high: Scalar = 0.2,
    max_ratio: Scalar = 10.0,
) -> tuple[Tokens, Metrics]:
    """PPO's clipped loss with bounds of each token's own, wider for a token of low old probability q.

    They are (1 + sqrt(max(0, 1 - 4 clip_low / q))) / 2 below, and (1 + sqrt(1 + 4 clip_high / q)) / 2 above, at most
    `max_ratio`; the loss is at most -A max_ratio where A < 0. So (r - 1) r q, and not r - 1, stays between -clip_low
    and clip_high. DCPO (arXiv:2509.02333); defaults are those of its code. Its smoothed advantages need the scores of
    earlier steps and are not here. Meant for the mode "seq-mean-token-mean".
    """
    positive_all(clip_low=clip_low, clip_high=clip_high, max_ratio=max_ratio)
    _above_one("max_ratio", max_ratio)
    _, old, _ = clean_inputs(log_probs, old_log_probs, advantages, mask)
    inverse = (-old.detach()).exp()  # 1 / q
    low = (1 - 4 * scalar(clip_low, inverse) * inverse).clamp(min=0).sqrt()
    high = (1 + 4 * scalar(clip_high, inverse) * inverse).sqrt()
    above = torch.minimum((1 + high) / 2, scalar(max_ratio, high))
    below = (1 - low) / 2
    return ppo_clip(
        log_probs, old_log_probs, advantages, mask, clip_low=below, clip_high=above - 1, dual_clip=max_ratio
    )


def ce_gppo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Scalar | Tokens = 0.2,
    clip_high: Scalar | Tokens = 0.2,
    beta_low: Scalar = 0.75,
    beta_high: Scalar = 1.0,
) -> tuple[Tokens, Metrics]:
    """-A r, but where PPO clips -A beta times its bound, with the gradient of that size: a clipped token keeps some.

    With sg() constant, the loss is -A beta_low (1 - clip_low) r / sg(r) where A < 0 and r < 1 - clip_low, and
    -A beta_high (1 + clip_high) r / sg(r) where A > 0 and r > 1 + clip_high. A larger `beta_high` keeps the entropy
    up, a larger `beta_low` brings it down. CE-GPPO (arXiv:2509.20712); with both 1 GPPO (arXiv:2508.07629).
    """
    positive_all(clip_low=clip_low, clip_high=clip_high)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs)
    ratio = delta.exp()
    held = ratio.detach()
    low, high = scalar(1 - clip_low, held), scalar(1 + clip_high, held)
    below, above = (held < low) & (adv < 0), (held > high) & (adv > 0)
    weight = torch.where(below, scalar(beta_low, held) * low / held, 1.0)
    weight = torch.where(above, scalar(beta_high, held) * high / held, weight)
    metrics: Metrics = {
        "actor/pg_clipfrac": masked_mean(below | above, mask),
        "actor/ppo_kl": masked_mean(-delta, mask),
    }
    return (-adv * weight * ratio).where(mask, 0.0), metrics


def aspo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    max_ratio: Scalar = 3.0,
) -> tuple[Tokens, Metrics]:
    """PPO's clipped loss where A <= 0; elsewhere tokens weigh 1 / r in place of r, so that unlikely ones learn most.

    Where A > 0, the value is -A min(1 / r, max_ratio), with the gradient of that times log_probs, and both are 0 once
    r > 1 + clip_high. ASPO (arXiv:2510.06062), which names no number for `max_ratio`.
    """
    positive_all(clip_low=clip_low, clip_high=clip_high, max_ratio=max_ratio)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs)
    ratio, up = delta.exp(), adv > 0
    done = up & (ratio.detach() > scalar(1 + clip_high, ratio))
    flipped = torch.minimum((-delta.detach()).exp(), scalar(max_ratio, ratio)).where(~done, 0.0)
    plain, clipped = -adv * ratio, -adv * clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = torch.where(up, -adv * flipped * (log_probs - log_probs.detach()).exp(), torch.maximum(plain, clipped))
    metrics: Metrics = {
        "actor/pg_clipfrac": masked_mean(torch.where(up, done, clipped > plain), mask),
        "actor/ppo_kl": masked_mean(-delta, mask),
    }
    return loss.where(mask, 0.0), metrics


def drpo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Scalar = 12.5,
    clip_high: Scalar = 12.5,
) -> tuple[Tokens, Metrics]:
    """-A r + |A| q (r - 1)^2 / (2 bound), q the token's old probability: the trust region of `dppo_tv`, but smooth.

    The bound is clip_high where A > 0, else clip_low. The gradient is that of -A r times 1 - (p - q) / bound where
    A > 0, and 1 + (p - q) / bound elsewhere, with p the new probability: it changes sign once p has moved by the bound
    in the advantage's direction. DRPO (arXiv:2606.09821), whose 12.5 is no bound, but a weak pull: no probability
    moves by more than 1. "actor/pg_clipfrac" is the share of tokens beyond the bound.
    """
    positive_all(clip_low=clip_low, clip_high=clip_high)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs)
    ratio, old = delta.exp(), old_log_probs.detach().exp()
    bound = torch.where(adv > 0, scalar(clip_high, adv), scalar(clip_low, adv))
    pull = adv.abs() * old * (ratio - 1).square() / (2 * bound)
    moved = log_probs.detach().exp() - old
    metrics: Metrics = {
        "actor/pg_clipfrac": masked_mean(torch.where(adv > 0, moved > bound, moved < -bound), mask),
        "actor/ppo_kl": masked_mean(-delta, mask),
    }
    return (pull - adv * ratio).where(mask, 0.0), metrics


def opsm(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Scalar | Tokens = 0.2,
    clip_high: Scalar | Tokens = 0.2,
    max_kl: Scalar = 0.1,
) -> tuple[Tokens, Metrics]:
    """PPO's clipped loss, without dual clip, and 0 at tokens with A < 0 of rows that are far off the policy.

    Those are rows whose mean over tokens of old_log_probs - log_probs exceeds `max_kl`. Their tokens stay in the
    denominator. Off-policy sequence masking of DeepSeek-V3.2 (arXiv:2512.02556), where old log-probs are the engine's
    (algorithm.old_log_probs = "engine"). It names no `max_kl`; the default of slime is 1e-4.
    "actor/pg_clipfrac_lower" is the share of tokens that are masked.
    """
    positive("max_kl", max_kl)
    batch = (log_probs, old_log_probs, advantages, mask)
    loss, metrics = ppo_clip(*batch, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    apart = row_mean((old_log_probs - log_probs).detach(), mask)[..., None]
    gone = (adv < 0) & (apart > scalar(max_kl, apart))
    return loss.where(~gone, 0.0), metrics | {"actor/pg_clipfrac_lower": masked_mean(gone, mask)}


def topr(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    level: str = "sequence",
    low: Scalar = 0.0,
    high: Scalar = 1.0,
) -> tuple[Tokens, Metrics]:
    """-A log_probs where A > 0, and -A clip(w, low, high) log_probs elsewhere, with the ratio w held constant.

    w is the row's ratio at the `level` "sequence" (the product of its tokens', as in the paper), and r at "token" (as
    in ROLL and Trinity-RFT). So good responses are imitated, however old, and bad ones are left alone once they are
    unlikely. TOPR (arXiv:2503.14286), meant for advantages that are above 0 for right responses alone, and for the mode
    "seq-mean-token-sum". "actor/pg_clipfrac" is the share of tokens with A <= 0 whose w is out of bounds.
    Raises ValueError for another level.
    """
    if level not in LEVELS:
        unknown("level", level, LEVELS)
    log_probs, old_log_probs, adv = clean_inputs(log_probs, old_log_probs, advantages, mask)
    delta = log_ratio(log_probs, old_log_probs, bound=None).detach()
    if level == "sequence":
        delta = delta.where(mask, 0.0).sum(-1, keepdim=True).expand_as(adv)
    ratio, up = delta.clamp(-20.0, 20.0).exp(), adv > 0
    tapered = clip(ratio, low, high)
    metrics: Metrics = {
        "actor/pg_clipfrac": masked_mean(~up & (tapered != ratio), mask),
        "actor/ppo_kl": masked_mean(-log_ratio(log_probs, old_log_probs), mask),
    }
    return (-adv * torch.where(up, 1.0, tapered) * log_probs).where(mask, 0.0), metrics
