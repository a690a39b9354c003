"""Laws of kernels under torch.func: every transform gives the results of separate plain passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from fppo.laws._kernels import KernelLaw, apart, bound, checked, exact, example_of, gradients, results
from fppo.laws._search import LawExample, check, normal
from fppo_kernels.operation import TRANSFORMS, Kernel, Operation, operation_of
from fppo_kernels.table import own

STEP, COARSE = 1e-5, 1e-5  # step of differences, and their allowed relative error
CALM = 20.0  # the largest number of an example on which differences are tried
COPIES = 3  # number of mapped examples

Outcome = Callable[..., Tensor]  # of the tensors with gradients


def _function(op: Operation, kernel: Kernel, example: LawExample) -> tuple[Outcome, tuple[Tensor, ...]]:
    """Make a function of an example's leaves that runs the kernel and returns sum(weights * outputs), 0-d, for
    transforms of torch.func. Returns the function and the leaves."""
    tensors = {**example.inputs, **example.extras}
    names = [name for name in op.leaves if name in tensors]

    def outcome(*leaves: Tensor) -> Tensor:
        values = results(op, kernel, example.put(**dict(zip(names, leaves, strict=True))))
        weights = op.cotangents(example.weights)
        return torch.stack([(weights[name] * values[name]).sum() for name in op.sloped]).sum()

    return outcome, tuple(tensors[name] for name in names)


def _gradient(outcome: Outcome, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return grad(outcome, argnums=tuple(range(len(leaves))))(*leaves)


def _directions(leaves: Sequence[Tensor], generator: torch.Generator) -> tuple[Tensor, ...]:
    return tuple(normal(generator, *x.shape).to(x) for x in leaves)


def _dot(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(xs, ys, strict=True)]).sum()


def _first(xs: Sequence[tuple[str, Tensor, Tensor]], dtype: torch.dtype, slack: float = 1.0) -> str | None:
    """Describe the first of `xs`, (what, expected, actual), whose two tensors differ by more than `slack` times the
    tolerance of `dtype`; None if none do."""
    return next((reason for what, x, y in xs if (reason := apart(what, x, y, dtype, slack))), None)


def _grad(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    plain, (outcome, leaves) = gradients(op, kernel, example), _function(op, kernel, example)
    found, pulled = _gradient(outcome, leaves), vjp(outcome, *leaves)[1](torch.ones_like(outcome(*leaves)))
    pairs = [(f"grad by {name}", x, y) for (name, x), y in zip(plain.items(), found, strict=True)]
    pairs += [(f"vjp by {name}", x, y) for (name, x), y in zip(plain.items(), pulled, strict=True)]
    return _first(pairs, leaves[0].dtype)


def _vmap(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    outcome, leaves = _function(op, kernel, example)
    several = [tuple((1.0 - 0.25 * number) * x for x in leaves) for number in range(COPIES)]
    stacked = tuple(torch.stack(column) for column in zip(*several, strict=True))
    one_by_one = torch.stack([outcome(*each) for each in several])
    pairs = [("vmap", one_by_one, vmap(outcome)(*stacked))]
    alone = [_gradient(outcome, each) for each in several]
    mapped = vmap(grad(outcome, argnums=tuple(range(len(leaves)))))(*stacked)
    pairs += [("vmap(grad)", torch.stack(x), y) for *x, y in zip(*alone, mapped, strict=True)]
    mixed = vmap(lambda first: _gradient(outcome, (first, *leaves[1:])))(stacked[0])  # the others are shared by all
    alone = [_gradient(outcome, (first, *leaves[1:])) for first in stacked[0]]
    pairs += [("vmap(grad) over the first", torch.stack(x), y) for *x, y in zip(*alone, mixed, strict=True)]
    return _first(pairs, leaves[0].dtype)


def _jvp(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    outcome, leaves = _function(op, kernel, example)
    along = _directions(leaves, generator)
    value, tangent = jvp(outcome, leaves, along)[:2]
    pairs = [("the value beside jvp", outcome(*leaves), value)]
    pairs += [("jvp, as the gradient says it,", _dot(_gradient(outcome, leaves), along), tangent)]
    return _first(pairs, leaves[0].dtype) or _difference("jvp", outcome, leaves, along, (tangent,))


def _hessian(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    """Describe how Hessian-vector products, forward over reverse or reverse over reverse, differ from the definition's
    or from differences of the gradient; None if they do not."""
    outcome, leaves = _function(op, kernel, example)
    along = _directions(leaves, generator)

    def gradient(*each: Tensor) -> tuple[Tensor, ...]:
        return _gradient(outcome, each)

    forward = jvp(gradient, leaves, along)[1]
    reverse = _gradient(lambda *each: _dot(gradient(*each), along), leaves)
    defined, _ = _function(op, op.reference, exact(example))
    wide = [x.double() for x in leaves], [x.double() for x in along]
    expected = _gradient(lambda *each: _dot(_gradient(defined, each), wide[1]), wide[0])
    pairs = [
        (f"{name}, as the definition has it,", x, y)
        for name, ys in (("jvp(grad)", forward), ("grad(grad)", reverse))
        for x, y in zip(expected, ys, strict=True)
    ]
    return _first(pairs, leaves[0].dtype) or _difference("jvp(grad)", gradient, leaves, along, forward)


def _difference(
    what: str,
    fn: Callable[..., Tensor | tuple[Tensor, ...]],
    leaves: Sequence[Tensor],
    along: Sequence[Tensor],
    tangents: Sequence[Tensor],
) -> str | None:
    """Describe the first of the `tangents`, the derivatives of `fn` at `leaves` in the direction `along`, that differs
    from central differences; None if none does. Other dtypes than float64, and large numbers, are not tried."""
    if any(x.dtype != torch.float64 or (x.numel() and x.abs().max() > CALM) for x in leaves):
        return None
    ends = [fn(*(x + sign * STEP * v for x, v in zip(leaves, along, strict=True))) for sign in (1, -1)]
    after, before = ([x] if isinstance(x, Tensor) else x for x in ends)
    for tangent, x, y in zip(tangents, after, before, strict=True):
        expected = (x - y) / (2 * STEP)
        largest = max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
        if not torch.allclose(tangent, expected, rtol=0.0, atol=COARSE * largest):
            return f"{what} is {tangent.flatten()[:3].tolist()}, and differences give {expected.flatten()[:3].tolist()}"
    return None


_LAWS = MappingProxyType(
    {
        "grad": KernelLaw("grad", "grad and vjp give the gradient of a plain backward pass", _grad),
        "vmap": KernelLaw("vmap", "a map gives what calls one by one give, values and gradients", _vmap),
        "jvp": KernelLaw("jvp", "forward-mode derivatives are those of the gradient, and of differences", _jvp),
        "hessian": KernelLaw(
            "hessian", "Hessian-vector products are the definition's, and those of differences", _hessian
        ),
    }
)


def check_func(
    op: str | Operation,
    kernel: Kernel,
    *,
    transforms: Collection[str] = TRANSFORMS,
    dtypes: Sequence[torch.dtype] = (torch.float64,),
    lacks: Collection[str] | None = None,
) -> bool:
    """Check a kernel by the laws of torch.func: `laws.check_func("log_probs", my_kernel)`. Raises LawViolation for the
    first broken law.

    "grad": torch.func.grad and vjp give the gradient of a plain backward pass. "vmap": a map over all leaves, or over
    the first alone, gives the values and gradients of single calls. "jvp": forward-mode derivatives are those of the
    gradient, and of central differences in float64. "hessian": Hessian-vector products, forward over reverse and
    reverse over reverse, are the definition's in float64, and those of differences of the gradient. Only those
    `transforms` are tried that the operation's record lists. Dtypes, tolerances and `lacks` are as in `check_kernel`.

    Returns whether there were laws to try. Raises ValueError for another operation, transform or dtype.
    """
    op = operation_of(op) if isinstance(op, str) else op
    if unknown := sorted(set(transforms) - set(_LAWS)):
        raise ValueError(f"unknown transforms {unknown}; there are {list(_LAWS)}")
    chosen = [law for name, law in _LAWS.items() if name in transforms and name in op.transforms]
    lacks = own(op.name, kernel).lacks if lacks is None else frozenset(lacks)
    if op.draw is None or not chosen or op.needed & lacks:
        return False
    numbers = [number for number, features in enumerate(op.features) if not features & lacks]
    kinds = checked(dtypes)
    examples = partial(example_of, op, numbers, kinds, "cpu", None)
    check(kernel, bound(chosen, op), examples, sizes=op.sizes[:5:2], seeds=len(numbers) * len(kinds))
    return True
