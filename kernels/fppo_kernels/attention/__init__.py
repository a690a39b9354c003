# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""Causal attention over packed sequences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fppo_kernels.attention import eager as definition
from fppo_kernels.operation import Arguments, Drawn, Kernel, Operation, OperationCost, Shape, normal, normal64
from fppo_kernels.padding import Lengths, make_lengths

FEATURES = ("gqa", "window", "softcap", "sinks", "key_lengths")


class AttentionCase(NamedTuple):
    """A case of attention for the laws: key heads, query heads for each (`groups`), and keywords of the call."""

    kv_heads: int = 1
    groups: int = 1
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float = 0.7
    before: bool = False  # whether there are keys before the first query

    @property
    def features(self) -> frozenset[str]:
        used = (self.groups > 1, self.window is not None, self.softcap is not None, self.sinks, self.before)
        return frozenset(name for name, use in zip(FEATURES, used, strict=True) if use)


CASES = (
    AttentionCase(),
    AttentionCase(groups=2),
    AttentionCase(window=1),
    AttentionCase(softcap=1.0),
    AttentionCase(sinks=True),
    AttentionCase(2, scale=20.0),
    AttentionCase(2, 2, window=3),
    AttentionCase(2, 2, softcap=2.0),
    AttentionCase(2, 2, 2, 2.0, True),
    AttentionCase(2, 2, before=True),
    AttentionCase(window=3, before=True),
    AttentionCase(2, 1, 4, 2.0, True, before=True),
)


def _call(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    sizes: Arguments = {name: keywords[name] for name in ("lengths", "key_lengths") if name in keywords}
    lengths = {n: make_lengths(y.tolist(), y.device) if isinstance(y, Tensor) else y for n, y in sizes.items()}
    return {"result": kernel(*x.values(), **{**keywords, **lengths})}


def _draw(generator: torch.Generator, rows: int, width: int, number: int, wide: int | None) -> Drawn:
    """Draw sequences, of equal lengths in half of the cases and of different lengths in the other."""
    case, head_dim = CASES[number], wide or 2
    lengths = torch.full((rows,), width)
    if rows and (number + rows) % 2:
        lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    keys = lengths + torch.randint(width + 1, (rows,), generator=generator) if case.before else lengths
    total, count, heads = int(lengths.sum()), int(keys.sum()), case.kv_heads * case.groups
    shapes = {"query": (total, heads), "key": (count, case.kv_heads), "value": (count, case.kv_heads)}
    inputs = {name: normal64(generator, *shape, head_dim) for name, shape in shapes.items()}
    scale = case.scale * (2 / head_dim) ** 0.5  # equal spread of scores in wide and in narrow heads
    extras = {"lengths": lengths, "scale": torch.tensor(scale, dtype=torch.float64)}
    if case.before:
        extras["key_lengths"] = keys
    if case.window is not None:
        extras["window"] = torch.tensor(case.window)
    if case.softcap is not None:
        extras["softcap"] = torch.tensor(case.softcap, dtype=torch.float64)
    if case.sinks:
        extras["sinks"] = normal64(generator, heads)
    return Drawn(inputs, extras, normal64(generator, total, heads, head_dim))


def _slack(inputs: Arguments, extras: Arguments) -> float:
    """The factor by which the laws' tolerance grows for gradients. In bfloat16 it is scale * sqrt(D / 2), at least 1,
    since a gradient multiplies the result's rounding error, which grows with the root of the number of terms; else it
    is 1."""
    query, scale = inputs["query"], extras["scale"]
    return max(1.0, scale.item() * (query.shape[2] / 2) ** 0.5) if query.dtype == torch.bfloat16 else 1.0


def sequence_lengths(shape: Shape) -> list[int]:
    """The lengths of R sequences, evenly spaced from L / R to L, for the sizes R and L in `shape`."""
    count, longest = shape["R"], shape["L"]
    return [max(longest * (i + 1) // count, 1) for i in range(count)]


def _sized(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    sizes, generator, width = sequence_lengths(shape), torch.Generator().manual_seed(0), shape["head_dim"]
    heads = {"query": shape["heads"], "key": shape["kv_heads"], "value": shape["kv_heads"]}
    inputs = {name: normal(generator, sum(sizes), n, width).to(device, dtype) for name, n in heads.items()}
    weights = normal(generator, sum(sizes), shape["heads"], width).to(device)
    return Drawn(inputs, {"lengths": make_lengths(sizes, device), "scale": width**-0.5}, weights)


def _split(drawn: Drawn) -> list[Drawn]:
    """Split packed inputs by sequence, so that no mask over all tokens is allocated."""
    lengths: Lengths = drawn.extras["lengths"]
    pieces: list[Drawn] = []
    for size, end in zip(lengths.lengths, itertools.accumulate(lengths.lengths), strict=True):
        rows, one = slice(end - size, end), make_lengths([size], drawn.weights.device)
        inputs = {name: x[rows] for name, x in drawn.inputs.items()}
        pieces.append(Drawn(inputs, {**drawn.extras, "lengths": one}, drawn.weights[rows]))
    return pieces


def _cost(shape: Shape, itemsize: int) -> OperationCost:
    sizes, heads, kv_heads, width = sequence_lengths(shape), shape["heads"], shape["kv_heads"], shape["head_dim"]
    inputs, result = (sum(sizes) * n * width * itemsize for n in (heads + 2 * kv_heads, heads))
    matmuls = 4 * heads * width * sum(size * (size + 1) // 2 for size in sizes)
    return OperationCost(
        bytes_forward=inputs + result,
        bytes_total=3 * inputs + 2 * result,
        flops_forward=matmuls,
        flops_total=3 * matmuls,
        words="bytes: query, key, value read, with backward again, their gradients written; work: 4 heads head_dim "
        "for each pair of tokens that see each other, with backward 12",
    )


OPERATION = Operation(
    name="attention",
    call=_call,
    reference=definition.eager,
    leaves=("query", "key", "value", "sinks"),
    draw=_draw,
    sizes=((0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (3, 3), (4, 7), (2, 130)),  # sequences, length
    features=tuple(case.features for case in CASES),
    wide=16,
    slack=_slack,
    screened=((4, 5, 1), (4, 5, 9)),
    usual={"window": None, "softcap": None, "sinks": None},
    shape={"R": 8, "L": 384, "heads": 14, "kv_heads": 2, "head_dim": 64},
    sized=_sized,
    cost=_cost,
    bound="matmul",
    multiples={"heads": "kv_heads"},
    split=_split,
)
