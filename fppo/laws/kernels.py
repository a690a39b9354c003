"""Laws of kernels: values and gradients equal the float64 reference, rows are independent, arguments are unchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from fppo.laws import _kernels, attention, log_probs
from fppo.laws._kernels import KernelLaw, apart, bound, checked, exact, example_of, gradients, named, results, words
from fppo.laws._search import Law, LawExample, check, differ, normal, unchanged
from fppo.laws.adamw import check_adamw
from fppo.laws.collectives import check_all_to_all
from fppo.laws.padding import check_padding
from fppo.laws.temporal import check_gae
from fppo_kernels import padding
from fppo_kernels.operation import Kernel, Operation, operation_of
from fppo_kernels.table import own


def _dtype(op: Operation, example: LawExample) -> torch.dtype:
    """The dtype whose tolerance the operation's results have."""
    return op.tolerance or next(iter(example.inputs.values())).dtype


def _shape(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    expected = results(op, op.reference, example)
    for name, x in results(op, kernel, example).items():
        if not isinstance(x, Tensor):
            return f"{named(name)} is {type(x).__name__}, expected a Tensor"
        want = expected[name]
        if x.shape != want.shape or x.dtype != want.dtype:
            what = "it returned" if name == "result" else f"{name} is"
            return f"{what} {words(x.dtype)} {list(x.shape)}, expected {words(want.dtype)} {list(want.shape)}"
        if not x.isfinite().all():
            return f"{named(name)} is not finite"
    return None


def _purity(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    copy, first = example.map(torch.clone), results(op, kernel, example)
    slopes = gradients(op, kernel, example) if op.sloped else {}
    if reason := unchanged(example, copy):
        return reason
    for name, again in results(op, kernel, example).items():
        if reason := differ(named(name), first[name], again, 0.0):
            return f"a second call gave another result: {reason}, as before"
    for name, again in gradients(op, kernel, example).items() if op.rows else ():
        if reason := differ(f"the gradient by {name}", slopes[name], again, 0.0):
            return f"a second call gave another gradient: {reason}, as before"
    return None


def _values(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    expected, actual = results(op, op.reference, exact(example)), results(op, kernel, example)
    for name, x in expected.items():
        if reason := apart(named(name), x, actual[name], _dtype(op, example)):
            return reason
    return None


def _gradients(
    of: Sequence[str], op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator
) -> str | None:
    actual, expected = gradients(op, kernel, example, of=of), gradients(op, op.reference, exact(example), of=of)
    slack = op.slack(example.inputs, example.extras)
    for name, grad in expected.items():
        if reason := apart(f"the gradient by {name}", grad, actual[name], _dtype(op, example), slack):
            return reason
    return None


def _rows_apart(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    count = example.weights.shape[-2]
    for cut in sorted({1, count // 2} - {0, count}):
        readers = (torch.arange(count, device=example.weights.device) < cut)[:, None]
        fresh = {n: normal(generator, *example.inputs[n].shape).to(example.inputs[n]) for n in op.rows}
        changed = example.put(**{n: x.where(~readers, example.inputs[n]) for n, x in fresh.items()})
        before, after = (results(op, kernel, x)["result"][..., :cut, :] for x in (example, changed))
        if reason := differ("the result there", before, after, 0.0):
            return f"rows before row {cut} see those from there on: {reason}, as before they changed"
        of_readers = example._replace(weights=example.weights.where(readers, 0.0))
        for name, grad in gradients(op, kernel, of_readers, op.rows).items():
            if reason := differ("it", torch.zeros_like(grad[..., cut:, :]), grad[..., cut:, :], 0.0):
                return f"the gradient of the rows before row {cut} reaches {name} of those from there on: {reason}"
    return None


def _gradient_law(op: Operation, outputs: Sequence[str]) -> KernelLaw:
    what = outputs[0] if len(outputs) == 1 else "all outputs"
    name = "gradients" if len(op.outputs) == 1 else f"gradient of {what}"
    statement = f"the gradient of {named(what)} by every input is that of the float64 reference"
    return KernelLaw(name, statement, partial(_gradients, outputs))


# further laws of single operations
_OTHERS = MappingProxyType(
    {"log_probs": log_probs.LAWS, "attention": attention.LAWS, "decode_attention": attention.DECODING_LAWS}
)


_COMMON = (
    KernelLaw("shape", "results are finite, of the shape and the dtype that they should have", _shape),
    KernelLaw("purity", "arguments stay as they are, and equal arguments give equal bits", _purity),
)
_VALUES = KernelLaw("values", "values are those of the float64 reference", _values)
_APART = KernelLaw("rows apart", "other rows change nothing, and no gradient reaches them", _rows_apart)


def laws_of(op: Operation) -> list[Law]:
    """The laws of an operation; those of large examples for log-probs are separate (`check_large`)."""
    special = ((_APART,), (_kernels.frozen("frozen", op.leaves),)) if op.rows else (_OTHERS.get(op.name, ()), ())
    outputs = [*((name,) for name in op.sloped), *([op.sloped] if len(op.sloped) > 1 else [])]
    slopes = [_gradient_law(op, names) for names in outputs]
    return bound([*_COMMON, *special[0], _VALUES, *slopes, *special[1]], op)


def _check_gae(kernel: Kernel, dtypes: Sequence[torch.dtype], device: torch.device) -> bool:
    if device.type == "cpu":
        check_gae(kernel, dtypes=tuple({torch.float64, *dtypes}))
    return device.type == "cpu"


# operations of other kinds, with laws of their own
_CHECKS: Mapping[str, Callable[[Kernel, Sequence[torch.dtype], torch.device], bool | None]] = MappingProxyType(
    {
        "gae": _check_gae,
        "adamw": lambda kernel, dtypes, device: check_adamw(kernel, dtypes=dtypes, device=device),
        "unpad": lambda kernel, dtypes, device: check_padding(kernel, padding.pad, device=device),
        "pad": lambda kernel, dtypes, device: check_padding(padding.unpad, kernel, device=device),
        "all_to_all": lambda kernel, dtypes, device: check_all_to_all(kernel, ranks=(1, 2)),
    }
)


def check_kernel(
    op: str | Operation,
    kernel: Kernel,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | str = "cpu",
    lacks: Collection[str] | None = None,
    reference: Kernel | None = None,
    wide: int | None = None,
    tolerance: torch.dtype | None = None,
) -> bool:
    """Check a kernel by the laws of its operation: `laws.check_kernel("log_probs", my_kernel)`. Raises LawViolation for
    the first broken law.

    `op` is a name of `fppo_kernels.table.Kernels`, whose definition, as `fppo_kernels.log_probs.reference`, has the
    kernel's signature; or an `Operation` that you made for an operation of your own. The laws: values, and the gradient
    of every output by every input, equal those of the definition in float64, to 1e-9 in float64, 1e-4 in float32 and
    2e-2 in bfloat16, relative to the larger of 1 and the tensor's largest number. (For gradients of attention in
    bfloat16 the tolerance is multiplied by `scale` * sqrt(D / 2) if that is above 1.) Whatever a row, a token or a
    sequence must not see changes no bit of its result, and gets no gradient. Arguments are unchanged, and equal
    arguments give equal bits. Examples are empty, small, steep, flat and large, with and without each keyword.

    `dtypes` are by default all of the operation's; a kernel for float32 alone gives `dtypes=(torch.float32,)`. `lacks`
    names keywords, features ("gqa") or activations that the kernel does not support, and that examples leave out: by
    default none, but "key_lengths" for attention without that keyword. A kernel that rounds its operands gives its own
    `reference`, a differentiable function of the same arguments in float64, as
    `fppo_kernels.linear.float8_reference.reference`. One that rounds its results to a narrower dtype gives it as
    `tolerance`. `wide` is the width of heads and hidden states in examples; None: 16 on a GPU, and the
    small widths of the examples on a CPU.

    Returns True if the kernel was checked and holds, and False if nothing was checked: the kernel lacks a feature that
    all examples need, or it is one for "gae" on a GPU. Raises ValueError for another operation or dtype.
    """
    op, device = operation_of(op) if isinstance(op, str) else op, torch.device(device)
    dtypes = checked(op.dtypes if dtypes is None else dtypes)
    if op.name in _CHECKS:
        return _CHECKS[op.name](kernel, dtypes, device) is not False
    lacks = own(op.name, kernel).lacks if lacks is None else frozenset(lacks)
    if op.needed & lacks:
        return False
    op = op if reference is None else attrs.evolve(op, reference=reference)
    op = op if tolerance is None else attrs.evolve(op, tolerance=tolerance)
    wide = op.wide if wide is None and device.type != "cpu" else wide
    numbers = [number for number, features in enumerate(op.features) if not features & lacks]
    examples = partial(example_of, op, numbers, dtypes, device, wide)
    check(kernel, laws_of(op), examples, sizes=op.sizes, seeds=len(numbers) * len(dtypes))
    if op.name == "log_probs":
        log_probs.check_large(op, kernel, dtypes, device, wide)
    return True
