# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Gated activations in C++, in one pass over the numbers forward and one backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo_kernels._cpp import call, check_shape, kind_of
from fppo_kernels.glu.eager import ACTIVATIONS, eager
from fppo_kernels.shapes import Float
from fppo_kernels.transforms import TwoPass, run

_FILE = "glu/_numbers.cpp"


def _forward(activation: str, gate: Tensor, up: Tensor) -> tuple[tuple[Tensor], tuple[()]]:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    call(_FILE, f"{activation}_forward_{kind_of(gate)}", gate, up, out, gate.numel())
    return (out,), ()


def _backward(
    activation: str, tensors: tuple[Tensor, Tensor], kept: tuple[()], grads: tuple[Tensor], needed: tuple[bool, ...]
) -> tuple[Tensor, Tensor]:
    gate, up, grad = (x.contiguous() for x in (*tensors, *grads))
    slopes = torch.empty_like(gate), torch.empty_like(up)
    call(_FILE, f"{activation}_backward_{kind_of(gate)}", gate, up, grad, *slopes, gate.numel())
    return slopes


def _definition(activation: str, gate: Tensor, up: Tensor) -> tuple[Tensor]:
    return (eager(gate, up, activation=activation),)


_PASSES = TwoPass(forward=_forward, backward=_backward, definition=_definition)


def cpp(
    gate: Float[Tensor, "*rows h"], up: Float[Tensor, "*rows h"], *, activation: str = "silu"
) -> Float[Tensor, "*rows h"]:
    """Compute `eager` in one pass, in float32 or wider, rounded once. Only `gate` and `up` are saved for the backward
    pass.

    Derivatives beyond the first are those of `eager`. Raises ValueError for float16, mixed dtypes, tensors that are not
    on the CPU, and an unknown activation.
    """
    kind_of(gate, up)
    check_shape("up", up, *gate.shape)
    if activation not in ACTIVATIONS:
        raise ValueError(f"glu/cpp has no activation {activation!r}; it has {list(ACTIVATIONS)}")
    return run(_PASSES, activation, gate.contiguous(), up.contiguous())[0]
