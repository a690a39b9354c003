# pyright: basic, reportMissingTypeStubs=false
"""The two Triton programs of `glu/triton`; each instance handles BLOCK numbers.

Programs are not specialised on the number of elements. A mask by such a number splits loads into single elements, so
only the last instance has one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activation(x, KIND: tl.constexpr):
    """The activation and its derivative."""
    if KIND == "silu":
        chance = tl.sigmoid(x)
        value = x * chance
        slope = chance * (1 + x * (1 - chance))
    elif KIND == "gelu_tanh":
        root = 1.5957691216057308  # 2 sqrt(2 / pi), for (1 + tanh(y)) / 2 = sigmoid(2 y)
        chance = tl.sigmoid(root * (x + 0.044715 * x * x * x))
        value = x * chance
        slope = chance + x * chance * (1 - chance) * root * (1 + 0.134145 * x * x)
    else:
        chance = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        value = x * chance
        slope = chance + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)  # the normal density
    return value, slope


@triton.jit
def _forward_of(gate, up, out, place, inside, KIND: tl.constexpr):
    value, _ = _activation(tl.load(gate + place, inside).to(tl.float32), KIND)
    result = value * tl.load(up + place, inside).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), inside)


@triton.jit
def _backward_of(gate, up, grad, d_gate, d_up, place, inside, KIND: tl.constexpr):
    value, slope = _activation(tl.load(gate + place, inside).to(tl.float32), KIND)
    wanted = tl.load(grad + place, inside).to(tl.float32)
    by_gate = wanted * slope * tl.load(up + place, inside).to(tl.float32)
    tl.store(d_gate + place, by_gate.to(d_gate.dtype.element_ty), inside)
    tl.store(d_up + place, (wanted * value).to(d_up.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count"])
def glu_forward(gate, up, out, count, KIND: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    if first + BLOCK <= count:
        _forward_of(gate, up, out, place, None, KIND)
    else:
        _forward_of(gate, up, out, place, place < count, KIND)


@triton.jit(do_not_specialize=["count"])
def glu_backward(gate, up, grad, d_gate, d_up, count, KIND: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    if first + BLOCK <= count:
        _backward_of(gate, up, grad, d_gate, d_up, place, None, KIND)
    else:
        _backward_of(gate, up, grad, d_gate, d_up, place, place < count, KIND)
