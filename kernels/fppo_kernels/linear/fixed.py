# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Linear layers by one Triton program, with which the bits of a row do not depend on other rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton as _triton
from torch import Tensor
from torch.nn import functional as F

from fppo_kernels._fixed import INTERPRETED, aligned, check_tensors, is_aligned, wide_of
from fppo_kernels.linear._triton_kernels import product
from fppo_kernels.shapes import Float
from fppo_kernels.transforms import TwoPass, run

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class ProductTiles(NamedTuple):
    """The tile that an instance computes, [rows, outs], `inner` numbers of each row at a time."""

    rows: int
    outs: int
    inner: int
    stages: int


def tiles_of(dtype: torch.dtype) -> ProductTiles:
    """The tile of a dtype. It is the same for any number of rows, since another one may add in another order."""
    if dtype == torch.bfloat16:
        return ProductTiles(64, 128, 64, stages=3)
    return ProductTiles(64, 64, 32 if dtype == torch.float32 else 16, stages=2)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight.T + bias [N, M] for [N, H] and [M, H]; the weight may be transposed."""
    laid = is_aligned(weight) and 1 in weight.stride()
    x, weight, bias = aligned(x), weight if laid else aligned(weight), None if bias is None else aligned(bias)
    (rows, width), outs, tiles = x.shape, len(weight), tiles_of(x.dtype)
    out = x.new_empty(rows, outs)
    grid = (_triton.cdiv(rows, tiles.rows) * _triton.cdiv(outs, tiles.outs),)
    settings: dict[str, Any] = {
        "BM": tiles.rows,
        "BN": tiles.outs,
        "BK": tiles.inner,
        "GROUP": 8,
        "BIAS": bias is not None,
        "WIDE": wide_of(x.dtype)[1],
        "WIDEN": INTERPRETED,
        "num_warps": 4,
        "num_stages": tiles.stages,
    }
    with torch.cuda.device_of(x):
        product[grid](x, weight, bias, out, rows, outs, width, weight.stride(0), weight.stride(1), **settings)
    return out


def _forward(options: None, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[tuple[Tensor], tuple[()]]:
    return (multiply(x, weight, bias),), ()


def _backward(
    options: None,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    kept: tuple[()],
    grads: tuple[Tensor],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    (x, weight, _), (grad,) = tensors, grads
    d_x = multiply(grad, weight.t()) if needed[0] else None
    return d_x, grad.t() @ x if needed[1] else None, grad.sum(0) if needed[2] else None


def _definition(options: None, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
    return (F.linear(x, weight, bias),)


_PASSES = TwoPass(forward=_forward, backward=_backward, definition=_definition)


def fixed(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, "m h"], bias: Float[Tensor, " m"] | None = None
) -> Float[Tensor, "*rows m"]:
    """Compute x @ weight.T + bias with fixed tiles, each added up over H in a fixed order, in float32 or wider without
    TensorFloat-32, rounded once.

    A row of the result has the same bits in any batch, and so has a row of the gradient for `x`. The gradients of
    weight and bias are torch's. Derivatives beyond the first are those of torch. Raises ValueError for mixed dtypes,
    for others than float32, bfloat16 and float64, and for tensors on a CPU without Triton's interpreter.
    """
    check_tensors("linear/fixed", DTYPES, x, weight, bias)
    if not x.numel() or not weight.numel():
        return F.linear(x, weight, bias)
    return run(_PASSES, None, x.reshape(-1, x.shape[-1]), weight, bias)[0].view(*x.shape[:-1], len(weight))
