"""Disagreement of an ensemble of critics, and the tokens that it leaves in the policy loss or the entropy term."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo.losses._common import check_tokens
from fppo.shapes import Mask, Tokens
from fppo_kernels.shapes import Bool, Float


def disagreement(values: Float[Tensor, "n b t"]) -> Tokens:
    """The deviation [B, T] of the values [N, B, T] of N critics from their mean: sqrt(mean_n (V_n - mean V)^2)."""
    return values.detach().double().std(0, correction=0).to(values.dtype)


def decisive(disagreement: Tokens, mask: Mask, *, share: float) -> Bool[Tensor, "b t"]:
    """The mask, bool [B, T], without the `share` of its tokens on which the critics agree most.

    Where critics trained on different prompts agree, a token teaches the policy little: AsyPPO (arXiv:2510.01656)
    multiplies the advantages of these tokens by 0. Of n tokens, those with a disagreement below the
    (1 + floor(share * n))-th smallest are removed, so that ties go or stay together, and all stay where all are equal.
    Pass the whole global batch. Raises ValueError for a share outside [0, 1), and for other shapes.
    """
    check_tokens(mask, disagreement=disagreement)
    if not 0 <= share < 1:
        raise ValueError(f"share={share}: give the share of the tokens to remove, from 0 to below 1")
    if not disagreement.numel():
        return mask
    ordered = disagreement.detach().where(mask, torch.inf).flatten().sort().values
    gone = (mask.sum().double() * share).floor().long()
    return mask & (disagreement >= ordered.gather(0, gone[None]))


def undisputed(disagreement: Tokens, mask: Mask, *, share: float) -> Bool[Tensor, "b t"]:
    """The mask, bool [B, T], without the `share` of its tokens on which the critics disagree most.

    Strong disagreement marks states that the critics hardly know, where entropy is not exploration worth a bonus:
    AsyPPO (arXiv:2510.01656) leaves these tokens out of its entropy term. Arguments and errors are those of `decisive`.
    Of n tokens, those with a disagreement above the (1 + floor(share * n))-th greatest are removed.
    """
    return decisive(-disagreement, mask, share=share)
