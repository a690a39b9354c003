# pyright: basic, reportMissingTypeStubs=false
"""The Triton program of `rotary/triton`. A head's two halves are in registers at once, BLOCK numbers each."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def turn_kernel(x, cos, sin, out, rows, heads, half, sign, BLOCK: tl.constexpr):  # fmt: skip
    """One token an instance, whose heads are turned one after the other, the other way where `sign` is -1."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < half
    c = tl.load(cos + row * half * 2 + columns, inside, other=0.0).to(tl.float32)
    s = tl.load(sin + row * half * 2 + columns, inside, other=0.0).to(tl.float32) * sign
    for head in range(heads):
        at = (row * heads + head) * half * 2 + columns
        a = tl.load(x + at, inside, other=0.0).to(tl.float32)
        b = tl.load(x + at + half, inside, other=0.0).to(tl.float32)
        tl.store(out + at, (a * c - b * s).to(out.dtype.element_ty), inside)
        tl.store(out + at + half, (b * c + a * s).to(out.dtype.element_ty), inside)
