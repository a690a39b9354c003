"""Built-in rewards."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable
from typing import Any

import attrs

from fppo._errors import printable, shown
from fppo.rewards import mathematics
from fppo.rewards.functions import inline_reward
from fppo.rewards.truths import complaint, texts_of
from fppo.workers.sample import Sample


@inline_reward
def exact_match(sample: Sample) -> dict[str, Any]:
    """1 if the response equals the ground truth up to surrounding white space, else 0. Raises ValueError for a ground
    truth that is neither text nor a number, and for an empty one; see `truths.texts_of`."""
    answer = sample.response.strip()
    return {"score": float(answer in texts_of(sample.ground_truth)), "answer": answer}


exact_match.reward_complaint = complaint  # type: ignore[attr-defined]


@attrs.frozen
class RegularExpression:
    """The reward function that `regular_expression` makes. It runs in a worker, since matching can take for ever."""

    pattern: re.Pattern[str]
    reward_name = "regular_expression"

    def __call__(self, sample: Sample) -> float | dict[str, Any]:
        if not self.pattern.groups:
            return float(self.pattern.search(sample.response) is not None)
        matches = list(self.pattern.finditer(sample.response))
        answer = matches[-1][1] if matches else None
        if answer is None:
            return {"score": 0.0, "answer": None}
        return {"score": float(answer.strip() in texts_of(sample.ground_truth)), "answer": answer.strip()}

    def reward_complaint(self, truth: Any) -> str | None:
        """The fault of a ground truth: it has no text, or the pattern's group matches none of its texts; None without a
        fault."""
        if not self.pattern.groups:
            return None
        if (wrong := complaint(truth)) is not None or (group := _first_group(self.pattern)) is None:
            return wrong
        if any(group.search(f" {text} ") for text in texts_of(truth)):
            return None
        return f"the group of pattern = {shown(self.pattern.pattern)} never equals the ground truth {shown(truth, 80)}"


_PLAIN_GROUP = re.compile(r"(?:\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^()\\\[])*", re.DOTALL)


def _first_group(pattern: re.Pattern[str]) -> re.Pattern[str] | None:
    """A pattern that matches a text if the first group of `pattern` matches all of it but white space; None without a
    group, and for a group that depends on its surroundings or holds groups."""
    text, place = pattern.pattern, 0
    while place < len(text):
        before = _PLAIN_GROUP.match(text, place)
        place = before.end() if before else place
        if text[place : place + 1] != "(" or text.startswith("(?", place):
            place += 1
            continue
        inside = _PLAIN_GROUP.match(text, place + 1)
        if inside is None or text[inside.end() : inside.end() + 1] != ")" or re.search(r"\\[bBAZ\d]|[\^$]", inside[0]):
            return None
        try:
            return re.compile(rf"\A\s*(?:{inside[0]})\s*\Z", pattern.flags & ~re.UNICODE)
        except re.error:
            return None
    return None


def regular_expression(*, pattern: str) -> RegularExpression:
    """A reward of 1 where `pattern` matches in the response, else 0.

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


def math_verify(sample: Sample, *, expressions: bool = False) -> dict[str, Any]:
    r"""1 if the response's final answer equals the ground truth as mathematics, by the package math-verify.

    If the truth is a number, a set or an interval, the answer must be evaluated: numbers, fractions, percentages, with
    units or without. "2*3" is no answer to 6. Other expressions must not hold arithmetic of numbers that the truth
    lacks. `expressions` accepts all that is equal. If a response has boxes, these are the answer: several of different
    contents are a set, and an empty one is no answer. Without boxes, several numbers in a row at the end are no answer.

    math-verify's own time limits use signals and are off: the worker's limit holds. Raises ValueError if the ground
    truth is empty or cannot be parsed; a response that cannot be parsed scores 0.
    """
    _prepare_math_verify()
    score, answer = mathematics.judged(sample.response, sample.ground_truth, expressions=expressions)
    return {"score": score, "answer": answer}


def _math_complaint(truth: Any) -> str | None:
    """The fault of a ground truth: it has no text, or, unless it is a plain number, its own text as a response does not
    score 1; None without a fault."""
    if (wrong := complaint(truth)) is not None or mathematics.is_plain(truth):
        return wrong
    _prepare_math_verify()
    try:
        right = mathematics.judged(mathematics.own_answer(truth), truth)[0] == 1.0
    except Exception as error:  # math-verify raises any exception
        return printable(str(error) or type(error).__name__, 200)
    return None if right else f"the ground truth {shown(truth, 80)} does not score its own text as an answer"


math_verify.reward_prepare = _prepare_math_verify  # type: ignore[attr-defined]
math_verify.reward_complaint = _math_complaint  # type: ignore[attr-defined]


@attrs.frozen
class LengthPenalty:
    """The reward function that `length_penalty` makes."""

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
