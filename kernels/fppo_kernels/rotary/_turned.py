# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Rotary positions as a function of query and key, whose gradient is the turn the other way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Turn = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # of heads [..., H, D] by cos and sin [..., D], or back (-1)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.turn = turn
        return turn(query, cos, sin, 1.0), turn(key, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *(ctx.turn(grad, cos, sin, -1.0) for grad in grads), None, None, None


def turned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """Query and key turned by `turn`, which gets contiguous tensors, with cos and sin of every row."""

    def whole(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
        return turn(x.contiguous(), cos, sin, sign)

    shape = query.shape[:-2] + cos.shape[-1:]
    return _Turned.apply(query, key, *(x.expand(shape).contiguous() for x in (cos, sin)), whole)  # type: ignore[return-value]
