# pyright: basic, reportMissingTypeStubs=false
"""The Triton program of `linear/fixed`."""

from __future__ import annotations

import triton
import triton.language as tl

from fppo_kernels._triton_kernels import multiply_add


@triton.jit(do_not_specialize=["rows", "outs"])
def product(
    x, weight, bias, out, rows, outs, width, along, across,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute one tile [BM, BN] of x @ weight.T + bias, adding BK columns at a time from the first to the last.

    Output o has the number k of its weight at o * along + k * across. GROUP adjacent tiles of rows run side by side,
    sharing the cache. Neither the number of rows nor that of outputs is a constant of the program.
    """
    blocks, columns = tl.cdiv(rows, BM), tl.cdiv(outs, BN)
    index = tl.program_id(0)
    first = index // (GROUP * columns) * GROUP
    height = min(blocks - first, GROUP)
    inside = index % (GROUP * columns)
    row = ((first + inside % height) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = ((inside // height) * BN + tl.arange(0, BN)).to(tl.int64)[None, :]
    total = tl.zeros((BM, BN), WIDE)
    for k in range(0, width, BK):
        ks = k + tl.arange(0, BK)
        left = tl.load(x + row * width + ks[None, :], (row < rows) & (ks < width)[None, :], other=0.0)
        place = weight + column * along + ks[:, None] * across
        right = tl.load(place, (column < outs) & (ks < width)[:, None], other=0.0)
        total = multiply_add(left, right, total, WIDEN)
    if BIAS:
        total += tl.load(bias + column, column < outs, other=0.0).to(WIDE)
    tl.store(out + row * outs + column, total.to(out.dtype.element_ty), (row < rows) & (column < outs))
