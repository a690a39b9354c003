"""Laws of log-prob kernels: the log-probs of labels and their gradient equal the float64 reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fppo.laws._kernels import TOLERANCES, apart, carry, checked, exact, grads, place, settings, words
from fppo.laws._search import Law, LawExample, check, differ, normal, unchanged
from fppo_kernels.log_probs.reference import reference

OUTPUTS = ("log_probs", "entropy", "sum_squared")
SIZES = ((0, 2), (1, 1), (1, 2), (2, 2), (1, 4), (3, 5), (5, 9), (33, 1100))  # tokens, vocabulary


def _log_probs(kernel: Callable, example: LawExample, entropy: bool = True, sum_squared: bool = True) -> Any:
    return kernel(*example.inputs.values(), **settings(example), entropy=entropy, sum_squared=sum_squared)


def _log_probs_grads(
    kernel: Callable, example: LawExample, outputs: Sequence[str], names: Sequence[str] = ("hidden", "weight", "bias")
) -> dict[str, Tensor]:
    """The gradients by these names of sum(weights * output), summed over the outputs."""
    example, leaves = carry(example, names)
    result = _log_probs(kernel, example)
    sums = [(example.weights[OUTPUTS.index(output)] * getattr(result, output)).sum() for output in outputs]
    return dict(zip(leaves, grads(torch.stack(sums).sum(), list(leaves.values())), strict=True))


def _log_probs_shape(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    hidden = example.inputs["hidden"]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    both = _log_probs(kernel, example)
    for name in OUTPUTS:
        x = getattr(both, name, None)
        if not isinstance(x, Tensor):
            return f"{name} is {type(x).__name__}, expected a Tensor"
        if x.shape != hidden.shape[:1] or x.dtype != wide:
            return f"{name} is {words(x.dtype)} {list(x.shape)}, expected {words(wide)} [{len(hidden)}]"
        if not x.isfinite().all():
            return f"{name} is not finite: {x.tolist()}"
    return None


def _outputs_requested(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    both, dtype = _log_probs(kernel, example), example.inputs["hidden"].dtype
    for entropy, sum_squared in ((False, False), (True, False), (False, True)):
        one = _log_probs(kernel, example, entropy, sum_squared)
        for name, asked in zip(OUTPUTS, (True, entropy, sum_squared), strict=True):
            if asked and (reason := apart(name, getattr(both, name), getattr(one, name), dtype)):
                return f"with entropy={entropy} and sum_squared={sum_squared}, {reason}, as with both"
    return None


def _log_probs_purity(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    copy = example.map(torch.clone)
    first = _log_probs(kernel, example)
    _log_probs_grads(kernel, example, OUTPUTS)
    if reason := unchanged(example, copy):
        return reason
    second = _log_probs(kernel, example)
    for name in OUTPUTS:
        if reason := differ(name, getattr(first, name), getattr(second, name), 0.0):
            return f"a second call gave another result: {reason}, as before"
    return None


def _log_probs_range(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    result, vocab = _log_probs(kernel, example), len(example.inputs["weight"])
    slack = TOLERANCES[result.log_probs.dtype]  # moments are sums, and round
    for name, low, high in (
        ("log_probs", -math.inf, 0.0),
        ("entropy", -slack, math.log(vocab) + slack),
        ("sum_squared", 1 / vocab - slack, 1 + slack),
    ):
        x = getattr(result, name).detach()
        outside = ((x < low) | (x > high)).nonzero().flatten().tolist()
        if outside:
            return f"{name}[{outside[0]}] is {x[outside[0]].item():.9g}, with a vocabulary of {vocab}"
    return None


def _log_probs_values(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    actual, expected = _log_probs(kernel, example), _log_probs(reference, exact(example))
    for name in OUTPUTS:
        if reason := apart(name, getattr(expected, name), getattr(actual, name), example.inputs["hidden"].dtype):
            return reason
    return None


def _log_probs_gradient(
    kernel: Callable, example: LawExample, generator: torch.Generator, *, outputs: Sequence[str]
) -> str | None:
    actual, expected = (_log_probs_grads(fn, x, outputs) for fn, x in ((kernel, example), (reference, exact(example))))
    for name, grad in expected.items():
        if reason := apart(f"the gradient by {name}", grad, actual[name], example.inputs["hidden"].dtype):
            return reason
    return None


def _frozen_head(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    whole = _log_probs_grads(kernel, example, OUTPUTS)
    for names in (("hidden",), ("weight",)):
        for name, grad in _log_probs_grads(kernel, example, OUTPUTS, names).items():
            if reason := apart(f"the gradient by {name} alone", whole[name], grad, grad.dtype):
                return reason
    return None


def _gradient_law(*outputs: str) -> Law:
    what = outputs[0] if len(outputs) == 1 else "all outputs"
    statement = f"the gradient of {what} by hidden, weight and bias is that of the float64 reference"
    return Law(f"gradient of {what}", statement, partial(_log_probs_gradient, outputs=outputs))


_LOG_PROBS_LAWS = (
    Law("shape", "every output is finite, [N], in the dtype of hidden or float32 if that is wider", _log_probs_shape),
    Law("purity", "arguments stay as they are, and equal arguments give equal bits", _log_probs_purity),
    Law("outputs asked for", "an output does not depend on which others are asked for", _outputs_requested),
    Law("range", "log_probs <= 0, 0 <= entropy <= log V, 1 / V <= sum of squares <= 1", _log_probs_range),
    Law("values", "values are those of the float64 reference", _log_probs_values),
    *(_gradient_law(output) for output in OUTPUTS),
    _gradient_law(*OUTPUTS),
    Law("frozen head", "a gradient does not depend on which arguments take one", _frozen_head),
)


SUM_TOLERANCES = MappingProxyType({**TOLERANCES, torch.bfloat16: 2**-8})


def _sums_example(
    dtypes: Sequence[torch.dtype], device: torch.device | str, rows: int, width: int, seed: int
) -> LawExample:
    """Every logit is 0, so that a term of a sum takes no rounding: hidden states are 0, or weights are."""
    dtype, of_hidden = dtypes[seed // 2], seed % 2 == 0
    generator = torch.Generator().manual_seed(seed)
    rows, width = (1, rows) if of_hidden else (rows, width)
    hidden, weight = (torch.randint(1, 4, (n, 2), generator=generator).double() for n in (rows, width))
    labels = torch.zeros(rows, dtype=torch.int64)
    weights = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)[:, None].expand(3, rows)
    inputs = {"hidden": hidden * (not of_hidden), "weight": weight * of_hidden, "labels": labels}
    return place(LawExample(inputs, {}, weights), dtype, device)


def _long_sums(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    actual, expected = (
        _log_probs_grads(fn, x, OUTPUTS[:1]) for fn, x in ((kernel, example), (reference, exact(example)))
    )
    for name, grad in expected.items():
        slack = SUM_TOLERANCES[example.inputs["hidden"].dtype] * grad.abs().max().item()
        if reason := differ(f"the gradient by {name}", grad, actual[name], slack, relative=0.0):
            return reason
    return None


_SUM_LAWS = (Law("long sums", "gradients over many tokens and a large vocabulary are rounded once", _long_sums),)


BITS = 14  # of the codes that tell columns apart: 2**14 is more than the columns
LARGE = (1100, 8300)  # tokens, vocabulary: more than 1,024 and 8,192, and no multiple of a block
PIECE = 100  # tokens that the reference is asked about at a time: its logits of all would take 70 MB, several times


def _large_example(
    dtypes: Sequence[torch.dtype], device: torch.device | str, hidden_size: int, rows: int, width: int, seed: int
) -> LawExample:
    """Every token's probability lies on one column and those whose code differs from it in a bit or two.

    These columns are the borders of blocks of 64, and others by chance; so a label or a logit at the wrong place shows.
    Labels of tokens that are a power of two apart differ from their columns in different numbers of bits. Logits are
    small whole numbers, which no dtype rounds.
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


def _large(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    dtype, (hidden, weight, labels) = example.inputs["hidden"].dtype, example.inputs.values()
    weight = weight.double().requires_grad_()
    values, by_hidden, by_weight = [], [], torch.zeros_like(weight)
    for rows in torch.arange(len(labels)).split(PIECE):
        leaf = hidden[rows].double().requires_grad_()
        out = reference(leaf, weight, labels[rows], entropy=True, sum_squared=True)
        stacked = torch.stack([getattr(out, name) for name in OUTPUTS])
        of_hidden, of_weight = torch.autograd.grad((example.weights[:, rows] * stacked).sum(), (leaf, weight))
        values, by_hidden, by_weight = [*values, stacked.detach()], [*by_hidden, of_hidden], by_weight + of_weight
    actual = _log_probs(kernel, example)
    for name, expected in zip(OUTPUTS, torch.cat(values, 1), strict=True):
        if reason := apart(name, expected, getattr(actual, name), dtype):
            return reason
    del actual
    expected_grads = {"hidden": torch.cat(by_hidden), "weight": by_weight}
    for name, grad in _log_probs_grads(kernel, example, OUTPUTS).items():
        if reason := apart(f"the gradient by {name}", expected_grads[name], grad, dtype):
            return reason
    return None


_LARGE_LAWS = (Law("large", "values and gradients are right over more tokens and columns than a block has", _large),)


class _LogProbsCase(NamedTuple):
    bias: bool = False
    temperature: float | str | None = None
    softcap: float | None = None
    scale: float | None = None
    logits: str = "usual"  # or "flat", "extreme"


_LOG_PROBS_CASES = (
    _LogProbsCase(),
    _LogProbsCase(bias=True),
    _LogProbsCase(temperature=0.7),
    _LogProbsCase(temperature="per token"),
    _LogProbsCase(softcap=2.0),
    _LogProbsCase(scale=0.5),
    _LogProbsCase(True, "per token", 3.0, 1.5),
    _LogProbsCase(logits="flat"),
    _LogProbsCase(temperature="per token", logits="extreme"),
    _LogProbsCase(True, 0.5, 30.0, 0.5, "extreme"),
)


def _log_probs_example(
    dtypes: Sequence[torch.dtype], device: torch.device | str, hidden_size: int, rows: int, width: int, seed: int
) -> LawExample:
    """Numbers that float32 holds; extreme logits are whole, so that float32 makes no error in them."""
    case, dtype = _LOG_PROBS_CASES[seed // len(dtypes)], dtypes[seed % len(dtypes)]
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + seed // len(dtypes))

    def draw(*shape: int, step: float = 1.0) -> Tensor:
        if case.logits == "extreme":
            return step * torch.randint(-2, 3, shape, generator=generator).double()
        return normal(generator, *shape) * (case.logits != "flat")

    inputs = {
        "hidden": draw(rows, hidden_size, step=64.0),
        "weight": draw(width, hidden_size),
        "labels": torch.randint(width, (rows,), generator=generator),
    }
    numbers = {"temperature": case.temperature, "softcap": case.softcap, "scale": case.scale}
    extras = {name: torch.tensor(x, dtype=torch.float64) for name, x in numbers.items() if isinstance(x, float)}
    if case.temperature == "per token":
        extras["temperature"] = 2.0 ** torch.randint(-1, 2, (rows,), generator=generator).double()
    if case.bias:
        extras["bias"] = draw(width, step=64.0)
    return place(LawExample(inputs, extras, normal(generator, 3, rows)), dtype, device)


def check_log_probs(
    kernel: Callable[..., Any],
    *,
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCES),
    device: torch.device | str = "cpu",
    hidden_size: int = 2,
) -> None:
    """Put a log-prob kernel through its laws: `laws.check_log_probs(my_kernel)`. LawViolation for the first that fails.

    `kernel(hidden [N, H], weight [V, H], labels [N], *, bias, temperature, softcap, scale, entropy, sum_squared)`
    returns a record with log_probs, entropy and sum_squared [N] (see `fppo_kernels.log_probs.reference`).

    log_probs <= 0, 0 <= entropy <= log V, 1 / V <= sum of squares <= 1; the values of every output and its gradient by
    hidden, weight and bias are those of the float64 reference, to 1e-9 in float64, 1e-4 in float32 and 2e-2 in
    bfloat16 (relative to the larger of 1 and the tensor's largest number), for no token, one and more, with and without
    bias, softcap and scale, a temperature for all or one per token, flat and extreme logits, and 1,100 tokens over a
    vocabulary of 8,300; long sums are rounded once; arguments stay as they are. Kernels that compute in float32 alone
    bind `dtypes=(torch.float32,)`. Raises ValueError for another dtype.
    """
    dtypes = checked(dtypes)
    examples = partial(_log_probs_example, dtypes, device, hidden_size)
    seeds = len(_LOG_PROBS_CASES) * len(dtypes)
    check(kernel, _LOG_PROBS_LAWS, examples, sizes=SIZES, seeds=seeds)
    sums = partial(_sums_example, dtypes, device)
    check(kernel, _SUM_LAWS, sums, sizes=((4096, 4),), seeds=2 * len(dtypes))
    middle = torch.float32 if torch.float32 in dtypes else dtypes[0]  # what is wrong here is so in every dtype
    check(kernel, _LARGE_LAWS, partial(_large_example, (middle,), device, hidden_size), sizes=(LARGE,), seeds=1)
