"""Laws that losses and estimators share: what is outside the mask, the order of rows and the width of padding have no
effect.

Each is made for a kind of function by `run(fn, example)`, which returns its outcome; `mild` is one for mild forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fppo.laws._kernels import TOLERANCES, grads
from fppo.laws._search import Breach, Law, LawExample, changed, differ, fn_name, impure, nothing, spoil, stain, widen
from fppo.metrics import Metric

FINITE_NOTE = "finite numbers there change nothing"


class BatchOutcome(NamedTuple):
    """The results of a function, by their names in messages."""

    rows: Mapping[str, Tensor]  # [B, T, ...]
    sums: Mapping[str, Tensor] = MappingProxyType({})  # over all rows, 0-d
    metrics: Mapping[str, Metric] = MappingProxyType({})
    tolerance: float | None = None  # of all results; None: each has that of its dtype

    def map(self, fn: Callable[[Tensor], Tensor]) -> BatchOutcome:
        """The outcome with `fn` applied to every tensor of rows."""
        return self._replace(rows={name: fn(x) for name, x in self.rows.items()})


Run = Callable[[Callable, LawExample], BatchOutcome]


def metrics_differ(expected: Mapping[str, Metric], actual: Mapping[str, Metric], tolerance: float = 1e-9) -> str | None:
    """Describe the first metric that is not as expected; None if all are."""
    if expected.keys() != actual.keys():
        return f"metrics are {sorted(actual)}, expected {sorted(expected)}"
    for name, metric in expected.items():
        for field, a, b in zip(metric._fields, metric, actual[name], strict=True):
            if reason := differ(f"metric {name}, {field}", a, b, tolerance):
                return reason
    return None


def outcomes_differ(expected: BatchOutcome, actual: BatchOutcome, tolerance: float | None = None) -> str | None:
    """Describe where two outcomes differ by more than `tolerance` (None: their own), or their metrics by more than
    their own tolerance; None if they do not."""
    found = {**actual.rows, **actual.sums}
    for name, x in {**expected.rows, **expected.sums}.items():
        own = TOLERANCES.get(x.dtype, 0.0) if expected.tolerance is None else expected.tolerance
        if reason := differ(name, x, found[name], own if tolerance is None else tolerance):
            return reason
    return metrics_differ(expected.metrics, actual.metrics, expected.tolerance or 0.0)


def _along(mask: Tensor, x: Tensor) -> Tensor:
    """Reshape the mask [B, T] so that it broadcasts to `x` [B, T, ...]."""
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))


def inside(run: Run, fn: Callable, example: LawExample) -> BatchOutcome:
    """The outcome of `run` where the mask is True, and 0 elsewhere; without metrics."""
    return run(fn, example).map(lambda x: x.where(_along(example.mask, x), 0.0))._replace(metrics={})


def purity(run: Run) -> Law:
    """The law that nothing but the arguments decides the outcome, to the bit."""

    def breach(fn: Callable, example: LawExample, generator: torch.Generator) -> str | None:
        return impure(example, lambda: run(fn, example), partial(outcomes_differ, tolerance=0.0))

    return Law("purity", "arguments stay as they are, and equal arguments give equal bits", breach)


def masked_garbage(run: Run, mild: Run, note: str = FINITE_NOTE) -> Law:
    """The law that nothing outside the mask has an effect on outcomes by `run`; its mild form has finite numbers there,
    outcomes by `mild`, and says `note` if it alone holds."""

    def breach(fn: Callable, example: LawExample, generator: torch.Generator) -> Breach | None:
        def dirty(x: Tensor, kind: str) -> Tensor:
            return spoil(x, ~_along(mask, x) if x.dim() >= 2 else ~mask.any(1), generator, kind)

        mask, plain = example.mask, run(fn, example)
        for kind, garbage in (("nan", "NaN"), ("mixed", "NaN, inf or 1e300")):
            spoiled = example.map(partial(dirty, kind=kind))._replace(weights=example.weights).put(mask=mask)
            if reason := outcomes_differ(plain, run(fn, spoiled), 0.0):
                return Breach(f"with {garbage} where the mask is False, {reason}", spoiled)
        return None

    def finite(fn: Callable, example: LawExample, generator: torch.Generator) -> Breach | None:
        spoiled = stain(example, generator)
        reason = outcomes_differ(mild(fn, example), mild(fn, spoiled))
        return changed(reason, "with finite numbers where the mask is False, ", spoiled)

    statement = "what stands where the mask is False changes no bit"
    return Law("masked garbage", statement, breach, mild=finite, note=note)


def zero_outside(run: Run, statement: str) -> Law:
    """The law that tensors of rows are 0 outside the mask."""

    def breach(fn: Callable, example: LawExample, generator: torch.Generator) -> str | None:
        plain = run(fn, example)
        outside = plain.map(lambda x: x.where(~_along(example.mask, x), 0.0))
        reason = outcomes_differ(plain.map(torch.zeros_like), outside, 0.0)
        return reason and f"outside the mask {reason}"

    return Law("zero outside the mask", statement, breach)


def row_order(run: Run, statement: str) -> Law:
    """The law that tensors of rows go with their rows, and nothing else depends on their order."""

    def breach(fn: Callable, example: LawExample, generator: torch.Generator) -> Breach | None:
        order = torch.randperm(len(example.mask), generator=generator)
        moved = example.map(lambda x: x[order])
        reason = outcomes_differ(run(fn, example).map(lambda x: x[order]), run(fn, moved))
        return changed(reason, f"with the rows in the order {order.tolist()}, which they have here, ", moved)

    return Law("row order", statement, breach)


def padding_width(run: Run, mild: Run, note: str = FINITE_NOTE) -> Law:
    """The law that columns of padding have no effect; its mild form has zeros there, and outcomes by `mild`."""

    def breach(by: Run, fill: float, fn: Callable, example: LawExample, generator: torch.Generator) -> Breach | None:
        plain, width = by(fn, example), example.mask.shape[1]
        for columns in (1, 3):
            wide = example.map(partial(widen, columns=columns, fill=fill))
            wide = wide._replace(weights=widen(example.weights, columns, 0.0))
            if reason := outcomes_differ(plain, by(fn, wide).map(lambda x: x[:, :width])):
                return Breach(f"with {columns} more columns of padding, {reason}", wide)
        return None

    strict, finite = partial(breach, run, torch.nan), partial(breach, mild, 0.0)
    return Law("padding width", "columns outside the mask change nothing", strict, mild=finite, note=note)


def constants(total: Callable[[Callable, LawExample], Tensor]) -> Law:
    """The law that `total(fn, example)`, 0-d, has a gradient by the first input alone."""

    def breach(fn: Callable, example: LawExample, generator: torch.Generator) -> str | None:
        leaves = {name: x.detach().clone().requires_grad_() for name, x in example.inputs.items() if name != "mask"}
        _, *others = leaves
        slopes = grads(total(fn, example.put(**leaves)), [leaves[name] for name in others])
        for name, grad in zip(others, slopes, strict=True):
            if reason := differ("it", torch.zeros_like(grad), grad, 0.0):
                return f"a gradient reaches {name}; detach it. {reason}"
        return None

    statement, note = "the gradient reaches the first argument alone", "callers that detach it see no difference"
    return Law("constants", statement, breach, mild=nothing, note=note)


def reference_differs(
    run: Run,
    reference: Callable,
    fn: Callable,
    example: LawExample,
    generator: torch.Generator,
    *,
    tolerance: float | None = None,
) -> str | None:
    """Describe how the outcome, but for metrics, differs from that of the `reference`; None if it does not."""
    expected, actual = run(reference, example), run(fn, example)
    reason = outcomes_differ(expected, actual._replace(metrics=expected.metrics), tolerance)
    return reason and f"{reason}, as of {fn_name(reference)}"
