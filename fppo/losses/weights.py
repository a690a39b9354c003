"""One weight per token, which turns a loss over a global mini-batch into a sum unchanged by any split."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fppo.losses._common import check_mask, positive, row_counts, unknown
from fppo.shapes import Mask, Number, Rows, Scalar, Tokens

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


class Totals(NamedTuple):
    """The size of the global mini-batch, as float64 0-d tensors; totals of its rows add field by field."""

    tokens: Number
    sequences: Number


def count_totals(mask: Mask) -> Totals:
    """The numbers of True tokens and of rows with at least one. `mask` is bool [B, T], else ValueError.

    Over several ranks, pass the sum of their totals to `loss_weights`.
    """
    check_mask(mask)
    return Totals(mask.sum().double(), mask.any(-1).sum().double())


def _reciprocal(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1.0 / x.where(x > 0, 1.0), 0.0)


def loss_weights(mask: Mask, mode: str, *, totals: Totals, horizon: Scalar | None = None) -> Tokens:
    """The weight of each token, float64 [B, T], 0 where `mask` is False: the loss is (weights * per_token).sum().

    `mask` [B, T] holds whole rows, any part of the mini-batch; `totals` counts the whole mini-batch over all ranks, so
    that losses and gradients add. Per token of a row with n tokens:

    - "token-mean": 1 / tokens
    - "token-sum": 1
    - "seq-mean-token-sum": 1 / sequences
    - "seq-mean-token-mean": 1 / (n * sequences)
    - "seq-mean-token-sum-norm": 1 / (horizon * sequences), a constant length (Dr. GRPO, arXiv:2503.20783)

    Rows without tokens count nowhere. Totals of zero give weights of zero. `horizon` has no default: the
    padding width would make the gradient depend on the longest response of the batch.
    Raises ValueError for an unknown mode, a horizon with another mode, and a mask that is not bool [B, T].
    """
    check_mask(mask)
    if mode not in MODES:
        unknown("loss mode", mode, MODES)
    if (mode == "seq-mean-token-sum-norm") != (horizon is not None):
        raise ValueError(
            f"mode {mode!r} with horizon={horizon}: horizon (the length to divide by, such as the longest allowed "
            'response) belongs to "seq-mean-token-sum-norm" and to it alone'
        )
    if horizon is not None:
        positive("horizon", horizon)
    ones = mask.double()
    sequences = _reciprocal(totals.sequences.to(ones))
    if mode == "token-sum":
        return ones
    if mode == "token-mean":
        return ones * _reciprocal(totals.tokens.to(ones))
    if mode == "seq-mean-token-mean":
        return ones * (sequences / row_counts(mask, ones.dtype))[..., None]
    return ones * (sequences if horizon is None else sequences / horizon)


def positive_weights(scores: Rows, mask: Mask) -> Tokens:
    """The weight of each token in the mean over the tokens of all rows whose score [B] is above 0; float64 [B, T].

    `mask` holds all rows of the mini-batch. The sum of weights * -log-prob is VAPO's positive-example loss
    (arXiv:2504.05118): -1 / (sum of the lengths of right responses) * the sum of their log-probs. Weights are 0 outside
    the mask, and everywhere if no score is above 0. Raises ValueError for a mask that is not bool [B, T].
    """
    check_mask(mask)
    kept = mask & (scores > 0)[:, None]
    return loss_weights(kept, "token-mean", totals=count_totals(kept))
