"""The quickstart's word problems for `data.rows`: those to train on, and those that are held out."""

from collections.abc import Iterator
from typing import Any

from fppo.quickstart import word_problems


def train() -> Iterator[dict[str, Any]]:
    return map(word_problems.row, word_problems.split()[0])


def test() -> Iterator[dict[str, Any]]:
    return map(word_problems.row, word_problems.split()[1])
