# pyright: basic, reportMissingTypeStubs=false
"""The Triton program of `rotary/triton`, which holds both halves [HEADS, BLOCK] of a few heads in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def rotary_turn(x, cos, sin, out, rows, heads, half, sign, HEADS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Rotate one token's heads per instance, a few at a time; with `sign` -1 in the inverse direction."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    within = columns < half
    c = tl.load(cos + row * half * 2 + columns, within, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * half * 2 + columns, within, other=0.0).to(tl.float32)[None, :] * sign
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        at = (row * heads + head[:, None]) * half * 2 + columns[None, :]
        inside = (head < heads)[:, None] & within[None, :]
        a = tl.load(x + at, inside, other=0.0).to(tl.float32)
        b = tl.load(x + at + half, inside, other=0.0).to(tl.float32)
        tl.store(out + at, (a * c - b * s).to(out.dtype.element_ty), inside)
        tl.store(out + at + half, (b * c + a * s).to(out.dtype.element_ty), inside)
