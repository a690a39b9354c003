"""Checks of a judge's question template and score pattern, and the score in an answer."""

from __future__ import annotations

import math
import re
import string

FIELDS = ("prompt", "response", "ground_truth")


def template_problem(template: str) -> str | None:
    """The fault of a question's template and its remedy; None if it has no fault."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        return f"not a template: {error}; write {{{{ and }}}} for plain braces"
    unknown = sorted(set(names) - set(FIELDS))
    if unknown:
        return f"has the fields {unknown}; there are {list(FIELDS)}, and {{{{ and }}}} for plain braces"
    return None if "response" in names else "lacks {response}, the text to judge"


def pattern_problem(pattern: str) -> str | None:
    """The fault of a regular expression for scores and its remedy; None if it has no fault."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"not a regular expression: {error}"
    if groups == 1:
        return None
    return f"has {groups} groups; give one, (...), around the score; (?:...) groups without being one"


def score_in(answer: str, pattern: re.Pattern[str], *, cut: bool = False) -> float | None:
    """The number in the group of the last match; None without a match, or for a number that is not finite. In a `cut`
    answer a number at the very end does not count if further digits would change it."""
    matches = list(pattern.finditer(answer))
    if not matches:
        return None
    if cut and any(
        x.start(1) == matches[-1].start(1) and x[1] != matches[-1][1] for x in pattern.finditer(f"{answer}0")
    ):
        return None
    try:
        number = float(matches[-1][1])
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
