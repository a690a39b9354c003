"""Additive metrics: sums with counts until they are reported, so that micro-batches and ranks change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fppo import devices


class Mean(NamedTuple):
    """A mean as a sum (`total`) and a count, both 0-d tensors; means add field by field."""

    total: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]


class Sum(NamedTuple):
    """A sum, such as a count or seconds; a 0-d tensor."""

    value: Tensor


class Max(NamedTuple):
    """A maximum, a 0-d tensor."""

    value: Tensor


class Min(NamedTuple):
    """A minimum, a 0-d tensor."""

    value: Tensor


class Term(NamedTuple):
    """A term of an objective, a 0-d tensor: a weighted sum over a mini-batch's passes, averaged over mini-batches.

    `settled` turns it into a mean once the mini-batch is complete.
    """

    value: Tensor


class Spent(NamedTuple):
    """Spans of time that add up, float64 [N, 2]: start on some clock and duration, in seconds."""

    spans: Tensor

    @property
    def value(self) -> Tensor:
        """The total duration in seconds, a 0-d tensor."""
        return self.spans[:, 1].sum()


Metric = Mean | Sum | Max | Min | Term | Spent
Metrics = dict[str, Metric]
for _kind in get_args(Metric):  # so that the structure of a tree with metrics can be saved
    pytree._register_namedtuple(_kind, serialized_type_name=f"{__name__}.{_kind.__name__}")  # pyright: ignore[reportPrivateUsage]


def mean(value: Tensor | float, count: Tensor | float = 1.0) -> Mean:
    """Make a `Mean` of `count` numbers whose sum is `value`; by default of a single number."""
    total = devices.wide(torch.as_tensor(value).detach())
    if isinstance(count, Tensor):
        return Mean(total, count.detach().to(total))
    return Mean(total, torch.full_like(total, count))


def total(value: Tensor | float) -> Sum:
    """Make a `Sum` of a single number."""
    return Sum(devices.wide(torch.as_tensor(value).detach()))


def spent(*spans: tuple[float, float]) -> Spent:
    """Make a `Spent` of spans (start, duration) of time, in seconds; without any its sum is 0."""
    return Spent(torch.tensor(spans, dtype=torch.float64).reshape(-1, 2))


def term(value: Tensor | float) -> Term:
    """Make a `Term` of the part that one pass contributes to a term of a mini-batch's objective."""
    return Term(devices.wide(torch.as_tensor(value).detach()))


def masked_mean(x: Tensor, mask: Tensor) -> Mean:
    """The mean of `x` where `mask` is True (same shape, any). Values elsewhere have no effect."""
    return Mean(x.detach().double().where(mask, 0.0).sum(), mask.sum().double())


def masked_max(x: Tensor, mask: Tensor) -> Max:
    """The maximum of `x` where `mask` is True; -inf if the mask is True nowhere."""
    kept = x.detach().double().where(mask, -torch.inf).flatten()
    return Max(torch.cat([kept, kept.new_full((1,), -torch.inf)]).amax())


def masked_min(x: Tensor, mask: Tensor) -> Min:
    """The minimum of `x` where `mask` is True; inf if the mask is True nowhere."""
    return Min(-masked_max(-x, mask).value)


def _add(a: Metric, b: Metric) -> Metric:
    match a, b:
        case Mean(), Mean():
            return Mean(a.total + b.total, a.count + b.count)
        case Sum(), Sum():
            return Sum(a.value + b.value)
        case Max(), Max():
            return Max(torch.maximum(a.value, b.value))
        case Min(), Min():
            return Min(torch.minimum(a.value, b.value))
        case Term(), Term():
            return Term(a.value + b.value)
        case Spent(), Spent():
            return Spent(torch.cat([a.spans, b.spans]))
        case _:
            raise ValueError(f"a metric is a {type(a).__name__} in one place and a {type(b).__name__} in another")


def merge(*reports: Mapping[str, Metric]) -> Metrics:
    """Merge metrics; equal names in several `reports` are added. Raises ValueError if their kinds differ."""
    merged: Metrics = {}
    for one in reports:
        for name, metric in one.items():
            merged[name] = _add(merged[name], metric) if name in merged else metric
    return merged


def settled(metrics: Mapping[str, Metric]) -> Metrics:
    """The metrics of a complete mini-batch: each term becomes a mean of one number."""
    return {name: mean(m.value) if isinstance(m, Term) else m for name, m in metrics.items()}


def report(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Metrics as floats for the log; only here do metrics wait for the device. A mean over count 0 is nan."""
    return {name: (m.total / m.count if isinstance(m, Mean) else m.value).item() for name, m in metrics.items()}
