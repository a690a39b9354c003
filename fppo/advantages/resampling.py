"""Which rows to train on again: policy filtration by resampling the batch with replacement."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo.losses._common import unknown

RESAMPLING = ("pow", "max_min", "max_random")


def resample(scores: Tensor, noise: Tensor, *, kind: str = "pow", power: float = 2.0) -> Tensor:
    """Rows drawn with replacement, int64 [B], by the weights of PF-PPO (arXiv:2409.06957), for `rows(batch, ...)`.

    `scores` floating [B]; `noise` in [0, 1) [B] makes the draw, such as `key.uniform(row_ids, 1)[:, 0]`. Weights:
    "pow": |S|^power; "max_min": the highest and the lowest scores alone; "max_random": 0.4 for the highest, 0.1 for
    others. 1e-8 is added to each.
    """
    if kind not in RESAMPLING:
        unknown("kind of resampling", kind, RESAMPLING)
    if scores.dim() != 1 or noise.shape != scores.shape:
        raise ValueError(f"scores and noise must be [B] alike, got {list(scores.shape)} and {list(noise.shape)}")
    if not len(scores):
        return torch.zeros(0, dtype=torch.int64, device=scores.device)
    full = scores.detach().double()
    if kind == "pow":
        weights = full.abs().pow(power)
    elif kind == "max_min":
        weights = ((full == full.amax()) | (full == full.amin())).double()
    else:
        weights = torch.full_like(full, 0.1).where(full != full.amax(), 0.4)
    bounds = (weights + 1e-8).cumsum(0)
    drawn = torch.searchsorted(bounds, noise.detach().double() * bounds[-1], right=True)
    return drawn.clamp(max=len(scores) - 1)
