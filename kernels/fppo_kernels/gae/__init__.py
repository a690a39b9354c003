"""Generalised advantage estimates from token rewards and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fppo_kernels.gae import loop as definition
from fppo_kernels.operation import FLOATS, Arguments, Drawn, Kernel, Operation, OperationCost, Shape, normal, normal64
from fppo_kernels.padding import ragged


def _call(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    return dict(zip(OPERATION.outputs, kernel(*x.values(), **keywords), strict=True))


def _draw(generator: torch.Generator, rows: int, width: int, number: int, wide: int | None) -> Drawn:
    """Draw rows whose last tokens are outside the mask, except for the first row."""
    mask = torch.arange(width) < torch.arange(width, width - rows, -1)[:, None]
    inputs = {"rewards": normal64(generator, rows, width), "values": normal64(generator, rows, width), "mask": mask}
    extras = {name: torch.tensor(x, dtype=torch.float64) for name, x in (("gamma", 0.9), ("lam", 0.7))}
    return Drawn(inputs, extras, mask.double())


def _sized(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    generator, size = torch.Generator().manual_seed(0), (shape["B"], shape["T"])
    inputs = {name: normal(generator, *size).to(device, dtype) for name in ("rewards", "values")}
    mask = ragged(*size).to(device)
    return Drawn(inputs | {"mask": mask}, {"gamma": 0.99, "lam": 0.95}, mask)


def _cost(shape: Shape, itemsize: int) -> OperationCost:
    size = shape["B"] * shape["T"] * (4 * itemsize + 1)
    words = "bytes: rewards, values, mask read, two results written"
    return OperationCost(bytes_forward=size, bytes_total=None, words=words)


OPERATION = Operation(
    name="gae",
    call=_call,
    reference=definition.loop,
    outputs=("advantages", "returns"),
    sloped=(),
    draw=_draw,
    screened=((4, 5, 0),),
    shape={"B": 256, "T": 1024},
    sized=_sized,
    cost=_cost,
    dtypes=FLOATS[:2],
    transforms=(),
)
