"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467), also of a sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fppo_kernels.operation import (
    Arguments,
    Drawn,
    Kernel,
    Operation,
    OperationCost,
    Shape,
    filled,
    normal64,
    side_by_side,
)
from fppo_kernels.rms_norm import eager as definition

EPS = (1e-6, 1e-2)


def _call(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    return {"result": kernel(x["x"], x["weight"], **keywords)}


def _call_add(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    return {"result": side_by_side(kernel(x["x"], x["residual"], x["weight"], **keywords), "normed", "sum")}


def _draw(generator: torch.Generator, rows: int, width: int, number: int, wide: int | None = None) -> Drawn:
    """Draw rows of size 1, of size sqrt(eps) and large ones, with and without an offset."""
    eps = EPS[number % 2]
    sizes = torch.tensor([1.0, eps**0.5, 100.0], dtype=torch.float64)[torch.arange(rows) % 3, None]
    extras = {"eps": torch.tensor(eps, dtype=torch.float64), "offset": torch.tensor(float(number >= 2))}
    inputs = {"x": sizes * normal64(generator, rows, width), "weight": normal64(generator, width)}
    # small rows have a steep slope, hence a small weight
    return Drawn(inputs, extras, sizes.clamp(max=1.0) * normal64(generator, rows, width))


def _draw_add(generator: torch.Generator, rows: int, width: int, number: int, wide: int | None) -> Drawn:
    """Draw rows as a sum of two parts, `x` and `residual`."""
    inputs, extras, weights = _draw(generator, rows, width, number)
    residual = inputs["x"] * 0.5 + 0.1 * normal64(generator, rows, width)
    parts = {"x": inputs["x"] - residual, "residual": residual, "weight": inputs["weight"]}
    return Drawn(parts, extras, torch.cat([weights, normal64(generator, rows, width)], -1))


def _sized(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    rows, width = shape["N"], shape["H"]
    return filled(device, dtype, (rows, width), {"eps": EPS[0]}, x=(rows, width), weight=(width,))


def _sized_add(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    rows, width = size = shape["N"], shape["H"]
    return filled(device, dtype, (rows, 2 * width), {"eps": EPS[0]}, x=size, residual=size, weight=(width,))


def _cost(shape: Shape, itemsize: int) -> OperationCost:
    size = shape["N"] * shape["H"] * itemsize
    return OperationCost(
        bytes_forward=2 * size,
        bytes_total=5 * size,
        words="bytes: x read and the result written; with backward x and the result's gradient read, x's written",
    )


def _cost_add(shape: Shape, itemsize: int) -> OperationCost:
    size = shape["N"] * shape["H"] * itemsize
    return OperationCost(
        bytes_forward=4 * size,
        bytes_total=8 * size,
        words="bytes: x and residual read, the norm and the sum written; with backward the sum and two gradients read, "
        "one written",
    )


OPERATION = Operation(
    name="rms_norm",
    call=_call,
    reference=definition.eager,
    leaves=("x", "weight"),
    rows=("x",),
    draw=_draw,
    shape={"N": 1024, "H": 512},
    sized=_sized,
    cost=_cost,
)
ADD_OPERATION = Operation(
    name="add_rms_norm",
    call=_call_add,
    reference=definition.add_eager,
    leaves=("x", "residual", "weight"),
    rows=("x", "residual"),
    draw=_draw_add,
    shape={"N": 1024, "H": 512},
    sized=_sized_add,
    cost=_cost_add,
)
