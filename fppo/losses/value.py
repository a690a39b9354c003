"""The critic's loss."""

from __future__ import annotations

import torch

from fppo.losses._common import check_tokens, clean, positive, scalar
from fppo.losses._common import clip as bounded
from fppo.metrics import Metrics, masked_mean
from fppo.shapes import Mask, Scalar, Tokens


def value_loss(
    values: Tokens, old_values: Tokens, returns: Tokens, mask: Mask, *, clip: Scalar | None = 0.5
) -> tuple[Tokens, Metrics]:
    """max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2 per token, [B, T]; 0 where `mask` is False.

    PPO's clipped value loss; `clip=None` is half the squared error. `old_values` and `returns` are constants to
    the gradient. All floating [B, T], the mask bool; ValueError for others, and for a clip that is not > 0.
    """
    check_tokens(mask, values=values, old_values=old_values, returns=returns)
    values, old_values, returns = clean(mask, values, old_values.detach(), returns.detach())
    plain = (values - returns).square()
    metrics: Metrics = {"critic/vpred_mean": masked_mean(values, mask)}
    loss = plain
    if clip is not None:
        positive("clip", clip)
        margin = scalar(clip, values)
        clipped = (bounded(values, old_values - margin, old_values + margin) - returns).square()
        metrics["critic/vf_clipfrac"] = masked_mean(clipped > plain, mask)
        loss = torch.maximum(plain, clipped)
    return (0.5 * loss).where(mask, 0.0), metrics
