# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""`log_probs/triton` with splits of the vocabulary that do not depend on the number of tokens, merged in order."""

from __future__ import annotations

from torch import Tensor

from fppo_kernels.collectives import Axis
from fppo_kernels.log_probs.reference import LogProbs
from fppo_kernels.log_probs.triton import choose_tiling, triton
from fppo_kernels.shapes import Float, Int


def fixed(
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
    """Compute `triton` with the same bits for a token beside any other tokens, forward. Raises ValueError as it
    does."""
    tiling = choose_tiling(hidden, weight)._replace(descriptors=False, fixed=True)
    return triton(
        hidden,
        weight,
        labels,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        scale=scale,
        entropy=entropy,
        sum_squared=sum_squared,
        axis=axis,
        tiling=tiling,
    )
