"""What one model's training is, whole: saving it saves everything."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo.tree import state

Params = dict[str, Tensor]


@state
class OptState:
    """AdamW's first and second moments, in the tree of the parameters, and the number of updates applied."""

    mu: Params
    nu: Params
    count: Tensor  # [] float32, as torch's kernels want it


@state
class TrainState:
    """Parameters, optimizer state, and the number of updates tried (a skipped one counts here, not in `opt.count`)."""

    params: Params
    opt: OptState
    step: int


def init_state(params: Params) -> TrainState:
    """A fresh state around `params`, which it holds without copying."""
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    count = torch.zeros((), dtype=torch.float32, device=next(iter(params.values())).device)
    return TrainState(
        params=params,
        opt=OptState(mu=zeros, nu={name: torch.zeros_like(p) for name, p in params.items()}, count=count),
        step=0,
    )
