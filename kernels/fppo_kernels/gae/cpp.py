"""Generalised advantage estimates in C++, in one pass over the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo_kernels._cpp import call, check_shape
from fppo_kernels.shapes import Bool, Float


def cpp(
    rewards: Float[Tensor, "b t"],
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    gamma: float | Float[Tensor, ""] = 1.0,
    lam: float | Float[Tensor, ""] = 1.0,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """Compute advantages and returns as `fppo_kernels.gae.loop.loop` does, on a CPU. Raises ValueError for other
    devices.

    The algorithm is the reverse scan of `fppo_kernels.gae.scan`, with doubling within 16 tokens.
    """
    if rewards.device.type != "cpu":
        raise ValueError(f"gae/cpp runs on CPUs, got tensors on {rewards.device}; gae/scan runs anywhere")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}")
    for name, x in {"values": values, "mask": mask}.items():
        check_shape(name, x, *rewards.shape)
    dtype, gamma, lam = torch.promote_types(rewards.dtype, values.dtype), float(gamma), float(lam)
    wide = torch.promote_types(dtype, torch.float32)
    rewards, values = (x.detach().to(wide).contiguous() for x in (rewards, values))
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    tensors = rewards, values, mask.contiguous(), advantages, returns
    call("gae/_rows.cpp", f"gae_{str(wide).removeprefix('torch.')}", *tensors, *mask.shape, gamma, lam)
    return advantages.to(dtype), returns.to(dtype)
