"""Rotary positions as in their formula."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo_kernels.shapes import Float


def eager(
    query: Float[Tensor, "*rows q d"],
    key: Float[Tensor, "*rows k d"],
    cos: Float[Tensor, "*rows d"],
    sin: Float[Tensor, "*rows d"],
) -> tuple[Float[Tensor, "*rows q d"], Float[Tensor, "*rows k d"]]:
    """Rotate each head of queries and keys, with halves (a, b), to (a cos - b sin, b cos + a sin).

    `cos` and `sin`, constants, have each angle twice, once per half. RoFormer (arXiv:2104.09864), with halves as in
    Llama. Models with this kernel rotate heads by their own code.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return query * cos + _turned(query) * sin, key * cos + _turned(key) * sin


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)
