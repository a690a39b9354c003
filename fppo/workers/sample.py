"""Samples, the arguments of user functions, and the outcomes of calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from fppo._errors import shown

UserFn = Callable[..., Any]
Kind = Literal["sample", "batch", "tensor"]
ANSWER = "answer"
NAMED, LONGEST_NAME = 100, 200  # the most entries of a result, which become metrics; their longest name
_LARGEST = 3.4028234e38  # the largest float32
_SCORES = 'it must return a finite number, or a dict of them with "score" and maybe the text "answer"'


class Sample(NamedTuple):
    """One response to one prompt. Texts are decoded without special tokens; the token ids include them."""

    prompt: str
    response: str  # includes what tools returned between the policy's turns
    ground_truth: Any
    source: str
    extras: Mapping[str, Any]  # other fields of the data row
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    finish: str  # "stop" or "length"


class Outcome(NamedTuple):
    """The outcome of one sample: a value; an error or a timeout, without a score; or a "bad" result, which is no
    score."""

    kind: Literal["value", "error", "timeout", "bad"]
    score: float = 0.0
    named: Mapping[str, float] = {}
    answer: str | None = None  # the answer that the function extracted from the response, for majority votes
    text: str = ""


def name_of(fn: UserFn) -> str:
    """The function's name, for errors and metrics."""
    name = getattr(fn, "reward_name", None)
    if name is not None:
        return name
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def is_asynchronous(fn: UserFn) -> bool:
    """Whether the function, or callable instance, is a coroutine function."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def outcome_of(result: Any) -> Outcome:
    """Check a function's result: a finite number, or a dict of such numbers with "score" and optionally the text
    "answer"."""
    if not isinstance(result, Mapping):
        score = number_of(result)
        return _bad(result) if score is None else Outcome("value", score)
    if len(result) > NAMED or any(isinstance(name, str) and len(name) > LONGEST_NAME for name in result):
        most = f"at most {NAMED} of them, named in at most {LONGEST_NAME} characters, may come with a score"
        return Outcome("bad", text=f"{len(result):,} named numbers; {most}")
    answer = result.get(ANSWER)
    numbers = {name: number_of(value) for name, value in result.items() if name != ANSWER}
    names_are_text = all(isinstance(name, str) for name in numbers)
    if "score" not in numbers or None in numbers.values() or not names_are_text or not isinstance(answer, str | None):
        return _bad(result)
    score = numbers.pop("score")
    return Outcome("value", score, numbers, answer)  # type: ignore[arg-type]


def _bad(result: Any) -> Outcome:
    return Outcome("bad", text=f"{shown(result)}; {_SCORES}")


def number_of(value: Any) -> float | None:
    """Convert a number of Python, numpy or torch to a finite float; None for values that are no finite float32."""
    if not hasattr(type(value), "__float__") or getattr(value, "ndim", 0):
        return None
    try:
        number = float(value)
    except Exception:
        return None
    return number if abs(number) <= _LARGEST else None
