# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Rotary positions in C++, in one pass over the heads forward and one backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo_kernels._cpp import call, check_shape, kind_of
from fppo_kernels.rotary._turned import turned
from fppo_kernels.shapes import Float


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    out, (heads, width) = torch.empty_like(x), x.shape[-2:]
    call("rotary/_heads.cpp", f"turn_{kind_of(x)}", x, cos, sin, out, cos.numel() // width, heads, width, sign)
    return out


def cpp(
    query: Float[Tensor, "*rows q d"],
    key: Float[Tensor, "*rows k d"],
    cos: Float[Tensor, "*rows d"],
    sin: Float[Tensor, "*rows d"],
) -> tuple[Float[Tensor, "*rows q d"], Float[Tensor, "*rows k d"]]:
    """Compute `eager` in one pass, in float32 or wider, rounded once. Derivatives beyond the first are those of
    `eager`.

    Raises ValueError for float16, mixed dtypes, and tensors that are not on the CPU.
    """
    kind_of(query, key, cos, sin)
    width = query.shape[-1]
    check_shape("key", key, *query.shape[:-2], key.shape[-2], width)
    for name, x in {"cos": cos, "sin": sin}.items():
        check_shape(name, x, *x.shape[:-1], width)
    return turned(query, key, cos, sin, _turn)
