"""Laws of attention of one more token per row: what a row does not see changes nothing, and values are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fppo.laws._kernels import TOLERANCES, apart, checked, exact, place, settings, words
from fppo.laws._search import Law, LawExample, check, differ, normal, spoil, unchanged
from fppo_kernels.decode_attention.eager import eager

SIZES = ((1, 1), (1, 2), (2, 1), (2, 3), (3, 9), (2, 130))  # rows, columns


def _attend(kernel: Callable, example: LawExample) -> Tensor:
    return kernel(*example.inputs.values(), **settings(example))


def _shape(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    query, values = example.inputs["query"], example.inputs["values"]
    out, shape = _attend(kernel, example), [*query.shape[:2], values.shape[3]]
    if list(out.shape) != shape or out.dtype != query.dtype:
        return f"it returned {words(out.dtype)} {list(out.shape)}, expected {words(query.dtype)} {shape}"
    return None if out.isfinite().all() else "the result is not finite"


def _purity(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    copy, first = example.map(torch.clone), _attend(kernel, example)
    if reason := unchanged(example, copy):
        return reason
    reason = differ("the result", first, _attend(kernel, example), 0.0)
    return reason and f"a second call gave another result: {reason}, as before"


def _unseen(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    """Hidden columns hold other numbers then, and those before `start` and from `end` on no numbers at all."""
    start, end = (int(example.extras[name].item()) for name in ("start", "end"))
    before = _attend(kernel, example)
    places = torch.arange(example.inputs["keys"].shape[2], device=before.device)
    outside, bias = (places < start) | (places >= end), example.extras.get("bias")
    for name in ("keys", "values"):
        x = example.inputs[name]
        if bias is not None:
            x = normal(generator, *x.shape).to(x).where(bias.isinf()[:, None, :, None], x)
        example = example.put(**{name: spoil(x, outside[:, None].expand(x.shape), generator, "nan")})
    return differ("the result", before, _attend(kernel, example), 0.0)


def _rows_apart(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    before = _attend(kernel, example)
    changes = {name: torch.cat([x[:1], normal(generator, *x[1:].shape).to(x)]) for name, x in example.inputs.items()}
    return differ("row 0", before[:1], _attend(kernel, example.put(**changes))[:1], 0.0)


def _values(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    dtype = example.inputs["query"].dtype
    return apart("the result", _attend(eager, exact(example)), _attend(kernel, example), dtype)


_LAWS = (
    Law("shape", "the result is finite, [R, Hq, Dv], in the dtype of query", _shape),
    Law("purity", "arguments stay as they are, and equal arguments give equal bits", _purity),
    Law("unseen columns", "columns that a row does not see change nothing", _unseen),
    Law("rows apart", "other rows change nothing", _rows_apart),
    Law("values", "values are those of the float64 reference", _values),
)


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


def _example(
    dtypes: Sequence[torch.dtype], device: torch.device | str, rows: int, columns: int, seed: int
) -> LawExample:
    number, dtype = seed // len(dtypes), dtypes[seed % len(dtypes)]
    case = _CASES[number]
    generator = torch.Generator().manual_seed(1000 * rows + 100 * columns + number)
    draw, heads = partial(normal, generator), case.kv_heads * case.groups
    start = columns // 4 if case.part else 0
    end = max(start + 1, columns - columns // 3) if case.part else columns
    extras = {"start": torch.tensor(start), "end": torch.tensor(end)}
    extras["scale"] = torch.tensor(case.scale * (2 / case.head_dim) ** 0.5, dtype=torch.float64)
    if case.hidden:  # each row sees the last column that is read
        hidden = (torch.rand(rows, columns, generator=generator) < 0.4) & (torch.arange(columns) != end - 1)
        extras["bias"] = torch.zeros(rows, columns, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    if case.softcap is not None:
        extras["softcap"] = torch.tensor(case.softcap, dtype=torch.float64)
    if case.sinks:
        extras["sinks"] = draw(heads)
    shapes = {"keys": case.head_dim, "values": case.value_dim}
    inputs = {"query": draw(rows, heads, case.head_dim)}
    inputs |= {name: draw(rows, case.kv_heads, columns, width) for name, width in shapes.items()}
    return place(LawExample(inputs, extras, torch.ones(rows)), dtype, device)


def check_decode_attention(
    kernel: Callable[..., Tensor],
    *,
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCES),
    device: torch.device | str = "cpu",
) -> None:
    """Put attention of one more token per row through its laws: `laws.check_decode_attention(my_kernel)`. LawViolation
    for the first that fails.

    `kernel(query [R, Hq, D], keys [R, Hkv, C, D], values [R, Hkv, C, Dv], bias [R, C] or None, *, start, end, scale,
    softcap, sinks)` returns [R, Hq, Dv] (see `fppo_kernels.decode_attention.eager`). With grouped heads, padding, soft
    caps and sinks: columns that a row does not see, and other rows, change no bit; the values are those of the float64
    reference, to 1e-9 in float64, 1e-4 in float32 and 2e-2 in bfloat16, relative to the larger of 1 and the tensor's
    largest number; arguments stay as they are. Raises ValueError for another dtype.
    """
    dtypes = checked(dtypes)
    check(kernel, _LAWS, partial(_example, dtypes, device), sizes=SIZES, seeds=len(_CASES) * len(dtypes))
