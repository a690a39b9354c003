"""Laws of advantage estimators and of whitening."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fppo.laws._kernels import apart, checked, place, words
from fppo.laws._search import SIZES, Example, Law, check, differ, draw_mask, impure, normal, spoil, widen

Tensors = tuple[Tensor, ...]


def _call(fn: Callable, example: Example) -> Tensors:
    """What `fn` returns for the example's inputs, as a tuple of [B, T]."""
    result = fn(*example.inputs.values())
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _results_differ(expected: Tensors, actual: Tensors, tolerance: float = 1e-9) -> str | None:
    names = ("the advantages", "the returns") if len(expected) > 1 else ("the result",)
    for name, a, b in zip(names, expected, actual, strict=True):
        if reason := differ(name, a, b, tolerance):
            return reason
    return None


def _shape(fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    leaves = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in example.inputs.items()}
    for result in _call(fn, example.put(**leaves)):
        if result.shape != example.mask.shape:
            return f"it returned a shape {list(result.shape)}, expected [B, T] = {list(example.mask.shape)}"
        if result.requires_grad:
            return "a gradient passes through it; detach the arguments"
        if not result.isfinite().all():
            return "the result is not finite"
        if result.dtype != torch.float64:
            return f"float64 arguments gave {result.dtype}"
    return None


def _purity(fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    return impure(example, lambda: _call(fn, example), partial(_results_differ, tolerance=0.0))


def _masked_garbage(fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    mask, plain = example.mask, _call(fn, example)
    for kind, garbage in (("nan", "NaN"), ("mixed", "NaN, inf or 1e300")):
        dirty = {
            name: spoil(x, ~mask if x.dim() == 2 else ~mask.any(1), generator, kind)
            for name, x in example.inputs.items()
            if x.is_floating_point()
        }
        if reason := _results_differ(plain, _call(fn, example.put(**dirty)), 0.0):
            return f"with {garbage} where the mask is False, {reason}"
    return None


def _zero_outside(fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    results = _call(fn, example)
    outside = tuple(x.where(~example.mask, 0.0) for x in results)
    reason = _results_differ(tuple(torch.zeros_like(x) for x in results), outside, 0.0)
    return reason and f"outside the mask {reason}"


def _row_order(fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    order = torch.randperm(len(example.mask), generator=generator)
    expected = tuple(x[order] for x in _call(fn, example))
    reason = _results_differ(expected, _call(fn, example.map(lambda x: x[order])))
    return reason and f"with the rows in the order {order.tolist()}, {reason}"


def _padding(fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    width = example.mask.shape[1]
    for columns in (1, 3):
        wide = _call(fn, example.map(partial(widen, columns=columns)))
        if reason := _results_differ(_call(fn, example), tuple(x[:, :width] for x in wide)):
            return f"with {columns} more columns of padding, {reason}"
    return None


_COMMON = (
    Law("shape", "it gives finite [B, T] in the dtype of its arguments, without gradient", _shape),
    Law("purity", "arguments stay as they are, and equal arguments give equal bits", _purity),
    Law("masked garbage", "what stands where the mask is False changes no bit", _masked_garbage),
    Law("zero outside the mask", "the result is exactly 0 where the mask is False", _zero_outside),
    Law("row order", "the result goes with its rows", _row_order),
    Law("padding width", "columns outside the mask change nothing", _padding),
)


def _equal_rewards(fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    groups = torch.arange(len(example.mask)).div(2, rounding_mode="floor")
    if len(groups) < 2 or not example.mask.any(1).all():
        return None
    groups = groups.clamp(max=len(groups) // 2 - 1)  # nobody alone
    scores = (groups.double() + 0.1) / 3.0
    advantages = _call(fn, example.put(scores=scores, groups=groups))[0]
    reason = differ("the advantage", torch.zeros_like(advantages), advantages, 0.0)
    return reason and f"with scores {scores.tolist()} in groups {groups.tolist()}, {reason}"


def _group_names(fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    renamed = example.put(groups=1000 - 7 * example.inputs["groups"])
    reason = _results_differ(_call(fn, example), _call(fn, renamed))
    return reason and f"with groups named {renamed.inputs['groups'].tolist()}, {reason}"


def _grouped_example(group_rows: int, rows: int, width: int, seed: int) -> Example:
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + seed)
    rows = max(rows, group_rows)
    mask = draw_mask(rows, width, seed % 2, generator)
    count = max(1, rows // max(group_rows, 1 + seed % 2))
    groups = (torch.arange(rows) % count)[torch.randperm(rows, generator=generator)]
    if seed % 3 == 2:  # a row without tokens, in one of the groups
        mask = torch.cat([torch.zeros_like(mask[:1]), mask])
        groups = torch.cat([groups[:1], groups])
    scores = torch.randint(-2, 3, (len(groups),), generator=generator).double() * 0.7
    return Example({"scores": scores, "mask": mask, "groups": groups}, {}, mask.double())


def check_advantages(estimator: Callable, *, equal_rewards: bool = True, group_rows: int = 1) -> None:
    """Put a group estimator through its laws: `laws.check_advantages(my_estimator)`. LawViolation for the first.

    `estimator(scores [B], mask [B, T], groups [B])` returns Advantages, or advantages alone. Equal rewards in a group
    of two or more give exactly 0 (unless `equal_rewards` is False), rows without tokens count nowhere whatever their
    score, the result is 0 outside the mask, goes with the rows, and depends neither on padding nor on the groups'
    ids. Every group has at least `group_rows` rows with tokens.
    """
    laws = (*_COMMON, Law("group names", "ids of groups are names, in any order", _group_names))
    if equal_rewards:
        laws += (Law("equal rewards", "equal rewards in a group give exactly 0", _equal_rewards),)
    check(estimator, laws, partial(_grouped_example, group_rows))


_DISCOUNTS = ((1.0, 1.0), (0.9, 0.7), (1.0, 0.0), (0.0, 1.0), (0.9, 1.0), (0.1, 0.1))
_LONG = ((1, 63), (1, 65), (2, 127), (2, 128), (2, 129), (1, 300))  # about the blocks in which a scan may work


def _definition(rewards: Tensor, values: Tensor, row: Tensor, gamma: float, lam: float) -> Tensor:
    """sum_l (gamma lam)^l delta_{t + l} over the tokens of one row's mask, in O(T^2), float64."""
    r, v = rewards[row].double(), values[row].double()
    following = torch.cat([v[1:], v.new_zeros(1)])[: len(v)]
    steps = torch.arange(len(v))
    ahead = steps - steps[:, None]
    powers = (gamma * lam) ** ahead.clamp(min=0).double()
    return (powers.where(ahead >= 0, 0.0) * (r + gamma * following - v)).sum(1)


def _is_definition(
    fn: Callable, example: Example, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> str | None:
    example = place(example, dtype, "cpu")
    rewards, values, mask = example.inputs.values()
    for gamma, lam in _DISCOUNTS:
        results = _call(partial(fn, gamma=gamma, lam=lam), example)
        if results[0].dtype != dtype:
            return f"{words(dtype)} arguments gave {words(results[0].dtype)}"
        for b, row in enumerate(mask):
            expected = _definition(rewards[b], values[b], row, gamma, lam)
            for name, a, x in zip(
                ("the advantages", "the returns"), (expected, expected + values[b, row]), results, strict=True
            ):
                if reason := apart(name, a, x[b, row], dtype):
                    return f"gamma={gamma}, lam={lam}: in row {b}, counting tokens of the mask, {reason}"
    return None


def _monte_carlo(fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    rewards, values, mask = example.inputs.values()
    returns = rewards.where(mask, 0.0).flip(1).cumsum(1).flip(1)
    advantages = _call(partial(fn, gamma=1.0, lam=1.0), example)[0]
    return differ("the advantage", (returns - values).where(mask, 0.0), advantages)


def _deletion(fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    bound = partial(fn, gamma=0.9, lam=0.7)
    whole = _call(bound, example)
    for b, row in enumerate(example.mask):
        if row.any():
            short = _call(bound, example.map(lambda x, b=b, row=row: x[b, row][None]))
            if reason := _results_differ(tuple(x[0] for x in short), tuple(x[b, row] for x in whole)):
                return f"row {b} against itself without its masked steps: {reason}"
    return None


def _token_example(names: tuple[str, ...], rows: int, width: int, seed: int) -> Example:
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + seed)
    mask = draw_mask(rows, width, seed, generator)
    inputs = {name: normal(generator, rows, width) for name in names}
    return Example({**inputs, "mask": mask}, {}, mask.double())


def _discounted(breach: Callable, fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    return breach(partial(fn, gamma=0.9, lam=0.7), example, generator)


def check_gae(estimator: Callable[..., Any], *, dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32)) -> None:
    """Put a GAE estimator or kernel through its laws: `laws.check_gae(my_gae)`. LawViolation for the first that fails.

    `estimator(rewards, values, mask, *, gamma, lam)`, tensors [B, T], returns advantages and returns (see
    `fppo_kernels.gae.loop`). It equals the O(T^2) definition in float64, in every one of `dtypes` and on long rows
    too; lam = 1 gives return minus value, deleting masked steps changes nothing, and the laws of `check_advantages`
    about masked garbage, row order, padding and purity.
    """
    bound = [law._replace(breach=partial(_discounted, law.breach)) for law in _COMMON]
    statement = "advantages are sums of (gamma lam)^l delta, returns = advantages + values"
    laws = (
        *bound,
        Law("return minus value", "lam = 1 and gamma = 1 give the return minus the value", _monte_carlo),
        Law("masked steps", "a row with masked steps equals the row without them", _deletion),
        *(Law("definition", statement, partial(_is_definition, dtype=dtype)) for dtype in checked(dtypes)),
    )
    example = partial(_token_example, ("rewards", "values"))
    check(estimator, laws, example, sizes=(*SIZES, (0, 3)))
    long = tuple(Law("long rows", statement, partial(_is_definition, dtype=dtype)) for dtype in dtypes)
    check(estimator, long, example, sizes=_LONG)


def _moments(fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    if example.mask.sum() < 2:
        return None
    x = _call(fn, example)[0][example.mask]
    return differ("the mean", torch.zeros(()), x.mean()) or differ("the variance", torch.ones(()), x.var())


def _shift_and_scale(fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    x, plain = example.inputs["x"], _call(fn, example)
    for shift, scale in ((100.0, 1.0), (0.0, 1e-6), (0.0, 1e6)):
        if reason := _results_differ(plain, _call(fn, example.put(x=x * scale + shift))):
            return f"for {scale} * x + {shift}, {reason}"
    return None


def _constant(fn: Callable, example: Example, generator: torch.Generator) -> str | None:
    result = _call(fn, example.put(x=torch.full_like(example.inputs["x"], 0.1)))[0]
    return differ("for equal numbers the result", torch.zeros_like(result), result, 0.0)


def check_whiten(whiten: Callable) -> None:
    """Put a whitening `whiten(x [B, T], mask)` through its laws. LawViolation for the first that fails.

    Mean 0 and (unbiased) variance 1 over the mask, shift and scale invariance, equal numbers give exactly 0, and the
    laws of `check_advantages` about masked garbage, row order, padding and purity.
    """
    laws = (
        *_COMMON,
        Law("mean and variance", "over the mask the mean is 0 and the variance 1", _moments),
        Law("shift and scale", "shifting and scaling the numbers changes nothing", _shift_and_scale),
        Law("equal numbers", "equal numbers give exactly 0", _constant),
    )
    check(whiten, laws, partial(_token_example, ("x",)))
