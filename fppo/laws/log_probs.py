"""Laws of log-probs besides those of all kernels: independence of requested outputs, ranges, and large examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType

import torch

from fppo.laws._kernels import TOLERANCES, KernelLaw, apart, bound, exact, frozen, gradients, place, results
from fppo.laws._search import LawExample, check, differ
from fppo_kernels.operation import Kernel, Operation


def _outputs_requested(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    both, dtype = results(op, kernel, example), example.inputs["hidden"].dtype
    for entropy, sum_squared in ((False, False), (True, False), (False, True)):
        wanted = [n for n, use in zip(op.outputs, (True, entropy, sum_squared), strict=True) if use]
        for name, x in results(op, kernel, example, wanted).items():
            if reason := apart(name, both[name], x, dtype):
                return f"with entropy={entropy} and sum_squared={sum_squared}, {reason}, as with both"
    return None


def _range(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    found, vocab = results(op, kernel, example), len(example.inputs["weight"])
    slack = TOLERANCES[found["log_probs"].dtype]  # moments are rounded sums
    for name, low, high in (
        ("log_probs", -math.inf, 0.0),
        ("entropy", -slack, math.log(vocab) + slack),
        ("sum_squared", 1 / vocab - slack, 1 + slack),
    ):
        x = found[name].detach()
        outside = ((x < low) | (x > high)).nonzero().flatten().tolist()
        if outside:
            return f"{name}[{outside[0]}] is {x[outside[0]].item():.9g}, with a vocabulary of {vocab}"
    return None


LAWS = (
    KernelLaw("outputs asked for", "an output does not depend on which others are asked for", _outputs_requested),
    KernelLaw("range", "log_probs <= 0, 0 <= entropy <= log V, 1 / V <= sum of squares <= 1", _range),
    frozen("frozen head", ("hidden", "weight")),
)


SUM_TOLERANCES = MappingProxyType({**TOLERANCES, torch.bfloat16: 2**-8})


def sums_example(
    dtypes: Sequence[torch.dtype], device: torch.device | str, rows: int, width: int, seed: int
) -> LawExample:
    """An example whose logits are all 0, so that no term of a sum is rounded: hidden states or weights are 0."""
    dtype, of_hidden = dtypes[seed // 2], seed % 2 == 0
    generator = torch.Generator().manual_seed(seed)
    rows, width = (1, rows) if of_hidden else (rows, width)
    hidden, weight = (torch.randint(1, 4, (n, 2), generator=generator).double() for n in (rows, width))
    labels = torch.zeros(rows, dtype=torch.int64)
    weights = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)[:, None].expand(3, rows)
    inputs = {"hidden": hidden * (not of_hidden), "weight": weight * of_hidden, "labels": labels}
    return place(LawExample(inputs, {}, weights), dtype, device)


def _long_sums(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    of = op.outputs[:1]
    actual, expected = gradients(op, kernel, example, of=of), gradients(op, op.reference, exact(example), of=of)
    for name, grad in expected.items():
        slack = SUM_TOLERANCES[example.inputs["hidden"].dtype] * grad.abs().max().item()
        if reason := differ(f"the gradient by {name}", grad, actual[name], slack, relative=0.0):
            return reason
    return None


SUM_LAWS = (KernelLaw("long sums", "gradients over many tokens and a large vocabulary are rounded once", _long_sums),)


BITS = 14  # codes that distinguish columns; more than the number of columns
LARGE = (1100, 8300)  # tokens and vocabulary: more than 1,024 and 8,192, and no multiple of a block
PIECE = 100  # tokens per call of the reference, whose logits for all would take several times 70 MB


def large_example(
    dtypes: Sequence[torch.dtype], device: torch.device | str, hidden_size: int, rows: int, width: int, seed: int
) -> LawExample:
    """An example in which each token's probability is on one column, and on columns whose codes differ in a bit or two.

    The tokens' columns are the borders of blocks of 64, and random ones, so that a misplaced label or logit is
    detected. Each label is its token's column with 0, 1 or 2 bits changed, in turns of three tokens, so that tokens
    mixed up at a distance of a power of two are detected. Logits are small integers, which are exact in every dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = torch.arange(width)
    border = (columns % 64 == 0) | (columns % 64 == 63)
    order = torch.randperm(width, generator=generator)
    peaks = torch.cat([columns[border], order[~border[order]]])[:rows]
    peaks = peaks[torch.randperm(rows, generator=generator)]
    codes = torch.zeros(width, max(hidden_size, 16), dtype=torch.float64)
    codes[:, :BITS] = 2.0 * ((columns[:, None] >> torch.arange(BITS)) % 2) - 1
    labels = peaks ^ torch.tensor([0, 1, 3])[torch.arange(rows) % 3]
    weights = torch.randint(-2, 3, (3, rows), generator=generator).double()
    return place(
        LawExample({"hidden": 2 * codes[peaks], "weight": codes, "labels": labels}, {}, weights), dtypes[0], device
    )


def _large(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    dtype, (hidden, weight, labels) = example.inputs["hidden"].dtype, example.inputs.values()
    weight = weight.double().requires_grad_()
    values, by_hidden, by_weight = [], [], torch.zeros_like(weight)
    for rows in torch.arange(len(labels)).split(PIECE):
        leaf = hidden[rows].double().requires_grad_()
        out = op.call(op.reference, {"hidden": leaf, "weight": weight, "labels": labels[rows]}, {}, op.outputs)
        stacked = torch.stack(list(out.values()))
        of_hidden, of_weight = torch.autograd.grad((example.weights[:, rows] * stacked).sum(), (leaf, weight))
        values, by_hidden, by_weight = [*values, stacked.detach()], [*by_hidden, of_hidden], by_weight + of_weight
    actual = results(op, kernel, example)
    for name, expected in zip(op.outputs, torch.cat(values, 1), strict=True):
        if reason := apart(name, expected, actual[name], dtype):
            return reason
    del actual
    expected_grads = {"hidden": torch.cat(by_hidden), "weight": by_weight}
    for name, grad in gradients(op, kernel, example).items():
        if reason := apart(f"the gradient by {name}", expected_grads[name], grad, dtype):
            return reason
    return None


LARGE_LAWS = (
    KernelLaw("large", "values and gradients are right over more tokens and columns than a block has", _large),
)


def check_large(
    op: Operation, kernel: Kernel, dtypes: Sequence[torch.dtype], device: torch.device | str, wide: int | None
) -> None:
    """Check large examples; raises LawViolation for the first broken law."""
    check(kernel, bound(SUM_LAWS, op), partial(sums_example, dtypes, device), sizes=((4096, 4),), seeds=2 * len(dtypes))
    middle = torch.float32 if torch.float32 in dtypes else dtypes[0]  # errors are equal in all dtypes
    check(kernel, bound(LARGE_LAWS, op), partial(large_example, (middle,), device, wide or 2), sizes=(LARGE,), seeds=1)
