"""Attention of one new token per row over the row's keys and values in a cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fppo_kernels.decode_attention import eager as definition
from fppo_kernels.operation import Arguments, Drawn, Kernel, Operation, OperationCost, Shape, normal, normal64


class _DecodingCase(NamedTuple):
    kv_heads: int = 1
    groups: int = 1
    head_dim: int = 4
    value_dim: int = 4
    hidden: bool = False  # columns of padding
    part: bool = False  # columns before `start` and from `end` on
    softcap: float | None = None
    sinks: bool = False
    scale: float = 0.7


_CASES = (
    _DecodingCase(),
    _DecodingCase(2, 3, 5, 3),
    _DecodingCase(hidden=True),
    _DecodingCase(2, 2, 32, 32, hidden=True, part=True),
    _DecodingCase(1, 7, 64, 128, part=True, scale=2.0),
    _DecodingCase(2, 1, 128, 64, hidden=True, softcap=2.0),
    _DecodingCase(2, 2, 32, 8, part=True, softcap=1.0, sinks=True),
    _DecodingCase(3, 2, hidden=True, part=True, sinks=True, scale=20.0),
)


def _call(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    return {"result": kernel(*x.values(), **keywords)}


def _draw(generator: torch.Generator, rows: int, columns: int, number: int, wide: int | None) -> Drawn:
    case = _CASES[number]
    draw, heads = partial(normal64, generator), case.kv_heads * case.groups
    start = columns // 4 if case.part else 0
    end = max(start + 1, columns - columns // 3) if case.part else columns
    extras = {"start": torch.tensor(start), "end": torch.tensor(end)}
    extras["scale"] = torch.tensor(case.scale * (2 / (wide or case.head_dim)) ** 0.5, dtype=torch.float64)
    if case.hidden:  # each row sees the last column that is read
        hidden = (torch.rand(rows, columns, generator=generator) < 0.4) & (torch.arange(columns) != end - 1)
        extras["bias"] = torch.zeros(rows, columns, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    if case.softcap is not None:
        extras["softcap"] = torch.tensor(case.softcap, dtype=torch.float64)
    if case.sinks:
        extras["sinks"] = draw(heads)
    shapes = {"keys": wide or case.head_dim, "values": wide or case.value_dim}
    inputs = {"query": draw(rows, heads, shapes["keys"])}
    inputs |= {name: draw(rows, case.kv_heads, columns, width) for name, width in shapes.items()}
    return Drawn(inputs, extras, torch.ones(rows, heads, shapes["values"]))


def _sized(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    rows, columns, width, generator = shape["R"], shape["C"], shape["head_dim"], torch.Generator().manual_seed(0)
    sizes = {"query": (rows, shape["heads"], width)}
    sizes |= dict.fromkeys(("keys", "values"), (rows, shape["kv_heads"], columns, width))
    inputs = {name: normal(generator, *size).to(device, dtype) for name, size in sizes.items()}
    extras = {"bias": None, "start": 0, "end": columns, "scale": width**-0.5}
    return Drawn(inputs, extras, inputs["query"])


def _cost(shape: Shape, itemsize: int) -> OperationCost:
    heads = shape["R"] * shape["head_dim"]
    size = heads * itemsize * 2 * (shape["kv_heads"] * shape["C"] + shape["heads"])
    words = "bytes: query, keys and values read, the result written"
    return OperationCost(bytes_forward=size, bytes_total=None, words=words)


OPERATION = Operation(
    name="decode_attention",
    call=_call,
    reference=definition.eager,
    sloped=(),
    draw=_draw,
    sizes=((1, 1), (1, 2), (2, 1), (2, 3), (3, 9), (2, 130)),  # rows, columns
    features=(frozenset[str](),) * len(_CASES),
    screened=((4, 5, 3),),
    usual={"softcap": None, "sinks": None},
    shape={"R": 64, "C": 128, "heads": 14, "kv_heads": 2, "head_dim": 64},
    sized=_sized,
    cost=_cost,
    multiples={"heads": "kv_heads"},
    transforms=(),
)
