"""Batches for the laws: sizes, density and a seed are drawn, torch draws the numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)


class Case(NamedTuple):
    mask: Tensor  # [B, T], with holes and empty rows
    groups: Tensor  # [B]
    scores: Tensor  # [B]
    tokens: tuple[Tensor, ...]  # three of [B, T]
    generator: torch.Generator


@st.composite
def cases(draw, dtype: torch.dtype = torch.float64, min_group: int = 1) -> Case:
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 8))
    density = draw(st.sampled_from([0.0, 0.4, 0.8, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    ids = torch.tensor([-3, 0, 7, 2**40])
    count = draw(st.integers(1, 4))
    groups = ids[torch.randint(count, (rows,), generator=generator)]
    mask = torch.rand(rows, width, generator=generator) < density
    if min_group > 1:
        groups = groups.repeat(min_group)
        mask = mask.repeat(min_group, 1)
    scores = torch.randint(-2, 3, (len(groups),), generator=generator).to(dtype) * 0.7
    tokens = tuple(torch.randn(mask.shape, generator=generator, dtype=dtype) for _ in range(3))
    return Case(mask, groups, scores, tokens, generator)


def spoil(x: Tensor, where: Tensor, generator: torch.Generator) -> Tensor:
    """`x` with anything at all where `where` is True."""
    picks = torch.randint(len(GARBAGE), x.shape, generator=generator)
    return torch.tensor(GARBAGE, dtype=x.dtype)[picks].where(where, x)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
