"""Moments of distributions over a vocabulary that is processed in splits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fppo_kernels.collectives import Axis, all_gather

LOWEST = -1e18  # the logit of a token that the head excludes by a bias of -inf; finite, as 0 * inf is not a number


class Moments(NamedTuple):
    """Moments of the softmax over logits z, for the whole vocabulary [N] or for each split of it [splits, N]."""

    maximum: Tensor  # the largest z
    log_sum: Tensor  # log sum exp(z - maximum)
    entropy: Tensor  # 0 if not requested
    sum_squared: Tensor  # 0 if not requested


def empty(splits: int, like: Tensor) -> Moments:
    """Allocate moments for `splits` splits; `like` [N] gives the number of tokens, the dtype and the device."""
    return Moments(*like.new_zeros(4, splits, len(like)))


def put(moments: Moments, split: int, rows: slice, logits: Tensor, entropy: bool, sum_squared: bool) -> None:
    """Write the moments of tokens `rows` over one split, from its logits [n, v]; entropy and sum if requested."""
    probs = torch.softmax(logits, -1)
    maximum = logits.amax(-1)
    log_sum = -probs.amax(-1).log_()  # the largest probability is exp(0) / sum
    moments.maximum[split, rows], moments.log_sum[split, rows] = maximum, log_sum
    if entropy:
        moments.entropy[split, rows] = log_sum - logits.sub_(maximum[:, None]).mul_(probs).sum(-1)
    if sum_squared:
        moments.sum_squared[split, rows] = probs.square_().sum(-1)


def merge(splits: Moments) -> Moments:
    """Merge the moments of all splits."""
    maximum = splits.maximum.amax(0)
    log_sums = splits.maximum - maximum + splits.log_sum
    log_sum = torch.logsumexp(log_sums, 0)
    log_shares = log_sums - log_sum
    shares = log_shares.exp()
    there = shares != 0  # a split without any probability may have no moments; nan stays
    entropy = (shares * (splits.entropy - log_shares)).where(there, 0.0).sum(0)
    return Moments(maximum, log_sum, entropy, (shares.square() * splits.sum_squared).where(there, 0.0).sum(0))


def merge_ranks(splits: Moments, axis: Axis) -> Moments:
    """Merge the moments of all splits on all ranks of an axis; each rank sends only its own merged moments."""
    total = merge(splits)
    return total if axis.size == 1 else merge(Moments(*all_gather(torch.stack(total)[None], axis).unbind(1)))


def first_row(weight: Tensor, axis: Axis) -> Tensor | int:
    """The number of rows of the whole weight on earlier ranks."""
    if axis.size == 1:
        return 0
    return all_gather(torch.full((1,), len(weight), device=weight.device), axis)[: axis.rank].sum()


def share(splits: Moments, split: int, total: Moments) -> Tensor:
    """The probability [N] of one split of the vocabulary, given the moments of all splits and of the `total`."""
    return (splits.maximum[split] - total.maximum + splits.log_sum[split] - total.log_sum).exp_()
