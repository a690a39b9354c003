"""Built-in rewards."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable
from typing import Any

import attrs

from fppo._errors import printable
from fppo.rewards.functions import inline_reward
from fppo.workers.sample import Sample


@inline_reward
def exact_match(sample: Sample) -> dict[str, Any]:
    """1 if the response equals the ground truth up to surrounding white space, else 0. Raises ValueError for a ground
    truth that is neither text nor a number."""
    answer = sample.response.strip()
    return {"score": float(answer == _truth(sample).strip()), "answer": answer}


def _truth(sample: Sample) -> str:
    """The ground truth as text. Raises ValueError for a list, a table or none, which no response equals."""
    truth = sample.ground_truth
    if not isinstance(truth, str | int | float):
        raise ValueError(
            f"no response equals the ground truth {printable(repr(truth), 80)}: let data.ground_truth name one text or "
            "number, as answers.0 is the first of a list, or score by a function of your own"
        )
    return str(truth)


@attrs.frozen
class RegularExpression:
    """The function of `regular_expression`. It runs in a worker, since matching can take for ever."""

    pattern: re.Pattern[str]
    reward_name = "regular_expression"

    def __call__(self, sample: Sample) -> float | dict[str, Any]:
        if not self.pattern.groups:
            return float(self.pattern.search(sample.response) is not None)
        matches = list(self.pattern.finditer(sample.response))
        answer = matches[-1][1] if matches else None
        if answer is None:
            return {"score": 0.0, "answer": None}
        return {"score": float(answer.strip() == _truth(sample).strip()), "answer": answer.strip()}


def regular_expression(*, pattern: str) -> RegularExpression:
    """1 where `pattern` matches in the response, else 0.

    If the pattern has a group, the last match's first group must also equal the ground truth up to surrounding white
    space. Raises ValueError for an invalid pattern.
    """
    try:
        return RegularExpression(re.compile(pattern))
    except re.error as error:
        raise ValueError(f"pattern = {pattern!r} is not a regular expression: {error}") from error


def _prepare_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("the reward math_verify needs the package math-verify; install it: pip install 'fppo[math]'")
    import math_verify as library  # noqa: F401 (slow: imported here, outside the first sample's time limit)

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off


def math_verify(sample: Sample) -> dict[str, Any]:
    """1 if the response's final answer equals the ground truth as mathematics, by the package math-verify.

    Its own time limits use signals and are off: the worker's limit holds. Raises ValueError if the ground truth cannot
    be parsed; a response that cannot be parsed scores 0.
    """
    _prepare_math_verify()
    import math_verify as library

    truth = _truth(sample)
    marked = truth if "$" in truth or "\\boxed" in truth else f"\\boxed{{{truth}}}"
    gold = library.parse(marked, parsing_timeout=None)  # type: ignore[arg-type]
    if not gold:
        raise ValueError(f"the ground truth {truth!r} is not mathematics that can be parsed")
    answer = library.parse(sample.response, parsing_timeout=None)  # type: ignore[arg-type]
    correct = bool(answer) and library.verify(gold, answer, timeout_seconds=None)
    return {"score": float(correct), "answer": str(answer[-1]) if answer else None}


math_verify.reward_prepare = _prepare_math_verify  # type: ignore[attr-defined]


@attrs.frozen
class LengthPenalty:
    """The function of `length_penalty`."""

    max_tokens: int
    buffer: int
    factor: float
    reward_inline = True
    reward_shaping = True
    reward_name = "length_penalty"

    def __call__(self, sample: Sample) -> float:
        excess = len(sample.response_tokens) - (self.max_tokens - self.buffer)
        return min(-excess / self.buffer * self.factor, 0.0)


def length_penalty(*, max_tokens: int, buffer: int, factor: float = 1.0) -> LengthPenalty:
    """DAPO's overlong penalty (arXiv:2503.14476): min(-(length - (max_tokens - buffer)) / buffer * factor, 0).

    It is 0 up to max_tokens - buffer tokens of response and reaches -factor at max_tokens.
    """
    if not 0 < buffer <= max_tokens or factor < 0:
        raise ValueError(
            f"length_penalty: buffer = {buffer} must be in 1 .. max_tokens = {max_tokens}, factor = {factor} at least 0"
        )
    return LengthPenalty(max_tokens, buffer, factor)


def builtins() -> dict[str, Callable[..., Any]]:
    """The built-in rewards by name; functions of keywords alone are factories of rewards."""
    return {fn.__name__: fn for fn in (exact_match, regular_expression, math_verify, length_penalty)}
