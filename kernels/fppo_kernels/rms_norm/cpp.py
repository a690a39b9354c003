# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Root-mean-square norms in C++, in one pass over the rows forward and one backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo_kernels._cpp import call, check_shape, kind_of
from fppo_kernels.rms_norm.eager import NormNumbers, norm_of
from fppo_kernels.shapes import Float
from fppo_kernels.transforms import TwoPass, run

PARTS = 16  # parts of the rows, each with its own sum of weight gradients: so the number of threads changes no bit
_FILE = "rms_norm/_rows.cpp"


def _forward(
    options: NormNumbers, x: Tensor, residual: Tensor | None, weight: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor]]:
    """The norm of each row, with a residual also the sum x + residual; and each row's factor, 1 / sqrt(mean(x^2) +
    eps)."""
    x, weight = x.contiguous(), weight.contiguous()
    residual = None if residual is None else residual.contiguous()
    scales = x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
    out, total = torch.empty_like(x), None if residual is None else torch.empty_like(x)
    tensors = x, residual, weight, out, total, scales
    call(_FILE, f"normalise_{kind_of(x)}", *tensors, *x.shape, float(options.eps), float(options.offset))
    return (out,) if total is None else (out, total), (scales,)


def _backward(
    options: NormNumbers,
    tensors: tuple[Tensor, Tensor | None, Tensor],
    kept: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    (x, residual, weight), (*sums, scales) = tensors, kept
    total, (grad, *others) = sums[0] if sums else x.contiguous(), grads
    d_total = others[0].contiguous() if others and others[0] is not None else None
    if grad is None:
        return d_total, d_total, weight.new_zeros(weight.shape) if needed[2] else None
    (rows, width), d_x = total.shape, torch.empty_like(total)
    parts = scales.new_zeros(PARTS, width) if needed[2] else None
    every = total, weight.contiguous(), scales, grad.contiguous(), d_total, d_x, parts
    call(_FILE, f"differentiate_{kind_of(total)}", *every, rows, width, PARTS, float(options.offset))
    return d_x, None if residual is None else d_x, None if parts is None else parts.sum(0).to(weight.dtype)


_NORM = TwoPass(forward=_forward, backward=_backward, definition=norm_of)
_ADDED = TwoPass(forward=_forward, backward=_backward, definition=norm_of, outputs=2, reads=(1,))


def cpp(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, " h"], *, eps: float, offset: float = 0.0
) -> Float[Tensor, "*rows h"]:
    """Compute `eager` in one pass over `x`, which is saved with a number per row for a single backward pass.

    Derivatives beyond the first are those of `eager`. Raises ValueError for float16, mixed dtypes, and tensors that are
    not on the CPU.
    """
    kind_of(x, weight)
    check_shape("weight", weight, x.shape[-1])
    rows = x.reshape(-1, x.shape[-1])
    return run(_NORM, NormNumbers(eps, offset), rows, None, weight)[0].view(x.shape)


def add_cpp(
    x: Float[Tensor, "*rows h"],
    residual: Float[Tensor, "*rows h"],
    weight: Float[Tensor, " h"],
    *,
    eps: float,
    offset: float = 0.0,
) -> tuple[Float[Tensor, "*rows h"], Float[Tensor, "*rows h"]]:
    """Compute `add_eager`, the norm of x + residual and that sum, in one pass over the rows. The sum and a number per
    row are saved for a single backward pass.

    Derivatives beyond the first are those of `add_eager`. Raises ValueError for float16, mixed dtypes, and tensors that
    are not on the CPU.
    """
    kind_of(x, residual, weight)
    check_shape("weight", weight, x.shape[-1])
    check_shape("residual", residual, *x.shape)
    rows, others = (each.reshape(-1, x.shape[-1]) for each in (x, residual))
    normed, total = run(_ADDED, NormNumbers(eps, offset), rows, others, weight)
    return normed.view(x.shape), total.view(x.shape)
