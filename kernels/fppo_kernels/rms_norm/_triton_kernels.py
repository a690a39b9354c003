# pyright: basic, reportMissingTypeStubs=false
"""The two Triton programs of `rms_norm/triton` and `add_rms_norm/triton`.

A row of `width` numbers is in registers at once, BLOCK of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def rms_norm_forward(
    x, residual, weight, out, total, scales, rows, width, eps, offset, BLOCK: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """Normalise one row per instance, and store 1 / sqrt(mean(x^2) + eps) in `scales`. With ADD the row is x +
    residual, which is stored in `total`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.load(x + row * width + columns, inside, other=0.0).to(tl.float32)
    if ADD:
        numbers += tl.load(residual + row * width + columns, inside, other=0.0).to(tl.float32)
        rounded = numbers.to(total.dtype.element_ty)
        tl.store(total + row * width + columns, rounded, inside)
        numbers = rounded.to(tl.float32)
    factor = tl.load(weight + columns, inside, other=0.0).to(tl.float32) + offset
    scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / width + eps)
    tl.store(out + row * width + columns, (numbers * scale * factor).to(out.dtype.element_ty), inside)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward(
    x, weight, grad, d_total, scales, d_x, d_weight, rows, width, offset,
    BLOCK: tl.constexpr, WEIGHT: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """Differentiate a subset of the rows, one after the other, and store this instance's sum of their gradients by the
    weight.

    With n = x scale and h = grad (weight + offset): d_x = scale (h - n mean(h n)), plus, with ADD, `d_total`, the
    gradient by the stored sum; d_weight = sum(grad n).
    """
    first, count = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factor = tl.load(weight + columns, inside, other=0.0).to(tl.float32) + offset
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in range(tl.cdiv(rows - first, count)):
        number = (first + turn * count).to(tl.int64)
        row = number * width
        scale = tl.load(scales + number)
        normed = tl.load(x + row + columns, inside, other=0.0).to(tl.float32) * scale
        slope = tl.load(grad + row + columns, inside, other=0.0).to(tl.float32)
        if WEIGHT:
            total += slope * normed
        slope *= factor
        mean = tl.sum(slope * normed, 0) / width
        slope = scale * (slope - normed * mean)
        if ADD:
            slope += tl.load(d_total + row + columns, inside, other=0.0).to(tl.float32)
        tl.store(d_x + row + columns, slope.to(d_x.dtype.element_ty), inside)
    if WEIGHT:
        tl.store(d_weight + first.to(tl.int64) * width + columns, total, inside)
