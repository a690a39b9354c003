"""Laws of token losses: (weights * loss).sum() must not depend on how a batch is cut, padded and ordered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fppo.laws._kernels import TOLERANCES, checked, words
from fppo.laws._search import (
    Breach,
    Law,
    LawExample,
    Suite,
    changed,
    check_suite,
    differ,
    draw_mask,
    fn_name,
    impure,
    normal,
    nothing,
    short,
    spoil,
    stain,
    widen,
)
from fppo.metrics import Max, Mean, Metric, Min, Sum, merge

LossFn = Callable[..., tuple[Tensor, Mapping[str, Metric]]]
POLICY = ("log_probs", "old_log_probs", "advantages")
VALUES = ("values", "old_values", "returns")
OUTPUTS = ("outputs", "old_values", "returns")
GARBAGE_TEXT = "what stands where the mask is False changes no bit"
PADDING_TEXT = "columns outside the mask change nothing"
FINITE_NOTE = "finite numbers there change nothing"
DETACHED_NOTE = "callers that detach it see no difference"
TOKENS = 6  # least tokens of an example to judge: fewer may all be clipped, or equal, by chance


class _LossOutcome(NamedTuple):
    loss: Tensor  # [B, T]
    grad: Tensor  # the gradient of (weights * loss).sum() by the first input, [B, T]
    metrics: Mapping[str, Metric]


def _call(fn: LossFn, example: LawExample) -> tuple[Tensor, Mapping[str, Metric]]:
    return fn(*example.inputs.values(), **example.extras)


def _evaluate(fn: LossFn, example: LawExample) -> _LossOutcome:
    name = next(iter(example.inputs))
    carried = example.inputs[name].detach().clone().requires_grad_()
    loss, metrics = _call(fn, example.put(**{name: carried}))
    total = (example.weights * loss).sum()
    if not total.requires_grad:
        return _LossOutcome(loss, torch.zeros_like(carried), metrics)
    return _LossOutcome(loss.detach(), torch.autograd.grad(total, carried)[0], metrics)


def metrics_differ(expected: Mapping[str, Metric], actual: Mapping[str, Metric], tolerance: float = 1e-9) -> str | None:
    """Describe the first metric that is not as expected; None if all are."""
    if expected.keys() != actual.keys():
        return f"metrics are {sorted(actual)}, expected {sorted(expected)}"
    for name, metric in expected.items():
        for field, a, b in zip(metric._fields, metric, actual[name], strict=True):
            if reason := differ(f"metric {name}, {field}", a, b, tolerance):
                return reason
    return None


def _outcomes_differ(expected: _LossOutcome, actual: _LossOutcome, tolerance: float | None = None) -> str | None:
    """Describe where two outcomes of a loss differ by more than `tolerance` (None: the tolerance of their dtype); None
    if they do not."""
    within = TOLERANCES[expected.grad.dtype] if tolerance is None else tolerance
    return (
        differ("the loss", expected.loss, actual.loss, within)
        or differ("the gradient", expected.grad, actual.grad, within)
        or metrics_differ(expected.metrics, actual.metrics, TOLERANCES[expected.grad.dtype])
    )


def _per_token(fn: LossFn, example: LawExample, generator: torch.Generator) -> str | None:
    name = next(iter(example.inputs))
    result = _call(fn, example.put(**{name: example.inputs[name].requires_grad_()}))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
        return f"it returned a {type(result).__name__}, expected the tuple (loss [B, T], metrics)"
    loss, metrics = result
    if loss.shape != example.mask.shape:
        return f"the loss has shape {list(loss.shape)}, expected [B, T] = {list(example.mask.shape)}"
    if not isinstance(metrics, dict):
        return f"metrics are a {type(metrics).__name__}, expected a dict"
    for name, metric in metrics.items():
        if not isinstance(metric, Mean | Sum | Max | Min):
            return f"metric {name} is a {type(metric).__name__}, expected a Mean, Sum, Max or Min of fppo.metrics"
        if any(x.requires_grad for x in metric):
            return f"metric {name} carries a gradient; detach it"
    return None


def _purity(fn: LossFn, example: LawExample, generator: torch.Generator) -> str | None:
    return impure(example, lambda: _evaluate(fn, example), partial(_outcomes_differ, tolerance=0.0))


def _precision(fn: LossFn, example: LawExample, generator: torch.Generator) -> str | None:
    dtype, outcome = example.weights.dtype, _evaluate(fn, example)
    if outcome.loss.dtype != dtype:
        return f"{words(dtype)} arguments gave a loss in {words(outcome.loss.dtype)}"
    if dtype != torch.float64 or example.mask.sum() < TOKENS or not outcome.grad.any():
        return None
    rounded = _evaluate(fn, example.map(lambda x: x.float().double() if x.is_floating_point() else x))
    if torch.equal(outcome.loss, rounded.loss):  # the weights are rounded too, so the gradient differs in any case
        return "float64 arguments gave the same loss, to the bit, as their float32 roundings: it computes in float32"
    return None


def _gradient(fn: LossFn, example: LawExample, generator: torch.Generator) -> Breach | None:
    first, second = (name for name in list(example.inputs)[:2])
    if example.inputs[first].shape == example.inputs[second].shape:
        example = example.put(**{second: example.inputs[first].clone()})
    if example.mask.sum() < TOKENS or _evaluate(fn, example).grad.any():
        return None
    return Breach(
        f"no gradient reaches {first}, although {second} are equal to them: nothing would be learned", example
    )


def _masked_garbage(fn: LossFn, example: LawExample, generator: torch.Generator) -> Breach | None:
    def dirty(x: Tensor, kind: str) -> Tensor:
        return spoil(x, _along(~mask, x) if x.dim() >= 2 else ~mask.any(1), generator, kind)

    mask, plain = example.mask, _evaluate(fn, example)
    for kind, garbage in (("nan", "NaN"), ("mixed", "NaN, inf or 1e300")):
        spoiled = example.map(partial(dirty, kind=kind))._replace(weights=example.weights).put(mask=mask)
        if reason := _outcomes_differ(plain, _evaluate(fn, spoiled), 0.0):
            return Breach(f"with {garbage} where the mask is False, {reason}", spoiled)
    return None


def _finite_garbage(fn: LossFn, example: LawExample, generator: torch.Generator) -> Breach | None:
    """Check that finite numbers of up to some tens outside the mask change neither loss nor gradient inside."""
    mask = example.mask
    spoiled = stain(example, generator)
    plain, stained = (
        x._replace(loss=x.loss.where(mask, 0.0), grad=x.grad.where(_along(mask, x.grad), 0.0), metrics={})
        for x in (_evaluate(fn, example), _evaluate(fn, spoiled))
    )
    return changed(_outcomes_differ(plain, stained), "with finite numbers where the mask is False, ", spoiled)


def _zero_outside(fn: LossFn, example: LawExample, generator: torch.Generator) -> str | None:
    outcome = _evaluate(fn, example)
    for what, x in (("the loss", outcome.loss), ("the gradient", outcome.grad)):
        outside = x.where(_along(~example.mask, x), 0.0)
        if reason := differ(f"outside the mask {what}", torch.zeros_like(x), outside, 0.0):
            return reason
    return None


def _along(mask: Tensor, x: Tensor) -> Tensor:
    """Reshape the mask [B, T] so that it broadcasts to `x` [B, T, ...]."""
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))


def _all_masked(fn: LossFn, example: LawExample, generator: torch.Generator) -> Breach | None:
    empty = example.put(mask=torch.zeros_like(example.mask))
    outcome = _evaluate(fn, empty)
    zeros = [torch.zeros_like(x) for x in (outcome.loss, outcome.grad)]
    reason = differ("the loss of an empty mask", zeros[0], outcome.loss, 0.0) or differ(
        "the gradient of an empty mask", zeros[1], outcome.grad, 0.0
    )
    return changed(reason, "", empty)


def _constants(fn: LossFn, example: LawExample, generator: torch.Generator) -> str | None:
    carried, *others = (name for name in example.inputs if name != "mask")
    leaves = {name: example.inputs[name].detach().clone().requires_grad_() for name in (carried, *others)}
    loss, _ = _call(fn, example.put(**leaves))
    total = (example.weights * loss).sum()
    if not total.requires_grad:
        return None
    grads = torch.autograd.grad(total, [leaves[name] for name in others], allow_unused=True)
    for name, grad in zip(others, grads, strict=True):
        if grad is not None and (reason := differ("it", torch.zeros_like(grad), grad, 0.0)):
            return f"a gradient reaches {name}; detach it. {reason}"
    return None


def _micro_batches(fn: LossFn, example: LawExample, generator: torch.Generator) -> str | None:
    whole, rows = _evaluate(fn, example), len(example.mask)
    for size in range(1, rows):
        pieces = [_evaluate(fn, example.map(lambda x, i=i, n=size: x[i : i + n])) for i in range(0, rows, size)]
        total = (example.weights * whole.loss).sum()
        joined = torch.cat([piece.loss for piece in pieces])
        within = TOLERANCES[example.weights.dtype]
        reason = differ("sum(weights * loss)", total, (example.weights * joined).sum(), within) or differ(
            "the gradient", whole.grad, torch.cat([piece.grad for piece in pieces]), within
        )
        if reason:
            return f"in micro-batches of {size}, {reason}, as in the whole batch"
    return None


def _metrics_add(fn: LossFn, example: LawExample, generator: torch.Generator) -> str | None:
    whole = _call(fn, example)[1]
    by_row = [_call(fn, example.map(lambda x, i=i: x[i : i + 1]))[1] for i in range(len(example.mask))]
    reason = metrics_differ(whole, merge(*by_row), TOLERANCES[example.weights.dtype])
    return reason and f"merged over single rows, {reason}, as in the whole batch"


def _row_order(fn: LossFn, example: LawExample, generator: torch.Generator) -> Breach | None:
    order = torch.randperm(len(example.mask), generator=generator)
    moved = example.map(lambda x: x[order])
    plain = _evaluate(fn, example)
    expected = plain._replace(loss=plain.loss[order], grad=plain.grad[order])
    reason = _outcomes_differ(expected, _evaluate(fn, moved))
    return changed(reason, f"with the rows in the order {order.tolist()}, which they have here, ", moved)


def _padding(fn: LossFn, example: LawExample, generator: torch.Generator, *, finite: bool = False) -> Breach | None:
    width = example.mask.shape[1]
    for columns in (1, 3):
        wide = example.map(partial(widen, columns=columns, fill=0.0 if finite else torch.nan))._replace(
            weights=torch.nn.functional.pad(example.weights, (0, columns))
        )
        outcome = _evaluate(fn, wide)
        cut = outcome._replace(loss=outcome.loss[:, :width], grad=outcome.grad[:, :width])
        if reason := _outcomes_differ(_evaluate(fn, example), cut):
            return Breach(f"with {columns} more columns of padding, {reason}", wide)
    return None


def _reinforce(fn: LossFn, example: LawExample, generator: torch.Generator, *, by_row: bool) -> Breach | None:
    log_probs, _, advantages, mask = list(example.inputs.values())[:4]
    if by_row:
        advantages = advantages[:, :1].expand_as(advantages).clone()
        example = example._replace(weights=example.weights.amax(1, keepdim=True).where(mask, 0.0))
    example = example.put(old_log_probs=log_probs.clone(), advantages=advantages)
    expected = (-example.weights * advantages).where(mask, 0.0)
    return changed(_gradient_differs(expected, fn, example), "", example)


def _error_gradient(fn: LossFn, example: LawExample, generator: torch.Generator) -> Breach | None:
    values, _, returns, mask = list(example.inputs.values())[:4]
    expected, example = (example.weights * (values - returns)).where(mask, 0.0), example.put(old_values=values.clone())
    return changed(_gradient_differs(expected, fn, example), "", example)


def _gradient_differs(expected: Tensor, fn: LossFn, example: LawExample) -> str | None:
    return differ("the gradient at old == new", expected, _evaluate(fn, example).grad, TOLERANCES[expected.dtype])


def _as_reference(reference: LossFn, fn: LossFn, example: LawExample, generator: torch.Generator) -> str | None:
    expected, actual = _evaluate(reference, example), _evaluate(fn, example)
    reason = _outcomes_differ(expected, actual._replace(metrics=expected.metrics))
    return reason and f"{reason}, as of {fn_name(reference)}"


COMMON = (
    Law("per token", "it returns (loss [B, T], metrics that are Mean, Sum, Max or Min, without gradient)", _per_token),
    Law("gradient", "the loss has a gradient by its first argument", _gradient),
    Law("precision", "it computes in the dtype of its arguments", _precision, "give dtype=torch.float32"),
    Law("purity", "arguments stay as they are, and equal arguments give equal bits", _purity),
    Law("empty mask", "with nothing in the mask, loss and gradient are 0", _all_masked),
    Law("masked garbage", GARBAGE_TEXT, _masked_garbage, mild=_finite_garbage, note=FINITE_NOTE),
    Law("zero outside the mask", "loss and gradient are exactly 0 where the mask is False", _zero_outside),
    Law("constants", "the gradient reaches the first argument alone", _constants, mild=nothing, note=DETACHED_NOTE),
    Law("micro-batches", "the sum of weights * loss and its gradient do not depend on the split", _micro_batches),
    Law("row order", "loss, gradient and metrics go with their rows", _row_order),
    Law("padding width", PADDING_TEXT, _padding, mild=partial(_padding, finite=True), note=FINITE_NOTE),
    Law("metrics add", "the metrics of single rows, merged, are those of the whole", _metrics_add),
)


def make_example(
    names: tuple[str, str, str],
    extras: Callable[..., dict[str, Tensor]] | None,
    dtype: torch.dtype,
    rows: int,
    width: int,
    seed: int,
    *,
    outputs: int = 1,
) -> LawExample:
    """Draw a batch of log-probs or values in a dtype, with old ones slightly or very different, and a mask by the seed.
    The first column is [B, T], or [B, T, outputs] for several outputs."""
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + seed)
    mask = draw_mask(rows, width, seed, generator)
    first = -normal(generator, rows, width).abs() - 0.05
    second = first + normal(generator, rows, width) * (0.1 if seed % 2 else 0.8)
    inputs = dict(zip(names, (first, second.clamp(max=-0.01), normal(generator, rows, width)), strict=True))
    if outputs > 1:
        inputs[names[0]] = normal(generator, rows, width, outputs)
    weights = torch.rand(rows, width, generator=generator, dtype=torch.float64).add(0.1).where(mask, 0.0)
    inputs = {name: short(x).to(dtype) for name, x in inputs.items()} | {"mask": mask}
    return LawExample(inputs, {} if extras is None else extras(*inputs.values()), short(weights).to(dtype))


def _suite(
    own: tuple[Law, ...],
    names: tuple[str, str, str],
    *,
    extras: Callable[..., dict[str, Any]] | None = None,
    reference: LossFn | None = None,
    dtype: torch.dtype = torch.float64,
    outputs: int = 1,
) -> Suite:
    """A suite of the laws of all losses, then `own`, then the comparison with a reference, on batches of these
    columns."""
    checked((dtype,))
    if reference is not None:
        text = "loss and gradient are those of the reference"
        own += (Law("reference", text, partial(_as_reference, reference)),)
    example = partial(make_example, names, extras, dtype, outputs=outputs)
    return Suite((*COMMON, *own), example, see(names, [] if extras is None else list(example(1, 1, 0).extras)))


def see(names: tuple[str, str, str], extras: Sequence[str] = ()) -> tuple[str, str, str]:
    """Lines of Python that show a loss, its gradient and its metrics on an example; {} is the loss."""
    arguments = ", ".join([f"{names[0]}.requires_grad_()", *names[1:], "mask", *(f"{x}={x}" for x in extras)])
    return (
        f"loss, metrics = {{}}({arguments})",
        "(weights * loss).sum().backward()",
        f"print(loss, {names[0]}.grad, metrics)",
    )


def check_policy_loss(
    loss_fn: LossFn,
    *,
    reinforce: str | None = "token",
    extras: Callable[..., dict[str, Any]] | None = None,
    reference: LossFn | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Check a policy loss: `laws.check_policy_loss(my_loss)`. Raises LawViolation for the first broken law.

    `loss_fn(log_probs, old_log_probs, advantages, mask)` returns the loss per token [B, T] and metrics; bind its
    scalars with functools.partial. The laws, on small batches with ragged rows, holes and empty rows: values outside
    the mask have no effect; loss and gradient are 0 there; only log_probs gets a gradient; the split into
    micro-batches, the order of rows and the width of padding change neither sum(weights * loss) nor its gradient;
    metrics of parts merge into those of the whole; arguments are unchanged; and at old == new the gradient is that of
    REINFORCE, -weights * advantages.

    Away from old == new these laws do not restrict a loss, for example its clip. A `reference`, a slow and plain loss
    of the same signature, fixes it: loss and gradient must equal its own on all batches.

    `reinforce="row"` restricts the last law to advantages that are equal along a row, for losses that average over the
    row; None turns it off. `extras(log_probs, old_log_probs, advantages, mask)` returns further keyword tensors [B, T]
    or [B] of the loss, which belong to its rows. `dtype` is that of the batches, and determines the tolerance: 1e-9 in
    float64, 1e-4 in float32, 2e-2 in bfloat16. Raises ValueError for other dtypes, and for another `reinforce`.
    """
    check_suite(loss_fn, policy_suite(reinforce=reinforce, extras=extras, reference=reference, dtype=dtype))


def policy_suite(
    *,
    reinforce: str | None = "token",
    extras: Callable[..., dict[str, Any]] | None = None,
    reference: LossFn | None = None,
    dtype: torch.dtype = torch.float64,
) -> Suite:
    """The laws of `check_policy_loss`, with its arguments."""
    if reinforce not in ("token", "row", None):
        raise ValueError(f"reinforce must be 'token', 'row' or None, got {reinforce!r}")
    own = ()
    if reinforce is not None:
        law = partial(_reinforce, by_row=reinforce == "row")
        way_out = "give reinforce=None" + (
            ', or reinforce="row" for advantages that are equal along a row' if reinforce == "token" else ""
        )
        text, by_row = "at old == new the gradient is -weights * advantages", partial(_reinforce, by_row=True)
        own = (Law("REINFORCE", text, law, way_out, by_row, "for advantages that are equal along a row it is"),)
    return _suite(own, POLICY, extras=extras, reference=reference, dtype=dtype)


def check_value_loss(
    loss_fn: LossFn,
    *,
    squared: bool = True,
    outputs: int = 1,
    reference: LossFn | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Check a value loss: `laws.check_value_loss(my_loss)`. Raises LawViolation for the first broken law.

    `loss_fn(values, old_values, returns, mask)` returns the loss per token [B, T] and metrics. The laws are those of
    `check_policy_loss`, with its `reference` and `dtype`, except for the last: at old == new the gradient is weights *
    (values - returns), as for half the squared error (`squared=False` turns it off).

    `outputs` above 1 is the number K of a head's outputs: `loss_fn(outputs, old_values, returns, mask)` then takes
    outputs [B, T, K], and the last law does not apply. Raises ValueError for a number below 1.
    """
    check_suite(loss_fn, value_suite(squared=squared, outputs=outputs, reference=reference, dtype=dtype))


def value_suite(
    *,
    squared: bool = True,
    outputs: int = 1,
    reference: LossFn | None = None,
    dtype: torch.dtype = torch.float64,
) -> Suite:
    """The laws of `check_value_loss`, with its arguments."""
    if outputs < 1:
        raise ValueError(f"outputs must be 1 or more, got {outputs}")
    own = ()
    if squared and outputs == 1:
        statement = "at old == new the gradient is weights * (values - returns)"
        own = (Law("squared error", statement, _error_gradient, "give squared=False"),)
    names = VALUES if outputs == 1 else OUTPUTS
    return _suite(own, names, reference=reference, dtype=dtype, outputs=outputs)
