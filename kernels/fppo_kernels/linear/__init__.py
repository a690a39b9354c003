"""Linear layers: x @ weight.T + bias."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fppo_kernels.linear import plain as definition
from fppo_kernels.operation import Arguments, Drawn, Kernel, Operation, OperationCost, Shape, filled, normal64


def _call(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    return {"result": kernel(x["x"], x["weight"], keywords.get("bias"))}


def _draw(generator: torch.Generator, rows: int, width: int, number: int, wide: int | None) -> Drawn:
    """Draw weights with twice or half as many outputs as inputs, with or without a bias, and inputs [(2,) rows, H]."""
    draw, out = partial(normal64, generator), 2 * width if number % 2 else (width + 1) // 2
    batch = (2, rows) if number >= 2 else (rows,)
    extras = {"bias": draw(out)} if number % 3 else {}
    inputs = {"x": draw(*batch, width), "weight": draw(out, width) / width**0.5}
    return Drawn(inputs, extras, draw(*batch, out))


def _sized(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    rows, width, out = shape["N"], shape["H"], shape["M"]
    return filled(device, dtype, (rows, out), {}, x=(rows, width), weight=(out, width))


def _cost(shape: Shape, itemsize: int) -> OperationCost:
    rows, width, out = shape["N"], shape["H"], shape["M"]
    read, written = (rows * width + out * width) * itemsize, rows * out * itemsize
    product = 2 * rows * width * out
    return OperationCost(
        bytes_forward=read + written,
        bytes_total=3 * read + 2 * written,
        flops_forward=product,
        flops_total=3 * product,
        words="bytes: x and weight read, with backward again, their gradients written; work: 2 N H M, with backward 3 "
        "times that",
    )


OPERATION = Operation(
    name="linear",
    call=_call,
    reference=definition.plain,
    leaves=("x", "weight", "bias"),
    rows=("x",),
    draw=_draw,
    shape={"N": 1024, "H": 512, "M": 1536},
    sized=_sized,
    cost=_cost,
    bound="matmul",
)
