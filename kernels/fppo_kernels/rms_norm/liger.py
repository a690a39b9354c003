# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The root-mean-square norm by Liger's Triton kernels (Hsu et al., 2024), for comparison."""

from __future__ import annotations

from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction  # type: ignore[import-not-found]
from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]
from torch import Tensor

from fppo_kernels.shapes import Float


def liger(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, " h"], *, eps: float, offset: float = 0.0
) -> Float[Tensor, "*rows h"]:
    """`eager`, all of it in float32 where `offset` is not 0 (as in Gemma), else with the product rounded apart."""
    if not x.numel():
        return x * weight
    casting = "gemma" if offset else "llama"
    in_place = False  # of the gradient, which may be used elsewhere too
    return LigerRMSNormFunction.apply(x, weight, eps, offset, casting, in_place)


def add_liger(
    x: Float[Tensor, "*rows h"],
    residual: Float[Tensor, "*rows h"],
    weight: Float[Tensor, " h"],
    *,
    eps: float,
    offset: float = 0.0,
) -> tuple[Float[Tensor, "*rows h"], Float[Tensor, "*rows h"]]:
    """`add_eager`, as `liger` is `eager`."""
    if not x.numel():
        return (x + residual) * weight, x + residual
    casting = "gemma" if offset else "llama"
    in_place = False
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, casting, in_place)
