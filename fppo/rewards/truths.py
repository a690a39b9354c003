"""Ground truths: the texts that a response may answer with, and a check of a data set's truths before a run."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from fppo._errors import shown
from fppo.data.problems import Problems
from fppo.rewards.functions import Reward, as_sum


def texts_of(truth: Any) -> tuple[str, ...]:
    """The texts that a ground truth stands for, without white space around them, the plainest first.

    A number is its digits, and Python's text of it: 18.0, which a table with missing values makes of 18, is "18" and
    "18.0". True is "true" and "True". Raises ValueError for a list, a table, nothing and an empty text, which no
    response should equal.
    """
    texts: tuple[str, ...] = ()
    if isinstance(truth, bool):
        texts = (str(truth).lower(), str(truth))
    elif isinstance(truth, float) and truth == truth and abs(truth) != float("inf"):
        digits = format(Decimal(repr(truth)), "f")
        texts = tuple(dict.fromkeys((digits.rstrip("0").rstrip(".") if "." in digits else digits, repr(truth))))
    elif isinstance(truth, str | int) and (text := str(truth).strip()):
        texts = (text,)
    if not texts:
        raise ValueError(
            f"no response equals the ground truth {shown(truth, 80)}, which cannot be an answer: let data.ground_truth "
            "name one text or number, as answers.0 is the first of a list, or score by a function of your own"
        )
    return texts


def complaint(truth: Any) -> str | None:
    """The fault of a ground truth that a response is to equal; None for one that has a text."""
    try:
        texts_of(truth)
    except ValueError as error:
        return str(error)
    return None


def check_truths(reward: Reward, truths: Iterable[tuple[str, Any]]) -> None:
    """Check ground truths, given with the places of their rows. Raises DataError for truths that a function of the
    reward cannot score, or does not score 1 as the whole response: every response would be wrong.

    The function's attribute `reward_complaint` makes the check: from a truth it returns the fault, or None.
    """
    problems, known = Problems(), dict[tuple[str, str], str | None]()
    every = {term.name: getattr(term.fn, "reward_complaint", None) for term in as_sum(reward).terms}
    checks = {name: check for name, check in every.items() if check is not None}
    for place, truth in truths if checks else ():
        for name, check in checks.items():
            key = name, f"{type(truth).__name__} {truth!r}"
            if key not in known:
                known[key] = check(truth)
            if (wrong := known[key]) is not None:
                problems.add(f"the reward {name}: {wrong}", at=place)
    problems.check("ground truths")
