"""What a reward function is given, what it may return, and how it is marked."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

RewardFn = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])
Kind = Literal["sample", "batch", "tensor"]
ANSWER = "answer"
MESSAGES = "prompt_messages"  # the key under which extras hold a prompt's chat messages


class Sample(NamedTuple):
    """One response to one prompt. Texts are decoded without special tokens; token ids hold them."""

    prompt: str
    response: str
    ground_truth: Any
    source: str
    extras: Mapping[str, Any]  # the data row's other fields
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    finish: str  # "stop" or "length"


class Outcome(NamedTuple):
    """What became of one sample: a value; an error or a timeout, which score 0; or a result that is no score."""

    kind: Literal["value", "error", "timeout", "bad"]
    score: float = 0.0
    named: Mapping[str, float] = {}
    answer: str | None = None  # what the function took as the response's answer, for majority votes
    text: str = ""


def batch_reward(fn: F) -> F:
    """Marks a function that takes a list of samples and returns a list of as many results."""
    fn.reward_kind = "batch"  # type: ignore[attr-defined]
    return fn


def tensor_reward(fn: F) -> F:
    """Marks a function of the whole rollout that returns scores [B], or them and metrics, as a reward model is.

    It runs in this process.
    """
    fn.reward_kind = "tensor"  # type: ignore[attr-defined]
    return fn


def inline_reward(fn: F) -> F:
    """Marks a function that runs in this process: exceptions stay isolated, but nothing can stop it if it hangs."""
    fn.reward_inline = True  # type: ignore[attr-defined]
    return fn


class Part(NamedTuple):
    """One function of a reward, by name, with its factor in the sum."""

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
    def asynchronous(self) -> bool:
        return inspect.iscoroutinefunction(self.fn) or inspect.iscoroutinefunction(type(self.fn).__call__)


class WeightedSum(NamedTuple):
    """A reward that is a sum: each part is run, isolated and reported by itself."""

    parts: tuple[Part, ...]


Reward = RewardFn | WeightedSum


def name_of(fn: RewardFn) -> str:
    """How errors and metrics call a function."""
    given = getattr(fn, "reward_name", None)
    if given is not None:
        return given
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def weighted_sum(functions: Mapping[str, Reward], weights: Mapping[str, float] | None = None) -> WeightedSum:
    """The sum of weight x score over named functions; a weight that is not given is 1.

    A sum within the sum is taken apart: its parts are named "outer/inner" and weighted by both.
    """
    weights = {} if weights is None else weights
    unknown = sorted(set(weights) - set(functions))
    if unknown or not functions:
        raise ValueError(f"weights for {unknown}, which are not among the functions {sorted(functions)}")
    parts: list[Part] = []
    for name, fn in functions.items():
        weight = float(weights.get(name, 1.0))
        if not math.isfinite(weight):
            raise ValueError(f"the weight of {name!r} is {weight}")
        for inner, factor, part in _parts(name, fn):
            parts.append(Part(inner, weight * factor, part))
    return WeightedSum(tuple(parts))


def _parts(name: str, fn: Reward) -> list[tuple[str, float, RewardFn]]:
    if isinstance(fn, WeightedSum):
        return [(f"{name}/{part.name}", part.weight, part.fn) for part in fn.parts]
    if not callable(fn):
        raise ValueError(f"the reward {name!r} is a {type(fn).__name__}, not a function")
    return [(name, 1.0, fn)]


def as_sum(reward: Reward) -> WeightedSum:
    """Any reward as a sum; a single function is its only part."""
    return reward if isinstance(reward, WeightedSum) else weighted_sum({name_of(reward): reward})


def outcome_of(result: Any) -> Outcome:
    """A function's result, checked: a finite number, or a dict of them with "score" and maybe the text "answer"."""
    if not isinstance(result, Mapping):
        score = _number(result)
        return Outcome("bad", text=_text(result)) if score is None else Outcome("value", score)
    answer = result.get(ANSWER)
    numbers = {name: _number(value) for name, value in result.items() if name != ANSWER}
    names_are_text = all(isinstance(name, str) for name in numbers)
    if "score" not in numbers or None in numbers.values() or not names_are_text or not isinstance(answer, str | None):
        return Outcome("bad", text=_text(result))
    score = numbers.pop("score")
    return Outcome("value", score, numbers, answer)  # type: ignore[arg-type]


def _number(value: Any) -> float | None:
    """A finite number, from Python, numpy or torch; None for anything else."""
    if not hasattr(type(value), "__float__") or getattr(value, "ndim", 0):
        return None
    try:
        number = float(value)
    except Exception:
        return None
    return number if math.isfinite(number) else None


def _text(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
