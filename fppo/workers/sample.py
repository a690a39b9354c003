"""Samples, the arguments of user functions, and the outcomes of calls."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fppo._errors import shown

UserFn = Callable[..., Any]
Kind = Literal["sample", "batch", "tensor"]
ANSWER, FEEDBACK = "answer", "feedback"
NAMED, LONGEST_NAME = 100, 200  # the most entries of a result, which become metrics; their longest name
_LARGEST = 3.4028234e38  # the largest float32
_SCORES = (
    "it must return a finite number, a list of one for each response token (None where no step ends), or StepRewards; "
    'or a dict of numbers with one of these as "score", and maybe the texts "answer" and "feedback"'
)


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


def sample_of(extras: Mapping[str, Any]) -> Sample:
    """A sample that holds only `extras`, such as the arguments of a call."""
    return Sample("", "", None, "", extras, (), (), "stop")


class StepRewards(NamedTuple):
    """The rewards of a response's steps, in their order; the score is their sum.

    `ends` has the place where each step ends: the number of characters of `Sample.response` up to there, ascending. A
    step ends with the token that completes its last character; one that ends with the response ends with the response's
    last token. Without `ends` there is one entry for each of `Sample.response_tokens`, None where no step ends.
    """

    rewards: Sequence[float | None]
    ends: Sequence[int] | None = None


class Outcome(NamedTuple):
    """The outcome of one sample: a value, with `named` numbers; an error or a timeout, without a score; or a "bad"
    result, which is no score."""

    kind: Literal["value", "error", "timeout", "bad"]
    score: float = 0.0
    named: Mapping[str, float] = {}
    answer: str | None = None  # the answer that the function extracted from the response, for majority votes
    text: str = ""
    steps: StepRewards | None = None  # of which the score is the sum
    feedback: str | None = None  # what the function says about the response, for a teacher

    @staticmethod
    def of(values: Sequence[Any]) -> Outcome:
        """Restore an outcome from its values, which may have travelled as JSON."""
        outcome = Outcome(*values)
        if outcome.steps is None:
            return outcome
        rewards, ends = outcome.steps
        return outcome._replace(steps=StepRewards(tuple(rewards), None if ends is None else tuple(ends)))


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
    """Check a function's result: a finite number, one for each token, or rewards of steps; or a dict of numbers with
    one of these as "score", and optionally the texts "answer" and "feedback"."""
    if not isinstance(result, Mapping):
        score, steps = _score_of(result)
        return _bad(result) if score is None else Outcome("value", score, steps=steps)
    if len(result) > NAMED or any(isinstance(name, str) and len(name) > LONGEST_NAME for name in result):
        most = f"at most {NAMED} of them, named in at most {LONGEST_NAME} characters, may come with a score"
        return Outcome("bad", text=f"{len(result):,} named numbers; {most}")
    texts = {name: result.get(name) for name in (ANSWER, FEEDBACK)}
    score, steps = _score_of(result.get("score"))
    numbers = {name: number_of(value) for name, value in result.items() if name not in (*texts, "score")}
    readable = all(isinstance(name, str) for name in numbers) and all(isinstance(x, str | None) for x in texts.values())
    if score is None or None in numbers.values() or not readable:
        return _bad(result)
    return Outcome("value", score, numbers, texts[ANSWER], steps=steps, feedback=texts[FEEDBACK])  # type: ignore[arg-type]


def _score_of(value: Any) -> tuple[float | None, StepRewards | None]:
    """The score that a value stands for, and its steps if it has any; None for both if it is no score."""
    if (number := number_of(value)) is not None:
        return number, None
    try:
        steps = _steps_of(value)
        score = None if steps is None else number_of(math.fsum(x for x in steps.rewards if x is not None))
    except Exception:  # values of users may raise as they are read
        return None, None
    return score, None if score is None else steps


def _steps_of(value: Any) -> StepRewards | None:
    given: Any = value.rewards if isinstance(value, StepRewards) else value
    ends = value.ends if isinstance(value, StepRewards) else None
    if not (isinstance(given, list | tuple) or getattr(given, "ndim", 0) == 1):
        return None
    entries = given if isinstance(given, list | tuple) else given.tolist()
    rewards = tuple(map(number_of, entries))
    if any(x is None and not (ends is None and entry is None) for x, entry in zip(rewards, entries, strict=True)):
        return None
    return StepRewards(rewards, None if ends is None else tuple(map(operator.index, ends)))


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
