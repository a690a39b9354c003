# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Root-mean-square norms by one fused Triton program forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton as _triton
from torch import Tensor

from fppo_kernels._fixed import aligned
from fppo_kernels.rms_norm._triton_kernels import rms_norm_backward, rms_norm_forward
from fppo_kernels.rms_norm.eager import NormNumbers, norm_of
from fppo_kernels.shapes import Float
from fppo_kernels.transforms import TwoPass, run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 1 << 16  # numbers of a row that one instance can hold
INSTANCES = 512  # instances of the backward program at most, since each stores a gradient of the weight


def _cut(width: int, **asked: bool) -> dict[str, Any]:
    """The compile-time constants of programs for rows of `width` numbers: the numbers per instance, its warps, and the
    flags `asked`."""
    block = _triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16), **asked}


def _forward(
    options: NormNumbers, x: Tensor, residual: Tensor | None, weight: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor]]:
    """The norm of each row, with a residual also the sum x + residual; and each row's factor, 1 / sqrt(mean(x^2) +
    eps)."""
    x, weight, (rows, width) = aligned(x), aligned(weight), x.shape
    out, scales = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    total = x if residual is None else torch.empty_like(x)
    if rows:
        with torch.cuda.device_of(x):
            tensors = x, x if residual is None else aligned(residual), weight, out, total, scales
            settings = _cut(width, ADD=residual is not None)
            rms_norm_forward[(rows,)](*tensors, rows, width, *options, **settings)
    return (out,) if residual is None else (out, total), (scales,)


def _backward(
    options: NormNumbers,
    tensors: tuple[Tensor, Tensor | None, Tensor],
    kept: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    (x, residual, weight), (*sums, scales), (grad, *others) = tensors, kept, grads
    x, d_total = sums[0] if sums else x.contiguous(), others[0] if others else None
    if grad is None:
        return d_total, d_total, weight.new_zeros(weight.shape) if needed[2] else None
    rows, width = x.shape
    count, d_x = max(1, min(rows, INSTANCES)), torch.empty_like(x)
    parts = x.new_zeros(count if needed[2] else 0, width, dtype=torch.float32)
    grad, weight = grad.contiguous(), weight.contiguous()
    every = x, weight, grad, grad if d_total is None else d_total.contiguous(), scales, d_x, parts
    if rows:
        with torch.cuda.device_of(x):
            settings = _cut(width, WEIGHT=needed[2], ADD=d_total is not None)
            rms_norm_backward[(count,)](*every, rows, width, options.offset, **settings)
    return d_x, None if residual is None else d_x, parts.sum(0).to(weight.dtype) if needed[2] else None


_NORM = TwoPass(forward=_forward, backward=_backward, definition=norm_of)
_ADDED = TwoPass(forward=_forward, backward=_backward, definition=norm_of, outputs=2, reads=(1,))


def triton(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, " h"], *, eps: float, offset: float = 0.0
) -> Float[Tensor, "*rows h"]:
    """Compute `eager` in one pass over `x`, which is saved with a number per row for a single backward pass.

    Derivatives beyond the first are those of `eager`. Raises ValueError for float64 and for rows of more than 65,536
    numbers.
    """
    _check("rms_norm", x, weight)
    return run(_NORM, NormNumbers(eps, offset), x.reshape(-1, x.shape[-1]), None, weight)[0].view(x.shape)


def add_triton(
    x: Float[Tensor, "*rows h"],
    residual: Float[Tensor, "*rows h"],
    weight: Float[Tensor, " h"],
    *,
    eps: float,
    offset: float = 0.0,
) -> tuple[Float[Tensor, "*rows h"], Float[Tensor, "*rows h"]]:
    """Compute `add_eager`, the norm of x + residual and that sum, in one pass over the rows. The sum and a number per
    row are saved for a single backward pass.

    Derivatives beyond the first are those of `add_eager`. Raises ValueError for `x` or `weight` of float64, and for
    rows of more than 65,536 numbers.
    """
    _check("add_rms_norm", x, weight)
    rows = (each.reshape(-1, x.shape[-1]) for each in (x, residual))
    normed, total = run(_ADDED, NormNumbers(eps, offset), *rows, weight)
    return normed.view(x.shape), total.view(x.shape)


def _check(op: str, x: Tensor, weight: Tensor) -> None:
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise ValueError(
            f"{op}/triton takes float32, bfloat16 and float16, got {x.dtype} and {weight.dtype}; {op}/eager takes any"
        )
    if x.shape[-1] > WIDEST:
        raise ValueError(f"{op}/triton takes rows of at most {WIDEST} numbers, got {x.shape[-1]}")
