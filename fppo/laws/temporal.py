"""Laws of estimators along the tokens of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fppo.laws._kernels import apart, checked, place, words
from fppo.laws._rows import outcomes_differ
from fppo.laws._search import SIZES, Law, LawExample, Suite, check_suite, differ
from fppo.laws.estimators import Results, Tensors, as_reference, call, common, outcome_of, token_example

_DISCOUNTS = ((1.0, 1.0), (0.9, 0.7), (1.0, 0.0), (0.0, 1.0), (0.9, 1.0), (0.1, 0.1))
_GAE_TEXT = "advantages are sums of (gamma lam)^l delta, returns = advantages + values"
_LONG = ((1, 63), (1, 65), (2, 127), (2, 128), (2, 129), (1, 300))  # lengths around the blocks of scans


def _definition(rewards: Tensor, values: Tensor, row: Tensor, gamma: float, lam: float) -> Tensor:
    """Compute sum_l (gamma lam)^l delta_{t + l} over the tokens of one row's mask, in O(T^2), float64."""
    r, v = rewards[row].double(), values[row].double()
    following = torch.cat([v[1:], v.new_zeros(1)])[: len(v)]
    steps = torch.arange(len(v))
    ahead = steps - steps[:, None]
    powers = (gamma * lam) ** ahead.clamp(min=0).double()
    return (powers.where(ahead >= 0, 0.0) * (r + gamma * following - v)).sum(1)


def _is_definition(
    fn: Callable, example: LawExample, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> str | None:
    example = place(example, dtype, "cpu")
    rewards, values, mask = example.inputs.values()
    for gamma, lam in _DISCOUNTS:
        results = call(partial(fn, gamma=gamma, lam=lam), example)
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


def _monte_carlo(fn: Callable, example: LawExample, generator: torch.Generator, *, cut: bool = False) -> str | None:
    rewards, values, mask = example.inputs.values()
    returns = rewards.where(mask, 0.0).flip(1).cumsum(1).flip(1)
    advantages = call(partial(fn, gamma=1.0, lam=1.0), example)[0]
    advantages = advantages.where(mask, 0.0) if cut else advantages
    return differ("the advantage", (returns - values).where(mask, 0.0), advantages)


def _discounted(fn: Callable, example: LawExample) -> Tensors:
    return call(partial(fn, gamma=0.9, lam=0.7), example)


def _masked_steps(results: Results, way_out: str = "") -> Law:
    def breach(fn: Callable, example: LawExample, generator: torch.Generator) -> str | None:
        whole = outcome_of(results(fn, example))
        for b, row in enumerate(example.mask):
            if row.any():
                short = outcome_of(results(fn, example.map(lambda x, b=b, row=row: x[b, row][None])))
                if reason := outcomes_differ(short.map(lambda x: x[0]), whole.map(lambda x, b=b, row=row: x[b, row])):
                    return f"row {b} against itself without its masked steps: {reason}"
        return None

    return Law("masked steps", "a row with masked steps equals the row without them", breach, way_out)


def check_gae(estimator: Callable[..., Any], *, dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32)) -> None:
    """Check a GAE estimator or kernel: `laws.check_gae(my_gae)`. Raises LawViolation for the first broken law.

    `estimator(rewards, values, mask, *, gamma, lam)`, tensors [B, T], returns advantages and returns (see
    `fppo_kernels.gae.loop`). It equals the O(T^2) definition in float64, in every one of `dtypes` and on long rows
    too; lam = 1 gives return minus value, deleting masked steps changes nothing, and the laws of `check_advantages`
    about masked garbage, row order, padding and purity.
    """
    suite = gae_suite(dtypes=dtypes)
    check_suite(estimator, suite)
    long = tuple(Law("long rows", _GAE_TEXT, partial(_is_definition, dtype=dtype)) for dtype in dtypes)
    check_suite(estimator, suite._replace(laws=long, sizes=_LONG))


def gae_suite(*, dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32)) -> Suite:
    """The laws of `check_gae` on short rows."""
    inside, text = partial(_monte_carlo, cut=True), "lam = 1 and gamma = 1 give the return minus the value"
    laws = (
        *common(_discounted),
        Law("return minus value", text, _monte_carlo, mild=inside, note="where the mask is True they do"),
        _masked_steps(_discounted),
        *(Law("definition", _GAE_TEXT, partial(_is_definition, dtype=dtype)) for dtype in checked(dtypes)),
    )
    see = ("print({}(rewards, values, mask, gamma=0.9, lam=0.7))",)
    return Suite(laws, partial(token_example, ("rewards", "values")), see, (*SIZES, (0, 3)))


def check_temporal(
    estimator: Callable[..., Any],
    *,
    columns: Sequence[str] = ("rewards", "values"),
    bridges: bool = True,
    reference: Callable[..., Any] | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Check an estimator along the tokens of a row: `laws.check_temporal(partial(my_td, steps=3))`.

    `estimator(rewards, values, mask)`, with tensors [B, T], returns Advantages, or advantages [B, T] alone. `columns`
    names its arguments before the mask; "weights" are at least 0. The laws are those of `check_advantages` about values
    outside the mask, row order, padding and purity; and a row with masked steps equals the row without them.
    `bridges=False` turns the latter off, for estimators in which gaps have a meaning, such as the ends of turns. With a
    `reference`, a slow and plain estimator of the same signature, results must equal its own. Raises LawViolation for
    the first broken law. `dtype` is that of the batches, and determines the tolerance (see `check_policy_loss`).
    """
    check_suite(estimator, temporal_suite(columns=columns, bridges=bridges, reference=reference, dtype=dtype))


def temporal_suite(
    *,
    columns: Sequence[str] = ("rewards", "values"),
    bridges: bool = True,
    reference: Callable[..., Any] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Suite:
    """The laws of `check_temporal`, with its arguments."""
    laws = common()
    if bridges:
        laws += (_masked_steps(call, "give bridges=False"),)
    if reference is not None:
        laws += (Law("reference", "the results are those of the reference", partial(as_reference, reference)),)
    (dtype,) = checked((dtype,))
    example = partial(token_example, tuple(columns), dtype=dtype)
    return Suite(laws, example, (f"print({{}}({', '.join(columns)}, mask))",))
