"""Root-mean-square norms by torch's function."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fppo_kernels.shapes import Float


def functional(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, " h"], *, eps: float, offset: float = 0.0
) -> Float[Tensor, "*rows h"]:
    """Compute `eager` by torch.nn.functional.rms_norm."""
    if not offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)  # 1 + weight would lose bits
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide) + offset, eps).to(x.dtype)
