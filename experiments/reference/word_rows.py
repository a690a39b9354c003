"""The quickstart's word problems for `data.rows`: those to train on, and those that are held out."""

from collections.abc import Iterator
from typing import Any

from fppo import smol


def train() -> Iterator[dict[str, Any]]:
    return map(smol.row, smol.split()[0])


def test() -> Iterator[dict[str, Any]]:
    return map(smol.row, smol.split()[1])
