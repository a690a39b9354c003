# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Gated activations by one fused Triton program forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton as _triton
from torch import Tensor

from fppo_kernels.glu._triton_kernels import glu_backward, glu_forward
from fppo_kernels.glu.eager import ACTIVATIONS, eager
from fppo_kernels.shapes import Float
from fppo_kernels.transforms import TwoPass, run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 1024


def _cut(count: int, activation: str) -> tuple[tuple[int], dict[str, Any]]:
    """The grid for `count` numbers, and the programs' compile-time constants."""
    return (_triton.cdiv(count, BLOCK),), {"KIND": activation, "BLOCK": BLOCK}


def _forward(activation: str, gate: Tensor, up: Tensor) -> tuple[tuple[Tensor], tuple[()]]:
    gate, up = gate.contiguous(), up.contiguous()
    out, count = torch.empty_like(gate), gate.numel()
    grid, settings = _cut(count, activation)
    if count:
        with torch.cuda.device_of(gate):
            glu_forward[grid](gate, up, out, count, **settings)
    return (out,), ()


def _backward(
    activation: str, tensors: tuple[Tensor, Tensor], kept: tuple[()], grads: tuple[Tensor], needed: tuple[bool, ...]
) -> tuple[Tensor, Tensor]:
    gate, up, grad = (x.contiguous() for x in (*tensors, *grads))
    d_gate, d_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    grid, settings = _cut(count, activation)
    if count:
        with torch.cuda.device_of(gate):
            glu_backward[grid](gate, up, grad, d_gate, d_up, count, **settings)
    return d_gate, d_up


def _definition(activation: str, gate: Tensor, up: Tensor) -> tuple[Tensor]:
    return (eager(gate, up, activation=activation),)


_PASSES = TwoPass(forward=_forward, backward=_backward, definition=_definition)


def triton(
    gate: Float[Tensor, "*rows h"], up: Float[Tensor, "*rows h"], *, activation: str = "silu"
) -> Float[Tensor, "*rows h"]:
    """Compute `eager` in one pass, in float32, rounded once. Only `gate` and `up` are saved for the backward pass.

    Derivatives beyond the first are those of `eager`. Raises ValueError for float64, mixed dtypes, and an unknown
    activation.
    """
    if gate.dtype not in DTYPES or gate.dtype != up.dtype:
        raise ValueError(
            f"glu/triton takes float32, bfloat16 or float16, got {gate.dtype} and {up.dtype}; glu/eager takes any"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"glu/triton has no activation {activation!r}; it has {list(ACTIVATIONS)}")
    return run(_PASSES, activation, gate.contiguous(), up.contiguous())[0]
