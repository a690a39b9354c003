"""Divergences of a policy from a teacher at each token, between distributions over the vocabulary or parts of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fppo.losses._common import check_mask
from fppo.shapes import Mask, Tokens
from fppo_kernels.shapes import Float

Buckets = Float[Tensor, "b t k"]  # log-probs of the parts of a distribution, which add up to 1
Others = Float[Tensor, "b t n"]  # of another distribution; as many


def with_tail(log_probs: Buckets) -> Float[Tensor, "b t n"]:
    """Add the rest of the vocabulary as one bucket: log-probs [B, T, K] of some tokens become [B, T, K + 1].

    The last is log(1 - sum of the others' probabilities), where that difference is at least the dtype's epsilon; it has
    no gradient below. The divergence of such buckets is at most that of the whole vocabulary, and 0 where that is.
    """
    tiny = torch.finfo(log_probs.dtype).eps
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=tiny)
    return torch.cat([log_probs, rest.log()], -1)


def reverse_kl(log_probs: Buckets, teacher: Others, mask: Mask) -> Tokens:
    """KL(policy || teacher) at each token, sum_v p_v (log p_v - log q_v), [B, T], the texts before it held fixed.

    `log_probs` (policy p) and `teacher` (q, without a gradient) are log-probs [B, T, K] of the same buckets; 0 outside
    the mask, bool [B, T], whatever is there. It seeks modes: the policy leaves out what it cannot have of the teacher.
    Its gradient is the mean of `advantages.reverse_kl`'s over sampled tokens, without the noise.
    """
    p, q = _clean(log_probs, teacher, mask)
    return _kl(p, q).where(mask, 0.0)


def forward_kl(log_probs: Buckets, teacher: Others, mask: Mask) -> Tokens:
    """KL(teacher || policy) at each token, sum_v q_v (log q_v - log p_v), [B, T]; arguments as of `reverse_kl`.

    It covers modes: the policy gives probability to all that the teacher does.
    """
    p, q = _clean(log_probs, teacher, mask)
    return _kl(q, p).where(mask, 0.0)


def jensen_shannon(log_probs: Buckets, teacher: Others, mask: Mask, *, beta: float = 0.5) -> Tokens:
    """The generalised Jensen-Shannon divergence at each token, [B, T] (GKD, Agarwal et al., arXiv:2306.13649, eq. 1).

    beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p; arguments as of `reverse_kl`. Divided by
    beta it goes to KL(teacher || policy) as beta goes to 0, by 1 - beta to KL(policy || teacher) as beta goes to 1. It
    is bounded, so a token that one of them all but rules out cannot rule the loss.

    Raises ValueError for a beta that is not between 0 and 1.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta}: give a number between 0 and 1; its ends are forward_kl and reverse_kl")
    p, q = _clean(log_probs, teacher, mask)
    middle = torch.logaddexp(q + math.log(beta), p + math.log(1 - beta))
    return (beta * _kl(q, middle) + (1 - beta) * _kl(p, middle)).where(mask, 0.0)


def _clean(log_probs: Buckets, teacher: Others, mask: Mask) -> tuple[Buckets, Buckets]:
    """Both without what is outside the mask. Raises ValueError for buckets that do not fit each other or the mask."""
    check_mask(mask)
    if log_probs.shape != teacher.shape or log_probs.shape[:-1] != mask.shape:
        shapes = f"{list(log_probs.shape)} and {list(teacher.shape)} with a mask {list(mask.shape)}"
        raise ValueError(f"log-probs of buckets are {shapes}: give [B, T, K] of both, and a mask [B, T]")
    even = torch.zeros((), dtype=log_probs.dtype, device=log_probs.device)
    return log_probs.where(mask[..., None], even), teacher.detach().to(log_probs).where(mask[..., None], even)


def _kl(of: Buckets, other: Buckets) -> Tokens:
    """sum exp(of) (of - other) - exp(of) + exp(other), where buckets of probability 0 add nothing to the first term.

    The others add up to 0, and make the gradient 0 bit for bit where both are equal.
    """
    there = of > -torch.inf
    apart = of.where(there, 0.0) - other.where(there, 0.0)
    return (of.exp() * apart - of.exp() + other.exp()).sum(-1)
