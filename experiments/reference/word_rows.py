"""The quickstart's word problems for `data.rows`, to train on and held out, with their score for other trainers."""

import re
from collections.abc import Iterator
from typing import Any

from fppo.quickstart import word_problems

HELD_OUT = "val-aux/word problems/regular_expression/mean@1"  # the metric of held-out answers that are right


def is_right(response: str, answer: str) -> float:
    """1 if the last number of a response is the answer, else 0."""
    found = re.search(word_problems.LAST_NUMBER, response)
    return float(found is not None and found[1] == answer)


def train() -> Iterator[dict[str, Any]]:
    return map(word_problems.row, word_problems.split()[0])


def test() -> Iterator[dict[str, Any]]:
    return map(word_problems.row, word_problems.split()[1])
