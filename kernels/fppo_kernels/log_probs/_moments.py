"""Moments of distributions over a vocabulary that is seen in parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Of the softmax over logits z: all [N], or [parts, N] for the softmax over each part of the vocabulary."""

    maximum: Tensor  # the largest z
    log_sum: Tensor  # log sum exp(z - maximum)
    entropy: Tensor  # 0 if not asked for
    sum_squared: Tensor  # 0 if not asked for


def empty(parts: int, like: Tensor) -> Moments:
    """Room for the moments of so many parts; `like` [N] gives tokens, dtype and device."""
    return Moments(*like.new_zeros(4, parts, len(like)))


def put(moments: Moments, part: int, rows: slice, logits: Tensor, entropy: bool, sum_squared: bool) -> None:
    """Write the moments of one part, from its logits [n, v], into their place."""
    probs = torch.softmax(logits, -1)
    maximum = logits.amax(-1)
    log_sum = -probs.amax(-1).log_()  # the largest probability is exp(0) / sum
    moments.maximum[part, rows], moments.log_sum[part, rows] = maximum, log_sum
    if entropy:
        mean: Tensor = torch.linalg.vecdot(probs, logits.sub_(maximum[:, None]))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        moments.entropy[part, rows] = log_sum - mean
    if sum_squared:
        moments.sum_squared[part, rows] = torch.linalg.vecdot(probs, probs)  # pyright: ignore[reportUnknownMemberType]


def merge(parts: Moments) -> Moments:
    """The moments of the distribution over all parts together."""
    maximum = parts.maximum.amax(0)
    log_sums = parts.maximum - maximum + parts.log_sum
    log_sum = torch.logsumexp(log_sums, 0)
    log_shares = log_sums - log_sum
    shares = log_shares.exp()
    entropy = (shares * (parts.entropy - log_shares)).sum(0)
    return Moments(maximum, log_sum, entropy, (shares.square() * parts.sum_squared).sum(0))


def share(parts: Moments, part: int, total: Moments) -> Tensor:
    """The probability [N] of one part of the vocabulary."""
    return (parts.maximum[part] - total.maximum + parts.log_sum[part] - total.log_sum).exp_()
