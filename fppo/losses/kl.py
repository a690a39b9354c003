"""Divergence from a reference policy: estimators per token, and the controllers of their coefficient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from fppo.losses._common import LOG_RATIO_BOUND, check_like, check_tokens, clean, log_ratio, positive, row_mean, unknown
from fppo.metrics import Mean, masked_mean
from fppo.shapes import Mask, Scalar, Tokens
from fppo.tree import state


def _k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d, clamped twice, the exponent to +-20 and the value to 10: both cut the gradient."""
    x = (-d).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (x.exp() - x - 1).clamp(-10.0, 10.0)


_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"k1": lambda d: d, "abs": torch.abs, "k2": lambda d: 0.5 * d.square(), "k3": _k3}
)
REWARD_KINDS = ("k1", "k1+")  # equal values; as a penalty in rewards they have the divergence's gradient
KL_KINDS = (*_ESTIMATORS, *(f"{kind}+" for kind in _ESTIMATORS))
_OTHER_NAMES = MappingProxyType({"kl": "k1", "mse": "k2", "low_var_kl": "k3"})


def kl_estimate(log_probs: Tokens, ref_log_probs: Tokens, kind: str, *, mask: Mask | None = None) -> Tokens:
    """KL(policy || reference) at each sampled token, [B, T], from d = log_probs - ref_log_probs.

    - "k1": d. Subtracted from the rewards it gives the gradient of KL(policy || reference) of whole responses, the only
      kind that does; as a loss its expected gradient is zero (`kl_term`)
    - "abs": |d|. As a loss it has the gradient of twice the total variation at each token
    - "k2": d^2 / 2. As a loss it has the gradient of KL(policy || reference) at each token
    - "k3": exp(-d) - 1 + d, never negative; exponent clamped to +-20, value to 10. As a loss it has the gradient of
      KL(reference || policy) at each token, the other direction
    - with "+" ("k3+"): the value of the kind, the gradient of k2 (straight-through)

    A divergence at each token is between the distributions there, under the prefixes that the policy visits: a token's
    effect on the divergence of later ones is left out. In rewards no kind but k1 has the gradient of a divergence, and
    some point away from it (`fppo bias`). (http://joschu.net/blog/kl-approx.html.)

    `ref_log_probs` is a constant to the gradient. With `mask` (bool [B, T]) the result and the gradient are 0 where it
    is False, whatever the inputs hold. Raises ValueError for an unknown kind and for unequal shapes.
    """
    if kind not in KL_KINDS:
        base = kind.removesuffix("+")
        if base in _OTHER_NAMES:
            raise ValueError(f"unknown kl kind {kind!r}; here it is {kind.replace(base, _OTHER_NAMES[base])!r}")
        unknown("kl kind", kind, KL_KINDS)
    if mask is None:
        check_like("log_probs", log_probs, ref_log_probs=ref_log_probs)
    else:
        check_tokens(mask, log_probs=log_probs, ref_log_probs=ref_log_probs)
        log_probs, ref_log_probs = clean(mask, log_probs, ref_log_probs)
    d = log_probs - ref_log_probs.detach()
    value = _ESTIMATORS[kind.removesuffix("+")](d)
    if kind.endswith("+"):
        slope = _ESTIMATORS["k2"](d)
        value = slope - slope.detach() + value.detach()
    return value if mask is None else value.where(mask, 0.0)


def kl_term(
    log_probs: Tokens,
    old_log_probs: Tokens,
    ref_log_probs: Tokens,
    kind: str,
    *,
    mask: Mask,
    correction: Tokens | None = None,
) -> Tokens:
    """The KL term of a policy's loss at each token, [B, T]: `kl_estimate` times pi / pi_old of the token, a constant.

    The old policy sampled the tokens (`old_log_probs`), and every update moves the policy away from it: the weight
    turns the expectation over the old policy's tokens into one over the policy's. It is 1 on policy; its logarithm is
    clamped to +-20. `correction` [B, T] weighs the old policy against the sampling one (`rollout_correction`). In
    expectation over tokens of the policy the gradient is that of KL(policy || reference) for "k2" and every kind with
    "+", of KL(reference || policy) for "k3", and of twice the total variation for "abs".

    Raises ValueError for "k1", whose expected gradient is 0, and otherwise as `kl_estimate`.
    """
    if kind == "k1":
        raise ValueError(
            "kl kind 'k1' as a loss has an expected gradient of 0, which makes it no KL term: give 'k3', or "
            "'k2' or 'k1+', whose gradient is that of the divergence (PolicyTerms.kl_kind, in settings actor.kl_kind)"
        )
    estimate = kl_estimate(log_probs, ref_log_probs, kind, mask=mask)
    check_tokens(mask, old_log_probs=old_log_probs)
    weight = log_ratio(*clean(mask, log_probs.detach(), old_log_probs)).exp()
    if correction is not None:
        check_tokens(mask, correction=correction)
        weight = weight * correction.detach().where(mask, 0.0)
    return weight * estimate


def sequence_kl(kl: Tokens, mask: Mask) -> Mean:
    """The mean over rows of each row's mean KL over its tokens, the input of the adaptive controller.

    `kl` floating [B, T], `mask` bool [B, T]; rows without tokens count nowhere.
    """
    check_tokens(mask, kl=kl)
    return masked_mean(row_mean(kl.detach().double(), mask), mask.any(-1))


def _float64(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach()


@state
class KLState:
    """The coefficient of the KL penalty, a 0-d float64 tensor: a leaf, so that checkpoints store it exactly."""

    coef: Tensor = attrs.field(converter=_float64)


def update_kl(
    state: KLState,
    kl: Scalar,
    num_sequences: float | Tensor,
    *,
    kind: str = "fixed",
    target: float = 0.1,
    horizon: float = 10_000,
) -> KLState:
    """The next state of the KL controller after a mean divergence `kl` (`sequence_kl`) over `num_sequences` rows.

    "fixed": unchanged. "adaptive": coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon)
    (arXiv:1909.08593). Without rows, or if `kl` is NaN, the state stays. Raises ValueError for another kind, and for a
    target or horizon <= 0.
    """
    if kind not in ("fixed", "adaptive"):
        unknown("kl controller", kind, ("fixed", "adaptive"))
    if kind == "fixed":
        return state
    positive("target", target)
    positive("horizon", horizon)
    coef = state.coef
    kl, count = _float64(kl).to(coef.device), _float64(num_sequences).to(coef.device)
    error = (kl / target - 1).clamp(-0.2, 0.2)
    known = (count > 0) & ~kl.isnan()
    return KLState(coef=torch.where(known, coef * (1 + error * count / horizon), coef))
