"""Batches of tokens for the tests of losses: Hypothesis draws sizes and a seed, torch draws the numbers."""

import math
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

GARBAGE = (math.nan, math.inf, -math.inf, 1e30)


class Batch(NamedTuple):
    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor


def masked_tokens(rows: int, columns: int, density: float, generator: torch.Generator) -> Tensor:
    return torch.rand(rows, columns, generator=generator) < density


@st.composite
def batches(draw, rows=(1, 5), columns=(1, 6), spread=1.0):
    """Log-probs whose ratios spread over both sides of every bound, and a mask with empty and full rows."""
    b, t = draw(st.integers(*rows)), draw(st.integers(*columns))
    density = draw(st.sampled_from([0.5, 0.3, 0.7, 0.8, 0.6, 0.0, 1.0]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    old = -3 * torch.rand(b, t, generator=g, dtype=torch.float64)
    new = (old + spread * torch.randn(b, t, generator=g, dtype=torch.float64)).clamp(max=-1e-3)
    adv = torch.randn(b, t, generator=g, dtype=torch.float64)
    return Batch(new, old, adv, masked_tokens(b, t, density, g))


def spoil(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with garbage of every kind where the mask is False."""
    kinds = torch.tensor(GARBAGE, dtype=x.dtype)
    noise = kinds[torch.arange(x.numel()) % len(kinds)].reshape(x.shape)
    return torch.where(mask, x, noise)


def gradient(fn, x: Tensor) -> Tensor:
    """The gradient of the sum of fn(x)."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(fn(x).sum(), x)[0]


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(x, high))


def mean(xs) -> float:
    xs = list(xs)
    return sum(xs) / len(xs)


def std(xs, *, unbiased: bool) -> float:
    xs = list(xs)
    if len(xs) < 2:
        return 0.0
    middle = mean(xs)
    return math.sqrt(sum((x - middle) ** 2 for x in xs) / (len(xs) - unbiased))


def kept(x: Tensor, mask: Tensor) -> list[list[float]]:
    """Each row's values inside the mask."""
    return [
        [v for v, m in zip(row, keep, strict=True) if m] for row, keep in zip(x.tolist(), mask.tolist(), strict=True)
    ]
