"""Laws of advantage estimators and of whitening."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fppo.laws import _rows
from fppo.laws._kernels import TOLERANCES, checked, words
from fppo.laws._rows import FINITE_NOTE, BatchOutcome, outcomes_differ
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
    normal,
    nothing,
    short,
)

Tensors = tuple[Tensor, ...]
Results = Callable[[Callable, LawExample], Tensors]
NEAR = 1e-5  # the effect on an advantage of a small number in the reference's denominator
LARGE = 16  # rows of the largest group of equal rewards in float32
ROUNDING = 1e-3  # advantages below this are rounding errors


def call(fn: Callable, example: LawExample) -> Tensors:
    """Run `fn` on the example; its results as a tuple of [B, T]."""
    result = fn(*example.inputs.values())
    return (result,) if isinstance(result, Tensor) else tuple(result)


def outcome_of(results: Tensors) -> BatchOutcome:
    """Name the results of an estimator."""
    names = ("the advantages", "the returns") if len(results) > 1 else ("the result",)
    return BatchOutcome(dict(zip(names, results, strict=True)))


def _shape(results: Results, fn: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    dtype = example.weights.dtype
    for result in results(fn, example):
        if result.shape != example.mask.shape:
            return f"it returned a shape {list(result.shape)}, expected [B, T] = {list(example.mask.shape)}"
        if not result.isfinite().all():
            return "the result is not finite"
        if result.dtype != dtype:
            way_out = "; if that is meant, give dtype=torch.float32" if result.dtype == torch.float32 else ""
            return f"{words(dtype)} arguments gave {words(result.dtype)}: keep their precision{way_out}"
    return None


def common(results: Results = call) -> tuple[Law, ...]:
    """The laws of all estimators; `results(fn, example)` are the results of a call."""

    def run(fn: Callable, example: LawExample) -> BatchOutcome:
        return outcome_of(results(fn, example))

    within, note = partial(_rows.inside, run), f"{FINITE_NOTE} where the mask is True"
    outside = _rows.zero_outside(run, "the result is exactly 0 where the mask is False")
    return (
        Law("shape", "it gives finite [B, T] in the dtype of its arguments", partial(_shape, results)),
        _rows.purity(run),
        _rows.masked_garbage(run, within, note),
        outside._replace(mild=nothing, note="callers that cut it to the mask get 0"),
        _rows.row_order(run, "the result goes with its rows"),
        _rows.padding_width(run, within, note),
    )


def _equal_rewards(fn: Callable, example: LawExample, generator: torch.Generator) -> Breach | None:
    groups = torch.arange(len(example.mask)).div(2, rounding_mode="floor")
    if len(groups) < 2 or not example.mask.any(1).all():
        return None
    groups = groups.clamp(max=len(groups) // 2 - 1)  # no group of one row
    rounded = (6 * groups + 1).double() / 10  # the mean of three of these is rounded
    scores = rounded.to(example.inputs["scores"])
    example = example.put(scores=scores, groups=groups)
    advantages = call(fn, example)[0]
    return changed(differ("the advantage", torch.zeros_like(advantages), advantages, 0.0), "", example)


def _equal_in_float32(fn: Callable, example: LawExample, generator: torch.Generator) -> Breach | None:
    """Check that equal rewards k / 10 in one group of up to `LARGE` rows give about 0 in float32."""
    if len(example.mask) > 1:
        return None  # groups of every size are tried once for each width and seed
    width = example.mask.shape[1]
    for rows in range(2, LARGE + 1):
        for tenths in (1, 3, 7, 9):
            mask = torch.ones(rows, width, dtype=torch.bool)
            inputs = {"scores": torch.full((rows,), tenths / 10), "mask": mask, "groups": torch.zeros(rows).long()}
            equal = LawExample(inputs, {}, mask.float())
            largest = call(fn, equal)[0].abs().max().item()
            if largest > ROUNDING:
                reason = (
                    f"in float32 {rows} equal rewards of {tenths / 10} give the advantage {largest:.4g}, expected 0"
                )
                return Breach(reason, equal)
    return None


def _higher_scores(fn: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    scores, mask, groups = example.inputs.values()
    present, advantages = mask.any(1), call(fn, example)[0]
    means = advantages.sum(1) / mask.sum(1).clamp(min=1)
    better = (scores[:, None] > scores) & (groups[:, None] == groups) & present[:, None] & present
    wrong = (better & (means[:, None] < means - TOLERANCES[means.dtype])).nonzero().tolist()
    if not wrong:
        return None
    high, low = wrong[0]
    return (
        f"rows {high} and {low} are of one group, with the scores {scores[high]:.4g} and {scores[low]:.4g}, but the "
        f"means of their advantages are {means[high]:.4g} and {means[low]:.4g}"
    )


def _unequal_rewards(fn: Callable, example: LawExample, generator: torch.Generator) -> Breach | None:
    present, groups = example.mask.any(1), example.inputs["groups"]
    if (groups[present].bincount() < 2).all():
        return None
    scores = ((7 * torch.arange(len(groups))).double() / 10).to(example.inputs["scores"])
    example = example.put(scores=scores)
    return None if call(fn, example)[0].any() else Breach("all advantages are 0, although all scores differ", example)


def _alone(fn: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    try:
        call(fn, example)
    except Exception as error:
        with contextlib.suppress(Exception):  # if this raises too, groups of one row are not the reason
            call(fn, example.map(lambda x: torch.cat([x, x])))
            return f"it raised {type(error).__name__}: {error}"
    return None


def _group_names(fn: Callable, example: LawExample, generator: torch.Generator) -> Breach | None:
    renamed = example.put(groups=1000 - 7 * example.inputs["groups"])
    reason = outcomes_differ(outcome_of(call(fn, example)), outcome_of(call(fn, renamed)))
    return changed(reason, "with these names of the groups, ", renamed)


def as_reference(reference: Callable, fn: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    """Describe how the results of `fn` differ from those of the `reference`; None if they do not."""
    expected, actual = call(reference, example), call(fn, example)
    both = min(len(expected), len(actual))  # one of them may return advantages alone
    reason = outcomes_differ(outcome_of(expected[:both]), outcome_of(actual[:both]))
    return reason and f"{reason}, as of {fn_name(reference)}"


def _near_reference(reference: Callable, fn: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    """Describe how advantages differ from the reference's by more than a small number in a denominator explains, in
    groups of at least two rows that all have tokens; None if they do not. `generator` is not used; all laws take
    one."""
    _, counts = example.inputs["groups"].unique(return_counts=True)
    if not example.mask.any(1).all() or (counts < 2).any():
        return None
    reason = differ("the result", call(reference, example)[0], call(fn, example)[0], NEAR)
    return reason and f"{reason}, as of {fn_name(reference)}"


def _grouped_example(group_rows: int, dtype: torch.dtype, rows: int, width: int, seed: int) -> LawExample:
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + seed)
    rows = max(rows, group_rows)
    mask = draw_mask(rows, width, seed % 2, generator)
    count = max(1, rows // max(group_rows, 1 + seed % 2))
    groups = (torch.arange(rows) % count)[torch.randperm(rows, generator=generator)]
    if seed % 3 == 2:  # a row without tokens, in one of the groups
        mask = torch.cat([torch.zeros_like(mask[:1]), mask])
        groups = torch.cat([groups[:1], groups])
    scores = torch.randint(-2, 3, (len(groups),), generator=generator).to(dtype) * 0.7
    return LawExample({"scores": scores, "mask": mask, "groups": groups}, {}, mask.to(dtype))


def check_advantages(
    estimator: Callable,
    *,
    equal_rewards: bool = True,
    unequal_rewards: bool = True,
    higher_scores: bool = True,
    group_rows: int = 1,
    reference: Callable | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Check a group estimator: `laws.check_advantages(my_estimator)`. Raises LawViolation for the first broken law.

    `estimator(scores [B], mask [B, T], groups [B])` returns Advantages, or advantages [B, T] alone. The laws: rows
    without tokens have no effect, whatever their score; the result is 0 outside the mask, follows a permutation of
    rows, and depends neither on padding nor on the ids of groups. Three laws can be turned off: equal rewards in a
    group of two or more rows give exactly 0 (`equal_rewards`); rewards that all differ do not all give 0
    (`unequal_rewards`); and of two rows of a group the one with the higher score has no lower advantage, averaged over
    its tokens (`higher_scores`).

    These laws leave factors and baselines free: n - 1 or n in the standard deviation, RLOO's n / (n - 1), weights by
    length. A `reference`, a slow and plain estimator of the same signature, fixes them: results must equal its own on
    all batches. Every group has at least `group_rows` rows with tokens. `dtype` is that of the scores, and determines
    the tolerance (see `check_policy_loss`).
    """
    suite = advantages_suite(
        equal_rewards=equal_rewards,
        unequal_rewards=unequal_rewards,
        higher_scores=higher_scores,
        group_rows=group_rows,
        reference=reference,
        dtype=dtype,
    )
    check_suite(estimator, suite)


def advantages_suite(
    *,
    equal_rewards: bool = True,
    unequal_rewards: bool = True,
    higher_scores: bool = True,
    group_rows: int = 1,
    reference: Callable | None = None,
    dtype: torch.dtype = torch.float64,
) -> Suite:
    """The laws of `check_advantages`, with its arguments."""
    laws = (*common(), Law("group names", "ids of groups are names, in any order", _group_names))
    if group_rows == 1:
        laws = (Law("groups of one", "a group may have one row", _alone, "give group_rows=2"), *laws)
    if equal_rewards:
        text = "equal rewards in a group give exactly 0"
        mild, note = _equal_in_float32, f"in float32, in groups of up to {LARGE} rows, it stays below {ROUNDING}"
        laws += (Law("equal rewards", text, _equal_rewards, "give equal_rewards=False", mild, note),)
    if unequal_rewards:
        text = "rewards that all differ do not all give 0"
        laws += (Law("unequal rewards", text, _unequal_rewards, "give unequal_rewards=False"),)
    if higher_scores:
        text = "of two rows of a group, that with the higher score has no lower advantage"
        laws += (Law("higher scores", text, _higher_scores, "give higher_scores=False"),)
    if reference is not None:
        strict, mild = (partial(x, reference) for x in (as_reference, _near_reference))
        note = f"to {NEAR} the advantages agree in groups of two rows or more that all have tokens"
        laws += (Law("reference", "the results are those of the reference", strict, mild=mild, note=note),)
    (dtype,) = checked((dtype,))
    return Suite(laws, partial(_grouped_example, group_rows, dtype), ("print({}(scores, mask, groups))",))


def token_example(
    names: tuple[str, ...], rows: int, width: int, seed: int, dtype: torch.dtype = torch.float64
) -> LawExample:
    """Draw columns [B, T] by their names, with "weights" at least 0, and a mask by the seed."""
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + seed)
    mask = draw_mask(rows, width, seed, generator)
    inputs = {name: short(normal(generator, rows, width)).to(dtype) for name in names}
    inputs = {name: x.abs() if name == "weights" else x for name, x in inputs.items()}
    return LawExample({**inputs, "mask": mask}, {}, mask.to(dtype))


class _Whitening(NamedTuple):
    """The specification of a whitening: whether it shifts the mean to 0, and what it adds to the variance."""

    shift_mean: bool
    eps: float

    def about_zero(self, fn: Callable, example: LawExample) -> tuple[Tensor, Tensor]:
        """The result [N] at the tokens of the mask, minus the mean that it should have; and the variance it should
        have."""
        x, result = example.inputs["x"][example.mask], call(fn, example)[0][example.mask]
        variance = x.var() if len(x) > 1 else x.new_zeros(())
        return result if self.shift_mean else result - x.mean(), variance / (variance + self.eps)


def _moments(kind: _Whitening, fn: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    if example.mask.sum() < 2:
        return None
    x, variance = kind.about_zero(fn, example)
    what = "the mean" if kind.shift_mean else "the mean, less that of x,"
    return differ(what, torch.zeros(()), x.mean()) or differ("the variance", variance, x.var())


def _shift_and_scale(kind: _Whitening, fn: Callable, example: LawExample, generator: torch.Generator) -> Breach | None:
    if not example.mask.any():
        return None
    plain, variance = kind.about_zero(fn, example)
    for shift, scale in ((100.0, 1.0), (0.0, 1e-6), (0.0, 1e6)):
        moved = example.put(x=example.inputs["x"] * scale + shift)
        result, other = kind.about_zero(fn, moved)
        ratio = (other / variance).sqrt() if kind.eps and len(plain) > 1 else 1.0
        if reason := differ("over the mask, the result", plain * ratio, result, 1e-9 if kind.shift_mean else 1e-7):
            return Breach(f"for {scale} * x + {shift}, which x is here, {reason}", moved)
    return None


def _constant(kind: _Whitening, fn: Callable, example: LawExample, generator: torch.Generator) -> Breach | None:
    example = example.put(x=torch.full_like(example.inputs["x"], 0.1))
    result, _ = kind.about_zero(fn, example)
    exact = kind.shift_mean and not kind.eps  # eps limits the growth of rounding errors
    return changed(differ("the result", torch.zeros_like(result), result, 0.0 if exact else 1e-9), "", example)


def check_whiten(whiten: Callable, *, shift_mean: bool = True, eps: float = 0.0) -> None:
    """Check a whitening `whiten(x [B, T], mask)`. Raises LawViolation for the first broken law.

    The laws: mean 0 and (unbiased) variance 1 over the mask; shifting and scaling have no effect; equal numbers give
    exactly 0; and the laws of `check_advantages` about values outside the mask, row order, padding and purity. With
    `shift_mean=False`, for a whitening that keeps the mean of `x`, the laws hold for the result minus that mean. `eps`
    is the number that the whitening adds to the variance, as 1e-8 in (x - mean) * rsqrt(variance + 1e-8); the result's
    variance is then variance / (variance + eps).
    """
    check_suite(whiten, whiten_suite(shift_mean=shift_mean, eps=eps))


def whiten_suite(*, shift_mean: bool = True, eps: float = 0.0) -> Suite:
    """The laws of `check_whiten`, with its arguments."""
    kind = _Whitening(shift_mean, eps)
    way_out = "give shift_mean=False if the mean is kept, eps=... for what is added to the variance"
    laws = (
        *common(),
        Law("mean and variance", "over the mask the mean is 0 and the variance 1", partial(_moments, kind), way_out),
        Law("shift and scale", "shifting and scaling change nothing", partial(_shift_and_scale, kind), way_out),
        Law("equal numbers", "equal numbers give exactly 0", partial(_constant, kind), way_out),
    )
    return Suite(laws, partial(token_example, ("x",)), ("print({}(x, mask))",))
