"""Gated activations (Shazeer, 2020, arXiv:2002.05202): activation(gate) * up, as SwiGLU and GeGLU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fppo_kernels.glu import eager as definition
from fppo_kernels.operation import Arguments, Drawn, Kernel, Operation, OperationCost, Shape, filled, normal64

KINDS = tuple(definition.ACTIVATIONS)


def _call(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    return {"result": kernel(x["gate"], x["up"], activation=KINDS[keywords["activation"]])}


def _draw(generator: torch.Generator, rows: int, width: int, number: int, wide: int | None) -> Drawn:
    """Draw gates of size 3, where activations bend, and some where they are flat."""
    draw = partial(normal64, generator)
    gate = 3 * draw(rows, width) * torch.where(torch.arange(rows) % 5 == 4, 30.0, 1.0)[:, None]
    extras = {"activation": torch.tensor(number)}
    return Drawn({"gate": gate, "up": draw(rows, width)}, extras, draw(rows, width))


def _sized(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    size = shape["N"], shape["M"]
    return filled(device, dtype, size, {"activation": KINDS.index("silu")}, gate=size, up=size)


def _cost(shape: Shape, itemsize: int) -> OperationCost:
    size = shape["N"] * shape["M"] * itemsize
    return OperationCost(
        bytes_forward=3 * size,
        bytes_total=8 * size,
        words="bytes: gate and up read and the result written; with backward these and the result's gradient read, two "
        "gradients written",
    )


OPERATION = Operation(
    name="glu",
    call=_call,
    reference=definition.eager,
    leaves=("gate", "up"),
    rows=("gate", "up"),
    draw=_draw,
    features=tuple(frozenset({kind}) for kind in KINDS),
    shape={"N": 1024, "M": 1536},
    sized=_sized,
    cost=_cost,
)
