"""Laws of token losses: (weights * loss).sum() must not depend on how a batch is cut, padded and ordered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fppo.laws import _rows
from fppo.laws._kernels import TOLERANCES, checked, grads, words
from fppo.laws._rows import BatchOutcome, metrics_differ
from fppo.laws._search import Breach, Law, LawExample, Suite, changed, check_suite, differ, draw_mask, normal, short
from fppo.metrics import Max, Mean, Metric, Min, Sum, merge

LossFn = Callable[..., tuple[Tensor, Mapping[str, Metric]]]
POLICY = ("log_probs", "old_log_probs", "advantages")
VALUES = ("values", "old_values", "returns")
OUTPUTS = ("outputs", "old_values", "returns")
TOKENS = 6  # least tokens of an example to judge: fewer may all be clipped, or equal, by chance


def _call(fn: LossFn, example: LawExample) -> tuple[Tensor, Mapping[str, Metric]]:
    return fn(*example.inputs.values(), **example.extras)


def _total(fn: LossFn, example: LawExample) -> Tensor:
    loss, _ = _call(fn, example)
    return (example.weights * loss).sum()


def _evaluate(fn: LossFn, example: LawExample) -> BatchOutcome:
    """The loss [B, T], the gradient of (weights * loss).sum() by the first input, and metrics."""
    name = next(iter(example.inputs))
    leaf = example.inputs[name].detach().clone().requires_grad_()
    loss, metrics = _call(fn, example.put(**{name: leaf}))
    (grad,) = grads((example.weights * loss).sum(), [leaf])
    return BatchOutcome(
        {"the loss": loss.detach(), "the gradient": grad}, metrics=metrics, tolerance=TOLERANCES[grad.dtype]
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


def _precision(fn: LossFn, example: LawExample, generator: torch.Generator) -> str | None:
    dtype, (loss, grad) = example.weights.dtype, _evaluate(fn, example).rows.values()
    if loss.dtype != dtype:
        return f"{words(dtype)} arguments gave a loss in {words(loss.dtype)}"
    if dtype != torch.float64 or example.mask.sum() < TOKENS or not grad.any():
        return None
    rounded = _evaluate(fn, example.map(lambda x: x.float().double() if x.is_floating_point() else x))
    if torch.equal(loss, rounded.rows["the loss"]):  # the weights are rounded too, so the gradient differs in any case
        return "float64 arguments gave the same loss, to the bit, as their float32 roundings: it computes in float32"
    return None


def _gradient(fn: LossFn, example: LawExample, generator: torch.Generator) -> Breach | None:
    first, second = (name for name in list(example.inputs)[:2])
    if example.inputs[first].shape == example.inputs[second].shape:
        example = example.put(**{second: example.inputs[first].clone()})
    if example.mask.sum() < TOKENS or _evaluate(fn, example).rows["the gradient"].any():
        return None
    return Breach(
        f"no gradient reaches {first}, although {second} are equal to them: nothing would be learned", example
    )


def _all_masked(fn: LossFn, example: LawExample, generator: torch.Generator) -> Breach | None:
    empty = example.put(mask=torch.zeros_like(example.mask))
    for name, x in _evaluate(fn, empty).rows.items():
        if reason := differ(f"{name} of an empty mask", torch.zeros_like(x), x, 0.0):
            return Breach(reason, empty)
    return None


def _micro_batches(fn: LossFn, example: LawExample, generator: torch.Generator) -> str | None:
    (loss, grad), rows = _evaluate(fn, example).rows.values(), len(example.mask)
    total, within = (example.weights * loss).sum(), TOLERANCES[example.weights.dtype]
    for size in range(1, rows):
        pieces = [_evaluate(fn, example.map(lambda x, i=i, n=size: x[i : i + n])) for i in range(0, rows, size)]
        joined = {name: torch.cat([piece.rows[name] for piece in pieces]) for name in pieces[0].rows}
        of_pieces = (example.weights * joined["the loss"]).sum()
        reason = differ("sum(weights * loss)", total, of_pieces, within) or differ(
            "the gradient", grad, joined["the gradient"], within
        )
        if reason:
            return f"in micro-batches of {size}, {reason}, as in the whole batch"
    return None


def _metrics_add(fn: LossFn, example: LawExample, generator: torch.Generator) -> str | None:
    whole = _call(fn, example)[1]
    by_row = [_call(fn, example.map(lambda x, i=i: x[i : i + 1]))[1] for i in range(len(example.mask))]
    reason = metrics_differ(whole, merge(*by_row), TOLERANCES[example.weights.dtype])
    return reason and f"merged over single rows, {reason}, as in the whole batch"


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
    grad = _evaluate(fn, example).rows["the gradient"]
    return differ("the gradient at old == new", expected, grad, TOLERANCES[expected.dtype])


COMMON = (
    Law("per token", "it returns (loss [B, T], metrics that are Mean, Sum, Max or Min, without gradient)", _per_token),
    Law("gradient", "the loss has a gradient by its first argument", _gradient),
    Law("precision", "it computes in the dtype of its arguments", _precision, "give dtype=torch.float32"),
    _rows.purity(_evaluate),
    Law("empty mask", "with nothing in the mask, loss and gradient are 0", _all_masked),
    _rows.masked_garbage(_evaluate, partial(_rows.inside, _evaluate)),
    _rows.zero_outside(_evaluate, "loss and gradient are exactly 0 where the mask is False"),
    _rows.constants(_total),
    Law("micro-batches", "the sum of weights * loss and its gradient do not depend on the split", _micro_batches),
    _rows.row_order(_evaluate, "loss, gradient and metrics go with their rows"),
    _rows.padding_width(_evaluate, _evaluate),
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
    `names` are those of the columns: new ones, old ones, and advantages or returns. `extras` makes further keywords
    from all columns. The first column is [B, T], or [B, T, outputs] for several outputs."""
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
    """The laws of all losses, then `own`, then the comparison with a reference, on batches by `make_example` with these
    columns (`names`) and `extras`."""
    checked((dtype,))
    if reference is not None:
        text = "loss and gradient are those of the reference"
        own += (Law("reference", text, partial(_rows.reference_differs, _evaluate, reference)),)
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

    `loss_fn(values, old_values, returns, mask)` returns the loss per token [B, T] and metrics. The laws, `reference`
    and `dtype` are those of `check_policy_loss`: masks, padding, order of rows, micro-batches and metrics. Only the
    last law is another one: at values == old_values the gradient of sum(weights * loss) is weights * (values -
    returns), as for half the squared error. The weights are those that a batch gives its tokens. `squared=False` turns
    this law off.

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
