"""Rotary positions: heads of queries and keys rotated by the angles of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
from fppo_kernels.rotary import eager as definition


def _call(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    cos, sin = keywords["cos"], keywords["sin"]
    heads = (x[name].unflatten(-1, (-1, cos.shape[-1])) for name in ("query", "key"))
    return {"result": side_by_side([x.flatten(-2) for x in kernel(*heads, cos, sin)], "queries", "keys")}


def _draw(generator: torch.Generator, rows: int, width: int, number: int, wide: int | None) -> Drawn:
    """Draw one or three query heads and one or two key heads, with arbitrary angles."""
    draw, queries, keys = partial(normal64, generator), (1, 3)[number % 2], (1, 2)[number // 2]
    angle = 3 * draw(rows, width)
    extras = {name: fn(torch.cat([angle, angle], -1)) for name, fn in (("cos", torch.cos), ("sin", torch.sin))}
    inputs = {"query": draw(rows, 2 * width * queries), "key": draw(rows, 2 * width * keys)}
    return Drawn(inputs, extras, draw(rows, 2 * width * (queries + keys)))


def _sized(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    rows, queries, keys, width = (shape[name] for name in ("N", "heads", "kv_heads", "head_dim"))
    angle = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.cat([angle, angle], -1).to(device)
    extras = {"cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}
    sizes = {"query": (rows, queries * width), "key": (rows, keys * width)}
    return filled(device, dtype, (rows, (queries + keys) * width), extras, **sizes)


def _cost(shape: Shape, itemsize: int) -> OperationCost:
    size = shape["N"] * (shape["heads"] + shape["kv_heads"]) * shape["head_dim"] * itemsize
    return OperationCost(
        bytes_forward=2 * size,
        bytes_total=4 * size,
        words="bytes: queries and keys read and written; with backward the gradients too",
    )


OPERATION = Operation(
    name="rotary",
    call=_call,
    reference=definition.eager,
    leaves=("query", "key"),
    rows=("query", "key"),
    draw=_draw,
    shape={"N": 1024, "heads": 14, "kv_heads": 2, "head_dim": 64},
    sized=_sized,
    cost=_cost,
)
