# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Rotary positions as a function of query and key, whose gradient is the inverse rotation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fppo_kernels.rotary.eager import eager
from fppo_kernels.transforms import TwoPass, run

Turn = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # (heads [..., H, D], cos, sin [..., D], 1 or -1)


def _forward(
    turn: Turn, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
    cos, sin = cos.contiguous(), sin.contiguous()
    return (turn(query.contiguous(), cos, sin, 1.0), turn(key.contiguous(), cos, sin, 1.0)), ()


def _backward(
    turn: Turn,
    tensors: tuple[Tensor, ...],
    kept: tuple[()],
    grads: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    heads, (cos, sin) = tensors[:2], (x.contiguous() for x in tensors[2:])
    zeros = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(heads, grads, strict=True))
    return *(turn(grad.contiguous(), cos, sin, -1.0) for grad in zeros), None, None


def _definition(turn: Turn, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return eager(query, key, cos.detach(), sin.detach())


_PASSES = TwoPass(forward=_forward, backward=_backward, definition=_definition, outputs=2)


def turned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """Rotate query and key by the function `turn`, which gets contiguous tensors, and cos and sin for every token."""
    shape = query.shape[:-2] + cos.shape[-1:]
    turns = (x.detach().expand(shape) for x in (cos, sin))
    return run(_PASSES, turn, query, key, *turns)  # type: ignore[return-value]
