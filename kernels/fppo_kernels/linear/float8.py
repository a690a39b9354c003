# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Linear layers by products of 8-bit floating-point numbers (e4m3), with a scale for each row.

The recipe is torchao's `rowwise_with_gw_hp` (https://github.com/pytorch/ao, torchao/float8/config.py); its classes wrap
modules and tensors, and its functions are not public, so that only the formula is from there. With Q(a), a rounded to
e4m3 row by row, and q(a), with one scale for all rows:

    y = Q(x) @ Q(W).T + bias      dx = Q(dy) @ q(W)      dW = dy.T @ x      dbias = sum of the rows of dy

So a token's result, and the gradient for its input, do not depend on other tokens. The gradient of the weight, which
sums over tokens, is not rounded. A scale is the largest power of two that keeps the row within 448, e4m3's largest
number. It rounds nothing. A rank with only a part of the row may have another scale, which changes only numbers below
2**-13 of the row's largest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fppo_kernels.shapes import Float
from fppo_kernels.transforms import refuse

CODES = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_UNIT = 16  # sides of a product are multiples of this
_BITS, _LARGEST = 23, 0x600000  # bits of a float32's fraction; the fraction of 448 = 1.75 * 2**8
_POWER = 262  # 448's exponent plus the bias of 1 twice: 8 + 127 + 127
_SMALLEST = 253  # the exponent of a scale whose inverse is a normal number


class Coded(NamedTuple):
    """Numbers [R, K] as e4m3 codes, and the value of a code of 1, float32 [R, 1] or [1, 1]."""

    codes: Tensor
    unit: Tensor


def coded(x: Tensor, *, by_row: bool = True) -> Coded:
    """Encode a matrix [R, K] in e4m3. A row with a number that is not finite gets NaN as its unit."""
    top = torch.linalg.vector_norm(x, float("inf"), dim=-1 if by_row else (0, 1), keepdim=True).float()
    bits = top.view(torch.int32)
    power = (_POWER - (bits >> _BITS) - (bits & ((1 << _BITS) - 1)).gt(_LARGEST).int()).clamp(max=_SMALLEST)
    scale = (power << _BITS).view(torch.float32)
    unit = (254 - power << _BITS).view(torch.float32).where(top.isfinite(), torch.nan)
    # a power of two rounds nothing; float16 lacks some of them
    scaled = x.float() * scale if x.dtype == torch.float16 else x * scale.to(x.dtype)
    return Coded(scaled.to(CODES), unit)


def float8(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, "m h"], bias: Float[Tensor, " m"] | None = None
) -> Float[Tensor, "*rows m"]:
    """Compute x @ weight.T + bias from 8-bit operands, in the dtype of `x`, with the gradient of the formula above;
    only first derivatives.

    On a GPU the sums of y are those of its fast accumulation. Raises ValueError for a dtype that is not float32,
    bfloat16 or float16.
    """
    refuse("linear/float8", "its codes are steps; linear/torch has")
    if x.dtype not in DTYPES:
        raise ValueError(f"linear/float8 computes in {[str(d) for d in DTYPES]}, got {x.dtype}: take linear/torch")
    if x.shape[-1] != weight.shape[1]:  # the compiler of torch 2.11 must know it outside of the Function, too
        raise ValueError(f"linear/float8: rows of {x.shape[-1]} numbers, and a weight {list(weight.shape)}")
    if not x.numel() or not weight.numel():
        return F.linear(x, weight, bias)
    return _Float8Linear.apply(x, weight, bias)  # type: ignore[return-value]


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        y = _product(coded(rows), coded(weight), x.dtype, fast=True).reshape(*x.shape[:-1], len(weight))
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            codes, unit = coded(weight, by_row=False)
            d_x = _product(coded(rows), Coded(codes.t(), unit), x.dtype, fast=False).reshape(x.shape)
        if ctx.needs_input_grad[1]:
            d_weight = rows.t() @ x.reshape(-1, x.shape[-1])
        return d_x, d_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def _product(a: Coded, b: Coded, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Compute a @ b.T for [R, K] and [M, K], in `dtype`."""
    own, other = a._replace(codes=_filled(a.codes)), b._replace(codes=_filled(b.codes, rows=True))
    # GPUs have products with row scales in bfloat16 only, and slow ones without fast accumulation
    scaled = fast and own.codes.is_cuda and dtype == torch.bfloat16
    return (_scaled if scaled else _scaled_after)(own, other, dtype)[:, : len(b.codes)]


def _scaled(a: Coded, b: Coded, dtype: torch.dtype) -> Tensor:
    """Compute the scaled product in one kernel."""
    unit = F.pad(b.unit, (0, 0, 0, len(b.codes) - len(b.unit)))
    return torch.ops.aten._scaled_mm(a.codes, b.codes.t(), a.unit, unit.t(), out_dtype=dtype, use_fast_accum=True)


def _scaled_after(a: Coded, b: Coded, dtype: torch.dtype) -> Tensor:
    """Compute the product of codes, then apply the units, which rounds nothing; `b` may have a single unit."""
    one = a.unit.new_ones(())
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    out = torch.ops.aten._scaled_mm(a.codes, b.codes.t(), one, one, out_dtype=wide)
    unit = F.pad(b.unit, (0, 0, 0, len(b.codes) - len(b.unit))) if len(b.unit) > 1 else b.unit
    return out.mul_(a.unit.to(wide)).mul_(unit.t().to(wide)).to(dtype)


def _filled(codes: Tensor, *, rows: bool = False) -> Tensor:
    """Lay out codes contiguously, padded with zeros so that a product supports the number of columns, and with `rows`
    also the number of rows."""
    more = -codes.shape[1] % _UNIT, -codes.shape[0] % _UNIT if rows else 0
    if any(more):
        codes = F.pad(codes.view(torch.uint8), (0, more[0], 0, more[1])).view(CODES)
    return codes.contiguous()
