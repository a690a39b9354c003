"""Which part of a tensor a rank holds: its rows on the shard axis, of its cut on the tensor axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs
import torch

from fppo.runtime import fsdp
from fppo.runtime.layout import Box, Cut, Extent, boxes
from fppo.runtime.mesh import Mesh
from fppo_kernels.collectives import Axis


@attrs.frozen
class Part:
    """What one rank of a shard axis and a tensor axis holds of a leaf that has `shape`. Each axis is (rank, ranks), and
    (0, 1) where the leaf is not cut over it."""

    shape: tuple[int, ...]
    cut: Cut | None = None
    tensor: tuple[int, int] = (0, 1)
    shard: tuple[int, int] = (0, 1)

    @property
    def number(self) -> int:
        """Which part of the cut it is."""
        return 0 if self.cut is None else self.cut.part(*self.tensor)

    @property
    def rows(self) -> tuple[int, int]:
        """Its rows of what the ranks of the shard axis cut; a leaf without dimensions has one."""
        count = self.shape[0] if self.shape else 1
        if self.cut is not None and self.cut.dim == 0:
            count = self.cut.size(self.number)
        return fsdp.bounds(count, Axis(self.shard[1], self.shard[0]))

    @property
    def boxes(self) -> list[Box]:
        """The boxes of the whole leaf that it is made of."""
        every = boxes(self.shape, self.cut, self.number)
        return [part for box in every if (part := box.within(*self.rows))] if self.shape else every

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that holds it."""
        shape, (start, stop) = list(self.shape), self.rows
        if self.cut is not None:
            shape[self.cut.dim] = self.cut.size(self.number)
        return (stop - start, *shape[1:]) if shape else ()

    @property
    def is_first(self) -> bool:
        """Whether no rank before this one of the tensor axis holds the same."""
        return self.cut is None or self.cut.first(self.number, self.tensor[1]) == self.tensor[0]


def part_of(extent: torch.Size | Extent, mesh: Mesh) -> Part:
    """What this rank of the mesh holds of a tensor that is cut over its shard axis, if that cuts any, and as the extent
    says over the tensor axis."""
    shard = (mesh["shard"].rank, mesh["shard"].size) if mesh.sharded else (0, 1)
    if not isinstance(extent, Extent):
        return Part(tuple(extent), shard=shard)
    return Part(tuple(extent.shape), extent.cut, (mesh["tensor"].rank, mesh["tensor"].size), shard)


def overlaps(part: Part, other: Part) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Where what two parts of a leaf have in common stands in the tensor that holds the one, and in the other's."""
    for box, other_box in itertools.product(part.boxes, other.boxes):
        if (places := box.shared(other_box)) is not None:
            yield places
