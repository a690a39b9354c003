"""Laws of what stands inside a layer, row by row: linear layers, norms, gated activations, rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fppo.laws._kernels import TOLERANCES, apart, carry, checked, exact, grads, place, words
from fppo.laws._search import Law, LawExample, check, differ, normal, unchanged
from fppo_kernels.glu.eager import ACTIVATIONS
from fppo_kernels.glu.eager import eager as plain_glu
from fppo_kernels.linear.plain import plain as plain_linear
from fppo_kernels.rms_norm.eager import add_eager as plain_add_norm
from fppo_kernels.rms_norm.eager import eager as plain_norm
from fppo_kernels.rotary.eager import eager as plain_rotary

SIZES = ((0, 2), (1, 1), (1, 2), (2, 2), (3, 5), (5, 3), (33, 130))  # rows, width
EPS = (1e-6, 1e-2)
KINDS = tuple(ACTIVATIONS)


class Operation(NamedTuple):
    """How an operation is called on an example, what it must equal, which of its inputs have rows, and its examples."""

    call: Callable[[Callable, LawExample], Tensor]
    reference: Callable[..., Any]
    rows: tuple[str, ...]
    draw: Callable[[torch.Generator, int, int, int], LawExample]  # of rows, width and the number of a case


def _linear(kernel: Callable, example: LawExample) -> Tensor:
    return kernel(example.inputs["x"], example.inputs["weight"], example.extras.get("bias"))


def _rms_norm(kernel: Callable, example: LawExample) -> Tensor:
    numbers = {name: x.item() for name, x in example.extras.items()}
    return kernel(example.inputs["x"], example.inputs["weight"], **numbers)


def _add_norm(kernel: Callable, example: LawExample) -> Tensor:
    """Both results, side by side."""
    numbers = {name: x.item() for name, x in example.extras.items()}
    inputs = example.inputs
    return torch.cat(_both(kernel(inputs["x"], inputs["residual"], inputs["weight"], **numbers), "normed", "sum"), -1)


def _rotary(kernel: Callable, example: LawExample) -> Tensor:
    """Both results, side by side, head after head."""
    width = example.extras["cos"].shape[-1]
    heads = (example.inputs[name].unflatten(-1, (-1, width)) for name in ("query", "key"))
    turned = _both(kernel(*heads, example.extras["cos"], example.extras["sin"]), "queries", "keys")
    return torch.cat([x.flatten(-2) for x in turned], -1)


def _both(result: Any, *names: str) -> list[Tensor]:
    if isinstance(result, tuple | list) and len(result) == len(names):
        return list(result)
    raise ValueError(f"the kernel returned a {type(result).__name__}, expected ({', '.join(names)})")


def _glu(kernel: Callable, example: LawExample) -> Tensor:
    activation = KINDS[int(example.extras["activation"].item())]
    return kernel(example.inputs["gate"], example.inputs["up"], activation=activation)


def _draw_linear(generator: torch.Generator, rows: int, width: int, number: int) -> LawExample:
    """Twice or half as many columns as there are, with and without a bias, one batch [rows, H] or [2, rows, H]."""
    draw, out = partial(normal, generator), 2 * width if number % 2 else (width + 1) // 2
    batch = (2, rows) if number >= 2 else (rows,)
    extras = {"bias": draw(out)} if number % 3 else {}
    inputs = {"x": draw(*batch, width), "weight": draw(out, width) / width**0.5}
    return LawExample(inputs, extras, draw(*batch, out))


def _draw_norm(generator: torch.Generator, rows: int, width: int, number: int) -> LawExample:
    """Rows of size 1, of the size of the root of `eps` and large ones, with and without an offset."""
    draw, eps = partial(normal, generator), EPS[number % 2]
    sizes = torch.tensor([1.0, eps**0.5, 100.0], dtype=torch.float64)[torch.arange(rows) % 3, None]
    extras = {"eps": torch.tensor(eps, dtype=torch.float64), "offset": torch.tensor(float(number >= 2))}
    inputs = {"x": sizes * draw(rows, width), "weight": draw(width)}
    # rows of a small size have a steep slope, and get so small a weight
    return LawExample(inputs, extras, sizes.clamp(max=1.0) * draw(rows, width))


def _draw_add_norm(generator: torch.Generator, rows: int, width: int, number: int) -> LawExample:
    """Rows of a norm in two parts."""
    example = _draw_norm(generator, rows, width, number)
    residual = example.inputs["x"] * 0.5 + 0.1 * normal(generator, rows, width)
    weights = torch.cat([example.weights, normal(generator, rows, width)], -1)
    x, weight = example.inputs["x"], example.inputs["weight"]
    return LawExample({"x": x - residual, "residual": residual, "weight": weight}, example.extras, weights)


def _draw_rotary(generator: torch.Generator, rows: int, width: int, number: int) -> LawExample:
    """One or three heads of queries, and one or two of keys, turned by any angle."""
    draw, queries, keys = partial(normal, generator), (1, 3)[number % 2], (1, 2)[number // 2]
    angle = 3 * draw(rows, width)
    extras = {name: fn(torch.cat([angle, angle], -1)) for name, fn in (("cos", torch.cos), ("sin", torch.sin))}
    inputs = {"query": draw(rows, 2 * width * queries), "key": draw(rows, 2 * width * keys)}
    return LawExample(inputs, extras, draw(rows, 2 * width * (queries + keys)))


def _draw_glu(generator: torch.Generator, rows: int, width: int, number: int) -> LawExample:
    """Gates of size 3, where activations bend, and some where they are flat."""
    draw = partial(normal, generator)
    gate = 3 * draw(rows, width) * torch.where(torch.arange(rows) % 5 == 4, 30.0, 1.0)[:, None]
    extras = {"activation": torch.tensor(number)}
    return LawExample({"gate": gate, "up": draw(rows, width)}, extras, draw(rows, width))


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "linear": Operation(_linear, plain_linear, ("x",), _draw_linear),
        "rms_norm": Operation(_rms_norm, plain_norm, ("x",), _draw_norm),
        "add_rms_norm": Operation(_add_norm, plain_add_norm, ("x", "residual"), _draw_add_norm),
        "rotary": Operation(_rotary, plain_rotary, ("query", "key"), _draw_rotary),
        "glu": Operation(_glu, plain_glu, ("gate", "up"), _draw_glu),
    }
)


def _dtype(example: LawExample) -> torch.dtype:
    return next(iter(example.inputs.values())).dtype


def gradients(
    op: Operation, kernel: Callable, example: LawExample, names: Sequence[str] | None = None, rows: Tensor | None = None
) -> dict[str, Tensor]:
    """The gradients by these inputs (all and a bias) of sum(weights * result), over `rows` (bool) alone unless None."""
    example, leaves = carry(example, [*example.inputs, "bias"] if names is None else names)
    weights = example.weights if rows is None else example.weights.where(rows[:, None], 0.0)
    return dict(zip(leaves, grads((weights * op.call(kernel, example)).sum(), list(leaves.values())), strict=True))


def _shape(op: Operation, kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    out = op.call(kernel, example)
    if out.shape != example.weights.shape or out.dtype != _dtype(example):
        expected = f"{words(_dtype(example))} {list(example.weights.shape)}"
        return f"it returned {words(out.dtype)} {list(out.shape)}, expected {expected}"
    return None if out.isfinite().all() else "the result is not finite"


def _purity(op: Operation, kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    copy, first, slopes = example.map(torch.clone), op.call(kernel, example), gradients(op, kernel, example)
    if reason := unchanged(example, copy):
        return reason
    if reason := differ("the result", first, op.call(kernel, example), 0.0):
        return f"a second call gave another result: {reason}, as before"
    for name, again in gradients(op, kernel, example).items():
        if reason := differ(f"the gradient by {name}", slopes[name], again, 0.0):
            return f"a second call gave another gradient: {reason}, as before"
    return None


def _rows_apart(op: Operation, kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    count = example.weights.shape[-2]
    for cut in sorted({1, count // 2} - {0, count}):
        readers = torch.arange(count, device=example.weights.device) < cut
        fresh = {n: normal(generator, *example.inputs[n].shape).to(example.inputs[n]) for n in op.rows}
        changed = example.put(**{n: x.where(~readers[:, None], example.inputs[n]) for n, x in fresh.items()})
        before, after = (op.call(kernel, x)[..., :cut, :] for x in (example, changed))
        if reason := differ("the result there", before, after, 0.0):
            return f"rows before row {cut} see those from there on: {reason}, as before they changed"
        by = gradients(op, kernel, example, op.rows, readers)
        for name, grad in by.items():
            if reason := differ("it", torch.zeros_like(grad[..., cut:, :]), grad[..., cut:, :], 0.0):
                return f"the gradient of the rows before row {cut} reaches {name} of those from there on: {reason}"
    return None


def _values(op: Operation, kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    return apart("the result", op.call(op.reference, exact(example)), op.call(kernel, example), _dtype(example))


def _gradients(op: Operation, kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    actual, expected = gradients(op, kernel, example), gradients(op, op.reference, exact(example))
    for name, grad in expected.items():
        if reason := apart(f"the gradient by {name}", grad, actual[name], _dtype(example)):
            return reason
    return None


def _frozen(op: Operation, kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    for name, whole in gradients(op, kernel, example).items():
        (alone,) = gradients(op, kernel, example, (name,)).values()
        if reason := apart(f"the gradient by {name} alone", whole, alone, _dtype(example)):
            return reason
    return None


def laws_of(op: Operation) -> tuple[Law, ...]:
    """The laws of an operation."""
    return (
        Law("shape", "the result is finite, of the shape and the dtype that it should have", partial(_shape, op)),
        Law("purity", "arguments stay as they are, and equal arguments give equal bits", partial(_purity, op)),
        Law("rows apart", "other rows change nothing, and no gradient reaches them", partial(_rows_apart, op)),
        Law("values", "values are those of the float64 reference", partial(_values, op)),
        Law("gradients", "the gradient by every input is that of the float64 reference", partial(_gradients, op)),
        Law("frozen", "a gradient does not depend on which arguments take one", partial(_frozen, op)),
    )


def _example(
    op: Operation,
    numbers: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device | str,
    rows: int,
    width: int,
    seed: int,
) -> LawExample:
    number, dtype = numbers[seed // len(dtypes)], dtypes[seed % len(dtypes)]
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + number)
    return place(op.draw(generator, rows, width, number), dtype, device)


def _check(
    name: str,
    numbers: Sequence[int],
    kernel: Callable[..., Any],
    dtypes: Sequence[torch.dtype],
    device: torch.device | str,
    reference: Callable[..., Any] | None = None,
) -> None:
    op, dtypes = OPERATIONS[name], checked(dtypes)
    op = op if reference is None else op._replace(reference=reference)
    examples = partial(_example, op, numbers, dtypes, device)
    check(kernel, laws_of(op), examples, sizes=SIZES, seeds=len(numbers) * len(dtypes))


def check_linear(
    kernel: Callable[..., Tensor],
    *,
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCES),
    device: torch.device | str = "cpu",
    reference: Callable[..., Tensor] = plain_linear,
) -> None:
    """Put a linear layer through its laws: `laws.check_linear(my_kernel)`. LawViolation for the first that fails.

    `kernel(x [*, N, H], weight [M, H], bias [M] or None)` returns x @ weight.T + bias, [*, N, M], in the dtype of `x`.
    The result and the gradients by x, weight and bias are those of the float64 reference, to 1e-9 in float64, 1e-4 in
    float32 and 2e-2 in bfloat16, relative to the larger of 1 and the tensor's largest number; with the same number of
    rows, what other rows hold changes no bit of a row, and no gradient reaches them; equal arguments give equal bits.
    Kernels that compute in float32 alone bind `dtypes=(torch.float32,)`. One that rounds its operands gives the
    `reference` that it is held against, a differentiable function of the same arguments in float64, as
    `fppo_kernels.linear.float8_reference.reference`. Raises ValueError for another dtype.
    """
    _check("linear", range(4), kernel, dtypes, device, reference)


def check_rms_norm(
    kernel: Callable[..., Tensor],
    *,
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCES),
    device: torch.device | str = "cpu",
) -> None:
    """Put a root-mean-square norm through its laws: `laws.check_rms_norm(my_kernel)`.

    `kernel(x [*, N, H], weight [H], *, eps, offset)` returns x / sqrt(mean(x^2) + eps) * (weight + offset). The laws,
    their tolerances and the errors are those of `check_linear`.
    """
    _check("rms_norm", range(4), kernel, dtypes, device)


def check_add_rms_norm(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    *,
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCES),
    device: torch.device | str = "cpu",
) -> None:
    """Put a root-mean-square norm of a sum through its laws: `laws.check_add_rms_norm(my_kernel)`.

    `kernel(x [*, N, H], residual [*, N, H], weight [H], *, eps, offset)` returns the norm of x + residual, and
    that sum. The laws, their tolerances and the errors are those of `check_linear`.
    """
    _check("add_rms_norm", range(4), kernel, dtypes, device)


def check_rotary(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    *,
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCES),
    device: torch.device | str = "cpu",
) -> None:
    """Put rotary positions through their laws: `laws.check_rotary(my_kernel)`.

    `kernel(query [*, N, Q, D], key [*, N, K, D], cos [*, N, D], sin [*, N, D])` returns queries and keys with each head
    turned (see `fppo_kernels.rotary.eager`). The laws, their tolerances and the errors are those of `check_linear`.
    """
    _check("rotary", range(4), kernel, dtypes, device)


def check_glu(
    kernel: Callable[..., Tensor],
    *,
    activations: Sequence[str] = KINDS,
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCES),
    device: torch.device | str = "cpu",
) -> None:
    """Put a gated activation through its laws: `laws.check_glu(my_kernel)`.

    `kernel(gate [*, N, H], up [*, N, H], *, activation)` returns activation(gate) * up, for each of `activations`. The
    laws, their tolerances and the errors are those of `check_linear`; ValueError for an activation that is none of
    "silu", "gelu_tanh" and "gelu" too.
    """
    if not activations or not set(activations) <= set(KINDS):
        raise ValueError(f"activations must be some of {KINDS}, got {tuple(activations)}")
    _check("glu", [KINDS.index(name) for name in activations], kernel, dtypes, device)
