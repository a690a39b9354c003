"""Mean 0 and variance 1 over the tokens of a batch."""

from __future__ import annotations

import torch

from fppo.advantages._common import rounding
from fppo.losses._common import check_tokens
from fppo.shapes import Mask, Tokens


def whiten(x: Tokens, mask: Mask, *, shift_mean: bool = True) -> Tokens:
    """(x - mean) / std over all tokens of the mask, [B, T], 0 outside it; `shift_mean=False` adds the mean again.

    The statistics (unbiased variance, in float64) are over all rows of `x`: pass the whole global batch.
    Shifting and scaling `x` changes nothing. Where the tokens are equal, up to rounding, or fewer than two, the
    result is exactly 0 (or the mean) instead of amplified noise. `x` is a constant to the gradient, floating,
    and the mask bool [B, T], else ValueError.
    """
    check_tokens(mask, x=x)
    if not x.numel():
        return x.detach()
    full = x.detach().double()
    count = mask.sum()
    lowest = full.where(mask, torch.inf).amin().where(count > 0, 0.0)
    largest = full.where(mask, 0.0).abs().amax()
    above = (full - lowest).where(mask, 0.0)
    peak = above.amax()
    unit = above / peak.where(peak > 0, 1.0)
    mean = unit.sum() / count.clamp(min=1)
    deviation = (unit - mean).where(mask, 0.0)
    std = (deviation.square().sum() / (count - 1).clamp(min=1)).sqrt()
    varied = (peak > rounding(largest, x.dtype)) & (count > 1)
    result = (deviation / std.where(varied, 1.0)).where(varied, 0.0)
    if not shift_mean:
        result = result + lowest + mean * peak
    return result.where(mask, 0.0).to(x.dtype)
