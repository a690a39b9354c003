"""What it takes to ablate an operation: inputs of a shape, how to call it, its float64 reference, what it must do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import attrs
import torch
from torch import Tensor

from fppo.ablate.result import OperationCost
from fppo_kernels.table import Implementation

Shape = Mapping[str, int]


class Drawn(NamedTuple):
    """Inputs of an operation by name, and the cotangents of its outputs, with which gradients are taken."""

    inputs: dict[str, Any]
    cotangents: dict[str, Tensor]


class Result(NamedTuple):
    """Outputs by name, and gradients of sum(cotangent * output), summed over the outputs, by leaf."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


class Exact(NamedTuple):
    """The float64 reference: outputs by name, and the gradient of each output by each leaf."""

    values: dict[str, Tensor]
    gradients: dict[tuple[str, str], Tensor]


Evaluate = Callable[[Callable, Drawn, Sequence[str], Sequence[str]], Result]
Call = Callable[[Callable, dict[str, Any], Sequence[str]], dict[str, Tensor]]


@attrs.frozen(kw_only=True)
class OperationCase:
    """One operation. `evaluate(fn, drawn, outputs, of)` calls an implementation for these outputs, and takes the
    gradient of those that `of` names.

    `shape` are the names of its sizes with their defaults; `timed` the outputs asked for where time and memory are
    measured, `outputs` those whose error is. `check(fn, dtype, device, chosen)` of an implementation raises
    LawViolation where the contract is broken, and returns whether there was one to check.
    """

    op: str
    shape: dict[str, int]
    dtypes: tuple[torch.dtype, ...]
    bound: Literal["matmul", "copy"]
    outputs: tuple[str, ...]
    timed: tuple[str, ...]
    leaves: tuple[str, ...]
    draw: Callable[[Shape, torch.dtype, torch.device], Drawn]
    evaluate: Evaluate
    exact: Callable[[Drawn, Sequence[str]], Exact]
    cost: Callable[[Shape, int], OperationCost]
    check: Callable[[Callable, torch.dtype, torch.device, Implementation], bool]
    cpu_only: bool = False
    multiples: Mapping[str, str | int] = attrs.field(
        factory=dict
    )  # sizes, and what must divide them: a size or a number


FLOATS = (torch.float64, torch.float32, torch.bfloat16)


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers in float32, on the CPU, so that they are the same for every device."""
    return scale * torch.randn(shape, generator=generator)


def differentiate(call: Call, leaves: Sequence[str]) -> Evaluate:
    """The evaluation of an operation whose gradient autograd takes."""

    def evaluate(fn: Callable, drawn: Drawn, outputs: Sequence[str], of: Sequence[str]) -> Result:
        if not of or not leaves:
            with torch.no_grad():
                return Result(call(fn, drawn.inputs, outputs), {})
        fresh = {name: drawn.inputs[name].detach().requires_grad_() for name in leaves}
        values = call(fn, {**drawn.inputs, **fresh}, outputs)
        kept = [(values[name], drawn.cotangents[name]) for name in of if values[name].requires_grad]
        grads = [None] * len(fresh)
        if kept:
            tensors, cotangents = zip(*((x, c.to(x.dtype)) for x, c in kept), strict=True)
            grads = torch.autograd.grad(tensors, list(fresh.values()), cotangents, allow_unused=True)
        gradients = {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(fresh.items(), grads, strict=True)}
        return Result({name: x.detach() for name, x in values.items()}, gradients)

    return evaluate


def exact_by(evaluate: Evaluate, reference: Callable, drawn: Drawn, outputs: Sequence[str]) -> Exact:
    """The reference of an operation: `evaluate` of a trusted implementation in float64, output by output."""
    wide = Drawn({name: widened(x) for name, x in drawn.inputs.items()}, drawn.cotangents)
    values, gradients = evaluate(reference, wide, outputs, ()).values, {}
    for output in outputs:
        if output in drawn.cotangents:
            exact = evaluate(reference, wide, outputs, (output,)).gradients
            gradients |= {(output, leaf): gradient for leaf, gradient in exact.items()}
    return Exact(values, gradients)


def widened(x: Any) -> Any:
    """A floating-point tensor in float64, anything else as it is."""
    if isinstance(x, list):
        return [widened(y) for y in x]
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
