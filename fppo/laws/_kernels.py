"""Helpers of the laws of kernels: examples in a dtype, and distances from a float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fppo.laws._search import Law, LawExample, differ
from fppo_kernels.operation import Kernel, Operation

# The allowed difference from the float64 reference, relative to the larger of 1 and the tensor's largest number.
# bfloat16 keeps 8 bits, and intermediate logits may be rounded to it.
TOLERANCES = MappingProxyType({torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2})
SLACK = 10.0  # factor of tolerances in screening, for kernels that multiply in TF32 or the like
DTYPES = (torch.float64, torch.float32)  # the default for kernels


def words(dtype: torch.dtype) -> str:
    """The name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def apart(what: str, expected: Tensor, actual: Tensor, dtype: torch.dtype, slack: float = 1.0) -> str | None:
    """Describe how two tensors, called `what`, differ by more than `slack` times the tolerance of `dtype` (for float16
    the tolerance of bfloat16); None if they do not."""
    largest = max(1.0, expected.detach().abs().max().item()) if expected.numel() else 1.0
    tolerance = slack * TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])
    reason = differ(what, expected, actual, tolerance * largest, relative=0.0)
    return reason and f"in {words(dtype)}, {reason}"


def exact(example: LawExample) -> LawExample:
    """Cast the example to float64."""
    return example.map(lambda x: x.double() if x.is_floating_point() else x)


def settings(example: LawExample) -> dict[str, Any]:
    """The extras that are passed as keywords: numbers, and tensors with dimensions."""
    return {name: x.item() if x.dim() == 0 else x for name, x in example.extras.items()}


def grads(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of `total` by each leaf; zeros for leaves that it does not depend on."""
    values = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else [None] * len(leaves)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, values, strict=True)]


def carry(example: LawExample, names: Sequence[str]) -> tuple[LawExample, dict[str, Tensor]]:
    """Make the inputs and extras of these names leaves with gradients; return the example and the leaves."""
    tensors = {**example.inputs, **example.extras}
    leaves = {name: tensors[name].detach().clone().requires_grad_() for name in names if name in tensors}
    return example.put(**leaves), leaves


def place(example: LawExample, dtype: torch.dtype, device: torch.device | str) -> LawExample:
    """Move the example to a device and a dtype, its numbers rounded to float32 first. 0-d tensors stay as they are."""

    def move(x: Tensor) -> Tensor:
        if x.dim() == 0:
            return x
        return (x.float().to(dtype) if x.is_floating_point() else x).to(device)

    return example.map(move)


def checked(dtypes: Sequence[torch.dtype]) -> tuple[torch.dtype, ...]:
    """Return the dtypes as a tuple. Raises ValueError if there are none, and for a dtype without a tolerance."""
    if not dtypes or not set(dtypes) <= set(TOLERANCES):
        raise ValueError(f"dtypes must be some of {[words(x) for x in TOLERANCES]}, got {[str(x) for x in dtypes]}")
    return tuple(dtypes)


def named(output: str) -> str:
    """The name of a kernel's output in messages: "the result" for "result", the output of a kernel with only one."""
    return "the result" if output == "result" else output


def results(
    op: Operation, kernel: Kernel, example: LawExample, outputs: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Run a kernel on an example, and return its outputs by name: all of them, or only `outputs`."""
    return op.call(kernel, example.inputs, settings(example), op.outputs if outputs is None else outputs)


def gradients(
    op: Operation, kernel: Kernel, example: LawExample, by: Sequence[str] | None = None, of: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """The gradients of sum(weights * output), summed over the outputs named in `of`, by the leaves named in `by`; None:
    all outputs, all leaves."""
    example, leaves = carry(example, op.leaves if by is None else by)
    values, weights = results(op, kernel, example), op.cotangents(example.weights)
    total = torch.stack([(weights[name] * values[name]).sum() for name in (op.sloped if of is None else of)]).sum()
    return dict(zip(leaves, grads(total, list(leaves.values())), strict=True))


def example_of(
    op: Operation,
    numbers: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device | str,
    wide: int | None,
    rows: int,
    width: int,
    seed: int,
) -> LawExample:
    """Draw an example of `rows` and `width` on a device, with heads and hidden states of the width `wide` (None: as
    `op.draw` has it); the seed chooses one of the case `numbers` of `op.draw`, and one of the dtypes."""
    assert op.draw is not None
    number, dtype = numbers[seed // len(dtypes)], dtypes[seed % len(dtypes)]
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + number)
    return place(LawExample(*op.draw(generator, rows, width, number, wide)), dtype, device)


class KernelLaw(NamedTuple):
    """A law of the kernels of some operations; its `breach` takes the operation before a `Law`'s arguments."""

    name: str
    statement: str
    breach: Callable[[Operation, Kernel, LawExample, torch.Generator], str | None]


def bound(laws: Sequence[KernelLaw], op: Operation) -> list[Law]:
    """Bind laws to an operation."""
    return [Law(law.name, law.statement, partial(law.breach, op)) for law in laws]


def frozen(name: str, leaves: Sequence[str]) -> KernelLaw:
    """The law that the gradient by each of these leaves alone is the one beside those by all others."""

    def breach(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
        whole = gradients(op, kernel, example)
        for leaf in (x for x in leaves if x in whole):
            (alone,) = gradients(op, kernel, example, (leaf,)).values()
            if reason := apart(f"the gradient by {leaf} alone", whole[leaf], alone, alone.dtype):
                return reason
        return None

    return KernelLaw(name, "a gradient does not depend on which arguments take one", breach)
