"""Sketches of tensors: a few numbers each, from which the size of a difference can be told later.

A digest tells that two tensors differ, and not by how much. A sketch has sums of a tensor's numbers with random signs.
The square of the difference of two such sums has the sum of the squared differences as its mean (Alon, Matias and
Szegedy, 1996, "The space complexity of approximating the frequency moments"), so the mean over a few tells the size
within a factor of about two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo import devices, tree
from fppo.key import Key

SUMS = 4
MOST = 1 << 20  # numbers of a leaf that are looked at, evenly over it
_WIDTH = 1 << 10  # numbers in a row; a number's sign is that of its row times that of its column
_DIGITS = 12


@attrs.frozen
class Size:
    """The size of a difference of two tensors: the root mean square of the difference (`apart`), and the larger one of
    the two tensors (`of`)."""

    apart: float
    of: float

    @property
    def relative(self) -> float:
        """The difference as a share of the numbers' size; inf if the numbers are all 0."""
        return self.apart / self.of if self.of else math.inf

    def __str__(self) -> str:
        return f"about {self.apart:.0e} in numbers of about {self.of:.0e}"


@functools.cache
def _signs(device: torch.device) -> tuple[Tensor, Tensor]:
    """The signs of rows [SUMS, MOST / _WIDTH] and of columns [SUMS, _WIDTH], float64."""
    drawn = Key(0x5EED).fold("sketch").uniform(torch.arange(SUMS), MOST // _WIDTH + _WIDTH)
    rows, columns = (drawn.double() - 0.5).sign().to(device).split([MOST // _WIDTH, _WIDTH], 1)
    return rows, columns


@torch.no_grad()
def sketch(x: Tensor) -> list[float] | None:
    """The count of the numbers looked at, their root mean square, and their sums with random signs; None for a tensor
    that is empty, not of floating-point numbers, or with some that are not finite."""
    if not x.is_floating_point() or not x.numel():
        return None
    flat = x.detach().reshape(-1)
    flat = devices.wide(flat[:: math.ceil(len(flat) / MOST)])
    if not flat.isfinite().all():
        return None
    rows, columns = _signs(flat.device)
    grid = torch.nn.functional.pad(flat, (0, -len(flat) % _WIDTH)).view(-1, _WIDTH)
    sums = ((grid @ columns.T) * rows[:, : len(grid)].T).sum(0)
    every = [flat.square().mean().sqrt(), *sums]
    return [float(len(flat)), *(float(f"{number:.{_DIGITS}g}") for number in torch.stack(every).tolist())]


def sketches(value: Any) -> dict[str, list[float]]:
    """The sketch of each leaf that has one, by its path."""
    made = {path: sketch(x) for path, x in tree.leaves_with_paths(value) if isinstance(x, Tensor)}
    return {path: x for path, x in made.items() if x is not None}


def size_of(old: Sequence[float] | None, new: Sequence[float] | None) -> Size | None:
    """The size of the difference of two tensors, by their sketches; None if one is missing, or their counts differ."""
    if old is None or new is None or len(old) != len(new) or old[0] != new[0]:
        return None
    count, squares = old[0], [(a - b) ** 2 for a, b in zip(old[2:], new[2:], strict=True)]
    return Size(math.sqrt(sum(squares) / len(squares) / count), max(old[1], new[1]))
