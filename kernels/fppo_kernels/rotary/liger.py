# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Rotary positions by Liger's Triton kernels (Hsu et al., 2024), for comparison."""

from __future__ import annotations

from liger_kernel.ops.rope import LigerRopeFunction  # type: ignore[import-not-found]
from torch import Tensor

from fppo_kernels.shapes import Float


def liger(
    query: Float[Tensor, "*rows q d"],
    key: Float[Tensor, "*rows k d"],
    cos: Float[Tensor, "*rows d"],
    sin: Float[Tensor, "*rows d"],
) -> tuple[Float[Tensor, "*rows q d"], Float[Tensor, "*rows k d"]]:
    """Compute `eager` by Liger's kernels, which get all tokens as one row."""
    if not query.numel():
        return query * cos.unsqueeze(-2), key * cos.unsqueeze(-2)
    # copies: Liger writes over its arguments, which it expects as [1, heads, N, D]
    rows = [x.clone().flatten(0, -3)[None].transpose(1, 2) for x in (query, key)]
    angles = [x.expand(*query.shape[:-2], -1).flatten(0, -2)[None] for x in (cos, sin)]
    turned = LigerRopeFunction.apply(*rows, *angles)
    return turned[0].transpose(1, 2).reshape(query.shape), turned[1].transpose(1, 2).reshape(key.shape)
