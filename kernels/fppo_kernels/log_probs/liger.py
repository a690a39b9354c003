# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Log-probs and entropy by Liger's fused linear and scaled cross entropy (Hsu et al., 2024), for comparison."""

from __future__ import annotations

import torch
from liger_kernel.ops.fused_linear_scaled_cross_entropy import (  # type: ignore[import-not-found]
    LigerFusedLinearScaledCrossEntropyFunction,
)
from torch import Tensor

from fppo_kernels.collectives import Axis
from fppo_kernels.log_probs.reference import LogProbs
from fppo_kernels.shapes import Float, Int


def liger(
    hidden: Float[Tensor, "n h"],
    weight: Float[Tensor, "v h"],
    labels: Int[Tensor, " n"],
    *,
    bias: Float[Tensor, " v"] | None = None,
    temperature: float | Float[Tensor, ""] | Float[Tensor, " n"] = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    entropy: bool = False,
    sum_squared: bool = False,
    axis: Axis | None = None,
) -> LogProbs:
    """Compute `reference` for one temperature. A bias, soft cap, sum of squares or axis raises ValueError.

    In the backward pass the weight's gradient is summed in the weight's dtype, 512 tokens at a time.
    """
    asked = {
        "bias": bias is not None,
        "softcap": softcap is not None,
        "sum_squared": sum_squared,
        "axis": axis is not None and axis.size > 1,
        "temperature per token": isinstance(temperature, Tensor) and temperature.ndim > 0,
    }
    if lacking := [name for name, wanted in asked.items() if wanted]:
        raise ValueError(f"log_probs/liger has no {' and no '.join(lacking)}; log_probs/chunked has")
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if not len(hidden):
        nothing = (hidden.sum() + weight.sum()).to(wide) * 0 + hidden.new_zeros(0, dtype=wide)
        return LogProbs(nothing, nothing if entropy else None)
    out = LigerFusedLinearScaledCrossEntropyFunction.apply(
        hidden, weight, labels, temperature=float(temperature) / scale, return_entropy=entropy
    )
    nll, moments = out if entropy else (out, None)
    return LogProbs(-nll.to(wide), None if moments is None else moments.to(wide))
