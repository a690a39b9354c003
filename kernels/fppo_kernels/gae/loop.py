"""Generalised advantage estimates by a loop over time: the reference implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo_kernels.shapes import Bool, Float


def loop(
    rewards: Float[Tensor, "b t"],
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    gamma: float | Float[Tensor, ""] = 1.0,
    lam: float | Float[Tensor, ""] = 1.0,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """Advantages and returns [B, T] of `rewards` and `values` [B, T] over the tokens of `mask` (bool [B, T]).

    A_t = delta_t + gamma lam A_s with delta_t = r_t + gamma V_s - V_t, s the row's next token in the mask (after the
    last one V = A = 0); returns = A + V; both 0 outside the mask. Schulman et al., arXiv:1506.02438, equation 16.

    Computed in the arguments' dtype, at least float32. No gradient passes through. Values outside the mask have no
    effect. `gamma` and `lam` may be 0-d tensors, also under torch.func.vmap.
    """
    dtype = torch.promote_types(rewards.dtype, values.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    rewards, values = (x.detach().to(wide).where(mask, 0.0) for x in (rewards, values))
    carry = following = rewards.new_zeros(len(mask))
    columns: list[Tensor] = []
    for t in reversed(range(mask.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        carry = torch.where(here, delta + gamma * lam * carry, carry)
        following = torch.where(here, values[:, t], following)
        columns.append(carry)
    advantages = torch.stack(columns[::-1], 1).where(mask, 0.0) if columns else rewards
    return advantages.to(dtype), (advantages + values).to(dtype)
