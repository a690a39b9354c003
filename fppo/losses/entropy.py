"""The entropy bonus."""

from __future__ import annotations

from torch import Tensor

from fppo.losses._common import clean
from fppo.metrics import Metrics, masked_mean


def entropy_loss(entropy: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """-entropy per token [B, T], 0 where `mask` (bool [B, T]) is False: added to a policy loss times its coefficient.

    `entropy` [B, T] is that of the policy's distribution at each position.
    """
    (kept,) = clean(mask, entropy)
    return -kept, {"actor/entropy": masked_mean(kept, mask)}
