"""What the losses share: scalars that may be tensors, clipping, sums over the mask, names in errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

Scalar = float | Tensor  # a number, or a 0-d tensor so that a loss can be vmapped over it

LOG_RATIO_BOUND = 20.0  # exp(20) squared is still finite in float32


def scalar(value: Scalar, like: Tensor) -> Tensor:
    """`value` as a 0-d tensor with the dtype and device of `like`, without waiting for the device."""
    return value.to(like) if isinstance(value, Tensor) else torch.full((), value, dtype=like.dtype, device=like.device)


def clip(x: Tensor, low: Scalar, high: Scalar) -> Tensor:
    """max(min(x, high), low); the gradient is 1 on both bounds, 0 outside."""
    return torch.clamp(x, min=scalar(low, x), max=scalar(high, x))


def clean(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with 0 where `mask` is False: before any arithmetic, so that garbage reaches no gradient."""
    return tuple(x.where(mask, 0.0) for x in tensors)


def row_counts(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """How many positions of each row count, at least 1, [B]."""
    return mask.sum(-1).clamp(min=1).to(dtype)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean of each row over the mask, [B]; 0 for a row without positions."""
    return x.where(mask, 0.0).sum(-1) / row_counts(mask, x.dtype)


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, *, bound: float | None = LOG_RATIO_BOUND) -> Tensor:
    """log_probs - old_log_probs, clamped to +-`bound` (the gradient is 0 beyond it); old is a constant."""
    delta = log_probs - old_log_probs.detach()
    return delta if bound is None else delta.clamp(-bound, bound)


def positive(name: str, value: Scalar) -> None:
    """ValueError unless `value` is > 0. A tensor is not looked at: that would wait for the device."""
    if not isinstance(value, Tensor) and not value > 0:
        raise ValueError(f"{name} must be > 0, got {value}")


def unknown(what: str, given: str, choices: Iterable[str]) -> NoReturn:
    """ValueError that names the nearest of the choices."""
    names = list(choices)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.0)
    raise ValueError(f"unknown {what} {given!r}; did you mean {near[0]!r}? The choices are {', '.join(names)}")
