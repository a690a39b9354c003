"""Helpers of losses and advantages: checks of shapes, scalars that may be tensors, sums over the mask, near names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from fppo._errors import nearest
from fppo.shapes import Mask, Rows, Tokens

LEVELS = ("token", "sequence")  # of ratios: each token's, or the product over its row
LOG_RATIO_BOUND = 20.0  # exp(20) squared is still finite in float32


def check_mask(mask: Tensor) -> None:
    """Raise ValueError unless `mask` is bool [B, T]."""
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise ValueError(f"mask must be bool [B, T], got {mask.dtype} {list(mask.shape)}; a 0/1 mask: mask.bool()")


def check_tokens(mask: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless `mask` is bool [B, T] and every tensor is floating with its shape."""
    check_mask(mask)
    check_like("the mask", mask, **tensors)


def check_like(name_of_like: str, like: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless every tensor is floating with the shape of `like`, called `name_of_like` in errors."""
    for name, x in tensors.items():
        if x.shape != like.shape or not x.is_floating_point():
            raise ValueError(
                f"{name} must be floating [B, T] = {list(like.shape)} as {name_of_like}, got {x.dtype} {list(x.shape)}"
            )


def scalar(value: float | Tensor, like: Tensor) -> Tensor:
    """`value` as a tensor (0-d from a number) with the dtype and device of `like`, without waiting for the device."""
    return value.to(like) if isinstance(value, Tensor) else torch.full((), value, dtype=like.dtype, device=like.device)


def clip(x: Tokens, low: float | Tensor, high: float | Tensor) -> Tokens:
    """max(min(x, high), low); the gradient is 1 on both bounds, 0 outside."""
    return torch.clamp(x, min=scalar(low, x), max=scalar(high, x))


def clean(mask: Mask, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with 0 where `mask` is False. To be called before any arithmetic, so that values outside the mask
    reach no gradient."""
    return tuple(x.where(mask, 0.0) for x in tensors)


def clean_inputs(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tokens, Tokens, Tokens]:
    """The log-probs, old log-probs and detached advantages of a policy loss, 0 where `mask` is False.

    Raises ValueError unless the mask is bool [B, T] and the three are floating [B, T].
    """
    check_tokens(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    log_probs, old_log_probs, advantages = clean(mask, log_probs, old_log_probs, advantages.detach())
    return log_probs, old_log_probs, advantages


def row_counts(mask: Mask, dtype: torch.dtype) -> Rows:
    """The number of True positions in each row of the mask, at least 1, [B]."""
    return mask.sum(-1).clamp(min=1).to(dtype)


def row_mean(x: Tokens, mask: Mask) -> Rows:
    """The mean of each row over the mask, [B]; 0 for a row without positions."""
    return x.where(mask, 0.0).sum(-1) / row_counts(mask, x.dtype)


def log_ratio(log_probs: Tokens, old_log_probs: Tokens, *, bound: float | None = LOG_RATIO_BOUND) -> Tokens:
    """log_probs - old_log_probs, clamped to +-`bound` (the gradient is 0 beyond it); old is a constant."""
    delta = log_probs - old_log_probs.detach()
    return delta if bound is None else delta.clamp(-bound, bound)


def positive(name: str, value: float | Tensor) -> None:
    """Raise ValueError unless `value` is > 0. A tensor passes unread: reading it would wait for the device."""
    if not isinstance(value, Tensor) and not value > 0:
        raise ValueError(f"{name} must be > 0, got {value}")


def positive_all(**values: float | Tensor) -> None:
    """Raise ValueError, with the argument's name, for the first value that is not > 0."""
    for name, value in values.items():
        positive(name, value)


def unknown(what: str, name: str, choices: Iterable[str]) -> NoReturn:
    """Raise ValueError for a `name` that is none of the `choices`, with all choices and the one most similar to `name`;
    `what` is what they name."""
    names = list(choices)
    near = nearest(name, names, cutoff=0.0)
    raise ValueError(f"unknown {what} {name!r}; did you mean {near!r}? The choices are {', '.join(names)}")
