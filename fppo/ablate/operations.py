"""What an ablation is to run: operations, implementations, shapes and dtypes by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fppo._errors import did_you_mean
from fppo.ablate.cases import OperationCase, Shape
from fppo.ablate.cases_around import ADAMW, ALL_TO_ALL, GAE, PAD, UNPAD
from fppo.ablate.cases_layers import ADD_RMS_NORM, GLU, LINEAR, RMS_NORM, ROTARY
from fppo.ablate.cases_model import ATTENTION, DECODE_ATTENTION, LOG_PROBS
from fppo.laws._kernels import words
from fppo_kernels import table as tables
from fppo_kernels.table import Implementation, Kernels, Table

_INSIDE = LINEAR, RMS_NORM, ADD_RMS_NORM, ROTARY, GLU
CASES: Mapping[str, OperationCase] = MappingProxyType(
    {case.op: case for case in (LOG_PROBS, ATTENTION, DECODE_ATTENTION, *_INSIDE, GAE, ADAMW, UNPAD, PAD, ALL_TO_ALL)}
)
DTYPES = MappingProxyType({words(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float64)})


def case_of(op: str) -> OperationCase:
    """The operation of that name. Raises ValueError if there is none."""
    if op not in CASES:
        raise ValueError(f"there is no operation {op!r}; {did_you_mean(op, CASES)}")
    return CASES[op]


def extended(cases: Sequence[OperationCase], implementations: Any, table: Table) -> Table:
    """The table with the implementations of a mapping, which are those of the only operation in `cases`."""
    if not isinstance(implementations, Mapping):
        return table
    if len(cases) != 1:
        raise ValueError("implementations of your own belong to one operation: ablate one at a time, or pass a table")
    for name, fn in implementations.items():
        implementation = fn if isinstance(fn, Implementation) else tables.own(cases[0].op, fn)
        table = tables.register(cases[0].op, name, implementation, table=table)
    return table


def names_of(op: str, implementations: Any, table: Table) -> list[str]:
    """The implementations to run: those that are named, else all of the table. Raises ValueError for unknown ones."""
    known = list(table[op])
    if implementations is None or isinstance(implementations, Mapping):
        return known
    for name in implementations:
        if name not in known:
            raise ValueError(f"there is no kernel {op}/{name}; {did_you_mean(name, known)}")
    return list(implementations)


def dtypes_of(case: OperationCase, dtypes: Sequence[str | torch.dtype], *, one: bool) -> list[torch.dtype]:
    """Select the dtypes that the operation is made for; none of them is an error if it is the only operation."""
    chosen = []
    for dtype in dtypes:
        name = dtype if isinstance(dtype, str) else words(dtype)
        if name not in DTYPES:
            raise ValueError(f"there is no dtype {name!r} to ablate in; {did_you_mean(name, DTYPES)}")
        chosen.append(DTYPES[name])
    kept = [dtype for dtype in dict.fromkeys(chosen) if dtype in case.dtypes]
    if one and not kept:
        raise ValueError(f"{case.op} is ablated in {', '.join(words(d) for d in case.dtypes)}, not in {list(dtypes)}")
    return kept


def shapes_of(
    case: OperationCase, shapes: Sequence[Shape] | None, cases: Sequence[OperationCase]
) -> list[dict[str, int]]:
    """The operation's whole shapes, from sizes of which some may be other operations'. Raises ValueError for others."""
    known = {name for other in cases for name in other.shape}
    chosen = []
    for shape in shapes or [{}]:
        for name, size in shape.items():
            if name not in known:
                there = "; ".join(f"{other.op} has {', '.join(other.shape)}" for other in cases)
                raise ValueError(f"there is no size {name!r}; {there}")
            if size < 1:
                raise ValueError(f"a size must be 1 or more, got {name} = {size}")
        sizes = {name: shape.get(name, size) for name, size in case.shape.items()}
        for name, by in case.multiples.items():
            if sizes[name] % (sizes[by] if isinstance(by, str) else by):
                unit = f"{by} = {sizes[by]}" if isinstance(by, str) else by
                raise ValueError(f"{case.op}: {name} must be a multiple of {unit}, got {name} = {sizes[name]}")
        if sizes not in chosen:
            chosen.append(sizes)
    return chosen


def default_of(op: str, table: Table, defaults: Kernels | None) -> str | None:
    """The name of the implementation that a run takes where none is named."""
    fn = getattr(Kernels.named() if defaults is None else defaults, op)
    return next((name for name, implementation in table[op].items() if implementation.is_of(fn)), None)
