# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Linear layers of few rows in C++, in one pass over the weight; those of more rows by oneDNN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fppo_kernels._cpp import KINDS, call
from fppo_kernels.linear.onednn import is_plain, onednn, packed
from fppo_kernels.shapes import Float
from fppo_kernels.transforms import active

FEW = 12  # the most rows that are multiplied here; oneDNN's product is as fast from about 16 rows on


class Joined(NamedTuple):
    """Weights [M, H] with the same input: as they are `stored`, for few rows, and a copy of them one below the other
    in oneDNN's layout, for more."""

    stored: Sequence[Tensor]
    copied: Tensor


def joined(*weights: Tensor) -> Tensor | Joined:
    """Join weights [M, H] into one for `cpp`, for products without gradients. It refers to the weights, and copies them
    for products of many rows (see `onednn.packed`). Weights that cannot be multiplied in C++ are only copied."""
    copied = packed(*weights)
    return Joined(weights, copied) if all(map(is_plain, weights)) else copied


def cpp(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, "m h"] | Joined, bias: Float[Tensor, " m"] | None = None
) -> Float[Tensor, "*rows m"]:
    """Compute x @ weight.T + bias: for up to 12 rows without gradients in float32 or wider, rounded once, else by
    `onednn`, in whatever it supports.

    The last bits of a row depend on the number of rows.
    """
    stored, copied = weight if isinstance(weight, Joined) else ((weight,), weight)
    if 0 < x.numel() <= FEW * x.shape[-1] and _fits(x, stored, bias):
        return _multiplied(x, stored, bias)
    return onednn(x, copied, bias)


def _fits(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> bool:
    operands = (x, *weights) if bias is None else (x, *weights, bias)
    if torch.is_grad_enabled() and any(each.requires_grad for each in operands):
        return False
    if torch.compiler.is_compiling() or active() or x.dtype not in KINDS:
        return False
    plain = all(is_plain(each) and each.dtype == x.dtype for each in operands)
    fits = plain and all(each.shape[1:] == x.shape[-1:] and each.is_contiguous() for each in weights)
    return fits and (bias is None or bias.shape == (sum(each.shape[0] for each in weights),))


def _multiplied(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    width, outs, first = x.shape[-1], sum(each.shape[0] for each in weights), 0
    out, own = x.new_empty(*x.shape[:-1], outs), None if bias is None else bias.contiguous()
    tensors, sizes = x.contiguous(), (x.numel() // width, width)
    for weight in weights:
        count = weight.shape[0]
        call("linear/_rows.cpp", f"multiply_{KINDS[x.dtype]}", tensors, weight, own, out, *sizes, count, first, outs)
        first += count
    return out
