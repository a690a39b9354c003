# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Gated activations by Liger's Triton kernels (Hsu et al., 2024), for comparison."""

from __future__ import annotations

from liger_kernel.ops.geglu import LigerGELUMulFunction  # type: ignore[import-not-found]
from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # type: ignore[import-not-found]
from torch import Tensor

from fppo_kernels.shapes import Float


def liger(
    gate: Float[Tensor, "*rows h"], up: Float[Tensor, "*rows h"], *, activation: str = "silu"
) -> Float[Tensor, "*rows h"]:
    """Compute `eager` for "silu" and "gelu_tanh"; "gelu" raises ValueError."""
    if activation == "gelu":
        raise ValueError("glu/liger has no gelu, only its approximation by tanh; glu/eager has")
    if not gate.numel():
        return gate * up
    function = LigerSiLUMulFunction if activation == "silu" else LigerGELUMulFunction
    # copies: Liger writes gradients over its arguments
    return function.apply(gate.clone(), up.clone())
