# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Root-mean-square norms by Liger's Triton kernels (Hsu et al., 2024), for comparison."""

from __future__ import annotations

from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction  # type: ignore[import-not-found]
from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]
from torch import Tensor

from fppo_kernels.shapes import Float


def liger(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, " h"], *, eps: float, offset: float = 0.0
) -> Float[Tensor, "*rows h"]:
    """Compute `eager` by Liger's kernel: in float32 throughout if `offset` is not 0 (as in Gemma); else the normalised
    row is rounded before it is multiplied by the weight."""
    if not x.numel():
        return x * weight
    casting = "gemma" if offset else "llama"
    in_place = False  # copies the gradient, which others may use
    return LigerRMSNormFunction.apply(x, weight, eps, offset, casting, in_place)


def add_liger(
    x: Float[Tensor, "*rows h"],
    residual: Float[Tensor, "*rows h"],
    weight: Float[Tensor, " h"],
    *,
    eps: float,
    offset: float = 0.0,
) -> tuple[Float[Tensor, "*rows h"], Float[Tensor, "*rows h"]]:
    """Compute `add_eager`, the norm of x + residual and that sum, by Liger's kernel: in float32 throughout if `offset`
    is not 0 (as in Gemma); else the normalised row is rounded before it is multiplied by the weight."""
    if not x.numel():
        return (x + residual) * weight, x + residual
    casting = "gemma" if offset else "llama"
    in_place = False
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, casting, in_place)
