"""One evaluation of an operation: its outputs and gradients by a kernel, or by its reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fppo.runtime.simulate import simulate
from fppo_kernels.operation import Drawn, Exact, Operation


class Result(NamedTuple):
    """Outputs by name, and gradients of sum(cotangent * output), summed over the outputs, by leaf."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


def evaluate(op: Operation, fn: Callable, drawn: Drawn, outputs: Sequence[str], of: Sequence[str]) -> Result:
    """Compute `outputs` by an implementation, and the gradient of the sum of the outputs that `of` names."""
    leaves = [name for name in op.leaves if name in drawn.inputs]
    if op.ranks > 1 and "axis" not in drawn.extras:
        return _on_ranks(op, fn, drawn, outputs, of)
    if not of or not leaves:
        with torch.no_grad():
            return Result(op.call(fn, drawn.inputs, drawn.extras, outputs), {})
    fresh = {name: drawn.inputs[name].detach().requires_grad_() for name in leaves}
    values, cotangents = op.call(fn, {**drawn.inputs, **fresh}, drawn.extras, outputs), op.cotangents(drawn.weights)
    kept = [(values[name], cotangents[name]) for name in of if values[name].requires_grad]
    grads = [None] * len(fresh)
    if kept:
        tensors, cotangents = zip(*((x, c.to(x.dtype)) for x, c in kept), strict=True)
        grads = torch.autograd.grad(tensors, list(fresh.values()), cotangents, allow_unused=True)
    gradients = {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(fresh.items(), grads, strict=True)}
    return Result({name: x.detach() for name, x in values.items()}, gradients)


def _on_ranks(op: Operation, fn: Callable, drawn: Drawn, outputs: Sequence[str], of: Sequence[str]) -> Result:
    """Evaluate an operation on simulated ranks of a sequence axis, and join their results. Each rank has a slice of the
    inputs' first dimension, and of the outputs' second."""

    def run(mesh: Any) -> Result:
        axis = mesh["sequence"]
        own = {name: x.chunk(op.ranks, 0)[axis.rank] for name, x in drawn.inputs.items()}
        part = Drawn(own, {**drawn.extras, "axis": axis}, drawn.weights.chunk(op.ranks, 1)[axis.rank])
        return evaluate(op, fn, part, outputs, of)

    shards = simulate({"sequence": op.ranks}, run)
    first = shards[0]
    gradients = {name: torch.cat([shard.gradients[name] for shard in shards], 0) for name in first.gradients}
    return Result({name: torch.cat([shard.values[name] for shard in shards], 1) for name in first.values}, gradients)


def exact(op: Operation, drawn: Drawn) -> Exact:
    """Outputs of an operation's reference in float64, and the gradient of each output by every leaf."""
    if op.exact is not None:
        return op.exact(drawn)
    pieces = [_exact(op, piece) for piece in op.split(drawn)]
    values = {name: torch.cat([piece.values[name] for piece in pieces]) for name in op.outputs}
    gradients = {}
    for place in pieces[0].gradients:
        grads = [piece.gradients[place] for piece in pieces]
        gradients[place] = sum(grads[1:], grads[0]) if place[1] in op.shared else torch.cat(grads)
    return Exact(values, gradients)


def _exact(op: Operation, drawn: Drawn) -> Exact:
    inputs, extras = ({name: widened(x) for name, x in each.items()} for each in drawn[:2])
    wide = Drawn(inputs, extras, drawn.weights)
    values, gradients = evaluate(op, op.reference, wide, op.outputs, ()).values, {}
    for output in op.sloped:
        found = evaluate(op, op.reference, wide, op.outputs, (output,)).gradients
        gradients |= {(output, leaf): gradient for leaf, gradient in found.items()}
    return Exact(values, gradients)


def widened(x: Any) -> Any:
    """A floating-point tensor in float64, anything else as it is."""
    if isinstance(x, list):
        return [widened(y) for y in x]
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
