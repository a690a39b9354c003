"""Decorators that say how reward functions are called, and weighted sums of these functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from fppo.workers.sample import Kind, is_asynchronous, name_of

RewardFn = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])


def batch_reward(fn: F) -> F:
    """Mark a function that takes a list of samples and returns a list of as many results."""
    fn.reward_kind = "batch"  # type: ignore[attr-defined]
    return fn


def tensor_reward(fn: F) -> F:
    """Mark a function of the whole rollout that returns scores [B], or scores and metrics, such as a reward model.

    A third result, bool [B] or None, is False at rows without a score; a fourth, text or None for each row, is what it
    says about the response, for a teacher. It runs in this process.
    """
    fn.reward_kind = "tensor"  # type: ignore[attr-defined]
    return fn


def inline_reward(fn: F) -> F:
    """Mark a function to run in this process: exceptions are caught, but a hanging call cannot be stopped."""
    fn.reward_inline = True  # type: ignore[attr-defined]
    return fn


def shaping_reward(fn: F) -> F:
    """Mark a function that shapes the score without judging the response, such as a penalty for length.

    Its score counts in the sum, but not in `Scored.outcome`, by which groups are filtered and right responses
    distinguished from wrong ones.
    """
    fn.reward_shaping = True  # type: ignore[attr-defined]
    return fn


class RewardTerm(NamedTuple):
    """A named function of a reward with its weight in the sum."""

    name: str
    weight: float
    fn: RewardFn

    @property
    def kind(self) -> Kind:
        return getattr(self.fn, "reward_kind", "sample")

    @property
    def inline(self) -> bool:
        return self.kind == "tensor" or getattr(self.fn, "reward_inline", False)

    @property
    def shaping(self) -> bool:
        return getattr(self.fn, "reward_shaping", False)

    @property
    def asynchronous(self) -> bool:
        return is_asynchronous(self.fn)


class WeightedSum(NamedTuple):
    """A reward as a weighted sum; each term is run, isolated and reported separately."""

    terms: tuple[RewardTerm, ...]


Reward = RewardFn | WeightedSum


def weighted_sum(functions: Mapping[str, Reward], weights: Mapping[str, float] | None = None) -> WeightedSum:
    """The sum of weight x score over named functions; missing weights are 1.

    A nested sum is flattened: its terms are named "outer/inner" and weighted by the product. Raises ValueError for
    weights of unknown functions, and for weights that are not finite.
    """
    weights = {} if weights is None else weights
    unknown = sorted(set(weights) - set(functions))
    if unknown or not functions:
        raise ValueError(f"weights for {unknown}, which are not among the functions {sorted(functions)}")
    terms: list[RewardTerm] = []
    for name, fn in functions.items():
        weight = float(weights.get(name, 1.0))
        if not math.isfinite(weight):
            raise ValueError(f"the weight of {name!r} is {weight}")
        terms += [term._replace(weight=weight * term.weight) for term in _terms(name, fn)]
    return WeightedSum(tuple(terms))


def _terms(name: str, fn: Reward) -> list[RewardTerm]:
    if isinstance(fn, WeightedSum):
        return [term._replace(name=f"{name}/{term.name}") for term in fn.terms]
    if not callable(fn):
        raise ValueError(f"the reward {name!r} is a {type(fn).__name__}, not a function")
    return [RewardTerm(name, 1.0, fn)]


def as_sum(reward: Reward) -> WeightedSum:
    """A reward as a sum; a single function becomes its only term."""
    return reward if isinstance(reward, WeightedSum) else weighted_sum({name_of(reward): reward})
