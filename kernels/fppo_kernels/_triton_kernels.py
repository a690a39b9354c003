# pyright: basic, reportMissingTypeStubs=false
"""Parts of several Triton programs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Compute tanh to within a few units in the last place, also near 0."""
    square = x * x
    near = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * (62 / 2835)))))
    shrunk = tl.exp(-2 * tl.abs(x))
    far = (1 - shrunk) / (1 + shrunk)
    bound: tl.constexpr = 1e-4 if x.dtype == tl.float64 else 0.0625  # pyright: ignore[reportAssignmentType]
    return tl.where(square < bound, near, tl.where(x < 0, -far, far))


@triton.jit
def multiply_add(left, right, total, WIDEN: tl.constexpr):
    """Compute total + left @ right in the dtype of `total`, without TensorFloat-32.

    WIDEN is for the interpreter, which cannot multiply bfloat16: its float32 products of them are the same numbers.
    """
    if WIDEN:
        left, right = left.to(total.dtype), right.to(total.dtype)
    return tl.dot(left, right, total, input_precision="ieee", out_dtype=total.dtype)
