"""What several critics say together: how far apart they are, and where that says nothing new."""

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
    """The tokens [B, T] of the mask that are left once the `share` of them is gone in which critics agree most.

    Where N critics who learned from different prompts agree, a token teaches the policy little: AsyPPO
    (arXiv:2510.01656) gives the advantages of these tokens the factor 0. Of n tokens those go whose disagreement is
    below the (1 + floor(share * n))-th smallest, so that equal ones go or stay together, and all stay where all are
    equal. The whole global batch counts. Raises ValueError for a share that is not in [0, 1), and for other shapes.
    """
    check_tokens(mask, disagreement=disagreement)
    if not 0 <= share < 1:
        raise ValueError(f"share={share}: give the share of the tokens that are to go, from 0 to below 1")
    if not disagreement.numel():
        return mask
    ordered = disagreement.detach().where(mask, torch.inf).flatten().sort().values
    gone = (mask.sum().double() * share).floor().long()
    return mask & (disagreement >= ordered.gather(0, gone[None]))


def undisputed(disagreement: Tokens, mask: Mask, *, share: float) -> Bool[Tensor, "b t"]:
    """The tokens [B, T] of the mask that are left once the `share` of them is gone in which critics disagree most.

    Where critics disagree most a token is of states that they hardly know, and entropy there is no exploration worth a
    bonus: AsyPPO (arXiv:2510.01656) leaves these tokens out of its entropy term. Otherwise as `decisive`: of n tokens
    those go whose disagreement is above the (1 + floor(share * n))-th greatest.
    """
    return decisive(-disagreement, mask, share=share)
