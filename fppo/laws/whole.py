"""Laws of whole losses: one number for each micro-batch, whose sum is the loss of the mini-batch.

Faults of normalisation live here: a loss per token has none, since its weights are counted before the rows are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from fppo.laws import _rows
from fppo.laws._kernels import TOLERANCES, checked, grads, words
from fppo.laws._rows import BatchOutcome, outcomes_differ
from fppo.laws._search import Breach, Law, LawExample, Suite, changed, check_suite, differ, fn_name, nothing
from fppo.laws.losses import POLICY, VALUES, LossFn, make_example
from fppo.losses import count_totals, loss_weights
from fppo.shapes import Mask, Scalar, Tokens

NEAR = 1e-6  # the effect on a loss of a small number in the reference's denominator, or of a step in float32
WholeLoss = Callable[..., Tensor]
SIZES = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (4, 3), (4, 5), (6, 7))


def _outcome(loss: Tensor, grad: Tensor) -> BatchOutcome:
    """The outcome of a whole loss: the loss, 0-d, and its gradient [B, T] by the first input."""
    return BatchOutcome({"the gradient": grad}, {"the loss": loss.to(grad)}, tolerance=TOLERANCES[grad.dtype])


def whole_loss(loss_fn: LossFn, mode: str, *, horizon: Scalar | None = None) -> WholeLoss:
    """Make a whole loss, 0-d, of a token loss: the sum of a mode's weights times the loss.

    `loss_fn(log_probs, old_log_probs, advantages, mask)` is a policy loss of `fppo.losses` or one's own, or a value
    loss of values, old values, returns and a mask. `mode` and `horizon` are those of `losses.loss_weights`. The result
    is the plain definition, as a reference for another loss:
    `laws.verdicts(my_loss, kind="whole_loss", reference=laws.whole_loss(losses.ppo_clip, "token-mean"))`.
    """

    def whole_of(first: Tokens, second: Tokens, third: Tokens, mask: Mask, *, pieces: int, whole: Mask) -> Tensor:
        weights = loss_weights(mask, mode, totals=count_totals(whole), horizon=horizon).to(first)
        return (weights * loss_fn(first, second, third, mask)[0]).sum()

    whole_of.__name__ = f"{fn_name(loss_fn)}, {mode}"
    return whole_of


def _in_pieces(fn: WholeLoss, example: LawExample, cuts: Sequence[Tensor], *, trim: bool = False) -> BatchOutcome:
    """Sum the losses of the micro-batches `cuts`, and place their gradients; `trim` removes columns that are outside
    the mask in all rows of a micro-batch."""
    mask, total = example.mask, example.weights.new_zeros(())
    grad = torch.zeros_like(next(iter(example.inputs.values())))
    for rows in cuts:
        part = mask[rows]
        width = int(part.any(0).nonzero().max()) + 1 if trim and part.any() else mask.shape[1]
        first, *others = (x[rows][:, :width] for x in example.inputs.values())
        leaf = first.detach().clone().requires_grad_()
        loss = fn(leaf, *others, pieces=len(cuts), whole=mask)
        grad[rows, :width] = grads(loss, [leaf])[0]
        total = total + loss.detach()
    return _outcome(total, grad)


def _evaluate(fn: WholeLoss, example: LawExample) -> BatchOutcome:
    return _in_pieces(fn, example, [torch.arange(len(example.mask))])


def _gradient(fn: WholeLoss, example: LawExample) -> Tensor:
    """The gradient of the loss by the first input, where the mask is True; 0 elsewhere."""
    return _evaluate(fn, example).rows["the gradient"].where(example.mask, 0.0)


def _total(fn: WholeLoss, example: LawExample) -> Tensor:
    return fn(*example.inputs.values(), pieces=1, whole=example.mask)


def _filled(example: LawExample) -> bool:
    """Whether every row has a token in the mask; rows without tokens have a law of their own."""
    return bool(example.mask.any(1).all())


def _of_tokens(fn: WholeLoss, example: LawExample) -> BatchOutcome:
    """The outcome; without results if no token is in the mask, since a mean of none is no number."""
    return _evaluate(fn, example) if example.mask.any() else BatchOutcome({})


def _of_filled(fn: WholeLoss, example: LawExample) -> BatchOutcome:
    """The outcome; without results if a row has no token."""
    return _evaluate(fn, example) if _filled(example) else BatchOutcome({})


def _number(fn: WholeLoss, example: LawExample, generator: torch.Generator) -> str | None:
    inputs = list(example.inputs.values())
    loss = fn(inputs[0].requires_grad_(), *inputs[1:], pieces=1, whole=example.mask)
    if not isinstance(loss, Tensor) or loss.dim():
        got = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        return f"it returned {got}, expected a 0-d tensor"
    if loss.dtype != example.weights.dtype:
        return f"{words(example.weights.dtype)} arguments gave a loss in {words(loss.dtype)}"
    return None if loss.isfinite() or not _filled(example) else f"the loss is {loss.item()}"


def _all_masked(fn: WholeLoss, example: LawExample, generator: torch.Generator) -> Breach | None:
    rows, width = example.mask.shape
    more = example.map(lambda x: torch.cat([x, x])).put(mask=torch.zeros(2 * rows, width, dtype=torch.bool))
    more.mask[rows:] = example.mask
    if not example.mask.any():
        return None
    empty, _ = torch.arange(2 * rows).chunk(2)
    inputs = [x[empty] for x in more.inputs.values()]
    leaf = inputs[0].clone().requires_grad_()
    loss = fn(leaf, *inputs[1:], pieces=2, whole=more.mask)
    (grad,) = grads(loss, [leaf])
    zero = _outcome(torch.zeros_like(loss), torch.zeros_like(grad))
    reason = outcomes_differ(zero, _outcome(loss.detach(), grad), 0.0)
    return changed(reason, "of its first half as a micro-batch ", more)


def _cuts(rows: int, *, even: bool) -> Iterator[list[Tensor]]:
    """Cuts of the rows into micro-batches: of one size (`even`), or the first of one row and the rest."""
    numbers = torch.arange(rows)
    if even:
        yield from (list(numbers.split(size)) for size in range(1, rows) if rows % size == 0)
    else:
        yield from ([numbers[:size], numbers[size:]] for size in range(1, rows) if 2 * size != rows)


def _micro_batches(
    fn: WholeLoss, example: LawExample, generator: torch.Generator, *, even: bool, trim: bool = False
) -> str | None:
    if not _filled(example):
        return None
    one = _evaluate(fn, example)
    for cuts in _cuts(len(example.mask), even=even):
        if reason := outcomes_differ(one, _in_pieces(fn, example, cuts, trim=trim)):
            sizes = " and ".join(str(len(cut)) for cut in cuts)
            padded = ", each padded to its own longest row" if trim else ""
            return f"in micro-batches of {sizes} rows{padded}, {reason}, as in the whole batch"
    return None


def _empty_rows(fn: WholeLoss, example: LawExample, generator: torch.Generator) -> Breach | None:
    if not _filled(example):
        return None
    more = example.map(lambda x: torch.cat([x, torch.zeros_like(x[:2])]))
    rows = len(example.mask)
    reason = outcomes_differ(_evaluate(fn, example), _evaluate(fn, more).map(lambda x: x[:rows]))
    return changed(reason, "with two rows more that have no token in the mask, ", more)


def _reinforce(
    fn: WholeLoss, example: LawExample, generator: torch.Generator, *, by_row: bool = False, least: float = 0.0
) -> Breach | None:
    """Check that at old == new the gradient is minus a positive weight times the advantage, for any advantages, to the
    tolerance of the dtype or to `least`."""
    log_probs, _, advantages, _ = example.inputs.values()
    if by_row:
        advantages = advantages[:, :1].expand_as(advantages).clone()
    example = example.put(old_log_probs=log_probs.clone(), advantages=advantages)
    weights = -_gradient(fn, example.put(advantages=torch.ones_like(advantages)))
    return _weighted(fn, example, weights, -advantages, "for advantages of 1 a token's gradient is not below 0", least)


def _squared_error(fn: WholeLoss, example: LawExample, generator: torch.Generator) -> Breach | None:
    """Check that at old == new the gradient is a positive weight times the error, for any returns."""
    values, _, returns, _ = example.inputs.values()
    example = example.put(old_values=values.clone())
    weights = _gradient(fn, example.put(returns=values - 1.0))
    return _weighted(fn, example, weights, values - returns, "for errors of 1 a token's gradient is not above 0")


def _weighted(
    fn: WholeLoss, example: LawExample, weights: Tensor, errors: Tensor, fault: str, least: float = 0.0
) -> Breach | None:
    """Describe how the gradient [B, T] differs from weights * errors, or that a weight is not above 0, as `fault`
    says; None if neither is so."""
    if _filled(example) and not (weights[example.mask] > 0).all():
        return Breach(fault, example)
    expected, actual = (weights * errors).where(example.mask, 0.0), _gradient(fn, example)
    return changed(
        differ("the gradient at old == new", expected, actual, max(TOLERANCES[actual.dtype], least)), "", example
    )


_REINFORCE_TEXT = "at old == new the gradient is -weight * advantage, with weights above 0 that no advantage changes"
_ERROR_TEXT = "at old == new the gradient is weight * (value - return), with weights above 0 that no return changes"
_EVEN_TEXT = "losses and gradients of micro-batches of one size add up to those of the whole"
_TRIM_TEXT = "they do if every micro-batch is padded to its own longest row"
LAWS = (
    Law("number", "it returns a finite 0-d tensor in the dtype of its arguments", _number),
    _rows.purity(_evaluate),
    Law("empty micro-batch", "a micro-batch with nothing in the mask gives 0 and a gradient of 0", _all_masked),
    _rows.masked_garbage(_of_tokens, _of_tokens),
    _rows.constants(_total),
    Law("micro-batches", _EVEN_TEXT, partial(_micro_batches, even=True)),
    Law("width of micro-batches", _TRIM_TEXT, partial(_micro_batches, even=True, trim=True)),
    Law(
        "uneven micro-batches",
        "losses and gradients of micro-batches of different sizes add up to those of the whole",
        partial(_micro_batches, even=False),
        mild=nothing,
        note="a trainer whose micro-batches all have one size never meets it",
    ),
    _rows.row_order(_evaluate, "the loss does not depend on the order of rows, and the gradient goes with them"),
    _rows.padding_width(_evaluate, _evaluate),
    Law(
        "rows without tokens",
        "rows of which nothing is in the mask change nothing",
        _empty_rows,
        mild=nothing,
        note="a convention: such rows count in the number of rows",
    ),
)
POLICY_LAW = Law(
    "REINFORCE",
    _REINFORCE_TEXT,
    _reinforce,
    mild=partial(_reinforce, by_row=True, least=NEAR),
    note=f"to {NEAR}, for advantages that are equal along a row, it is",
)
VALUE_LAW = Law("squared error", _ERROR_TEXT, _squared_error)


def whole_suite(
    *, reference: WholeLoss | None = None, dtype: torch.dtype = torch.float64, values: bool = False
) -> Suite:
    """The laws of `check_whole_loss`, with its arguments."""
    checked((dtype,))
    names = VALUES if values else POLICY
    laws = (*LAWS, VALUE_LAW if values else POLICY_LAW)
    if reference is not None:
        text = "loss and gradient are those of the reference"
        strict = partial(_rows.reference_differs, _of_filled, reference)
        mild, note = partial(strict, tolerance=NEAR), f"they agree to {NEAR}"
        laws += (Law("reference", text, strict, mild=mild, note=note),)
    see = (
        f"loss = {{}}({names[0]}.requires_grad_(), {', '.join(names[1:])}, mask, pieces=1, whole=mask)",
        "loss.backward()",
        f"print(loss, {names[0]}.grad)",
    )
    return Suite(laws, partial(make_example, names, None, dtype), see, SIZES)


def check_whole_loss(
    loss_fn: WholeLoss,
    *,
    reference: WholeLoss | None = None,
    dtype: torch.dtype = torch.float64,
    values: bool = False,
) -> None:
    """Check a whole loss: `laws.check_whole_loss(my_loss)`. Raises LawViolation for the first broken law.

    `loss_fn(log_probs, old_log_probs, advantages, mask, *, pieces, whole)` takes a micro-batch, tensors [B, T], and
    returns its share of the loss, 0-d. A trainer adds up losses and gradients of its micro-batches: `pieces` is how
    many there are, `whole` bool [N, T] the mask of the mini-batch. Both are the same for all of them.

    The sum over micro-batches of any size is the loss of the whole, in any order of rows and at any width of padding;
    garbage outside the mask, rows without tokens and empty micro-batches change nothing; only log_probs gets a
    gradient, which at old == new is a positive weight times -advantages. With a `reference` (as `laws.whole_loss` makes
    one of a loss per token), loss and gradient are the reference's. `dtype` is that of the batches.

    With `values` it is a value loss, of values, old values, returns and a mask: the gradient at old == new then is a
    positive weight times (values - returns).
    """
    check_suite(loss_fn, whole_suite(reference=reference, dtype=dtype, values=values))
