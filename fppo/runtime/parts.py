"""The part of a tensor on a rank (rows of a shard, cut on the tensor or expert axis, pipeline stage), and the whole
tensor from all parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from fppo.runtime import fsdp
from fppo.runtime.layout import Box, Cut, Extent, Layout, boxes
from fppo.runtime.mesh import Mesh, device_of, gather_objects
from fppo_kernels.collectives import Axis


@attrs.frozen
class Part:
    """The part of a leaf of `shape` on one rank, by its `shard` axis (`Mesh.shard_axis`) and the `cutting` axis of its
    cut. Each is (rank, ranks), (0, 1) without a cut. `stage` is the first pipeline rank that holds the leaf; `experts`
    is the number of expert ranks that shard its rows jointly with each rank of the shard axis."""

    shape: tuple[int, ...]
    cut: Cut | None = None
    cutting: tuple[int, int] = (0, 1)
    shard: tuple[int, int] = (0, 1)
    stage: int = 0
    experts: int = 1

    @property
    def number(self) -> int:
        """The index of the part in the cut."""
        return 0 if self.cut is None else self.cut.part(*self.cutting)

    @property
    def rows(self) -> tuple[int, int]:
        """The range of the part's rows in the sharded tensor; a leaf without dimensions has one row."""
        count = self.shape[0] if self.shape else 1
        if self.cut is not None and self.cut.dim == 0:
            count = self.cut.size(self.number)
        return fsdp.bounds(count, Axis(self.shard[1], self.shard[0]))

    @property
    def boxes(self) -> list[Box]:
        """The boxes of the whole leaf that make up the part."""
        every = boxes(self.shape, self.cut, self.number)
        return [part for box in every if (part := box.within(*self.rows))] if self.shape else every

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that holds the part."""
        shape, (start, stop) = list(self.shape), self.rows
        if self.cut is not None:
            shape[self.cut.dim] = self.cut.size(self.number)
        return (stop - start, *shape[1:]) if shape else ()

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the cut's axis with this part."""
        return self.cut is None or self.cut.first(self.number, self.cutting[1]) == self.cutting[0]


def part_of(extent: torch.Size | Extent, mesh: Mesh) -> Part:
    """This rank's part of a tensor with this extent: sharded if the mesh shards, and cut over the axis of its cut."""
    whole = extent if isinstance(extent, Extent) else Extent(extent)
    cut, axis = whole.cut, mesh.shard_axis(whole.cut)
    cutting = (0, 1) if cut is None else (mesh[cut.axis].rank, mesh[cut.axis].size)
    stage, experts = whole.stages[0] if whole.stages else 0, axis.size // mesh["shard"].size if mesh.sharded else 1
    return Part(tuple(whole.shape), cut, cutting, (axis.rank, axis.size), stage, experts)


def holds(extent: torch.Size | Extent, mesh: Mesh) -> bool:
    """Whether this rank of the mesh holds a tensor of this extent, whole or in part."""
    return not isinstance(extent, Extent) or not extent.stages or mesh["pipeline"].rank in extent.stages


def overlaps(part: Part, other: Part) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The slices of the intersections of two parts of a leaf, in the first part's tensor and in the other's."""
    for box, other_box in itertools.product(part.boxes, other.boxes):
        if (places := box.shared(other_box)) is not None:
            yield places


def dtypes_of(params: Mapping[str, Tensor], mesh: Mesh) -> dict[str, torch.dtype]:
    """The dtypes of the parameters of all pipeline ranks; every one must call."""
    own = {name: str(x.dtype).removeprefix("torch.") for name, x in params.items()}
    every = gather_objects(own, mesh, ["pipeline"], device_of(params))
    return {name: getattr(torch, kind) for each in every for name, kind in each.items()}


@torch.no_grad()
def whole_tensors(
    params: Mapping[str, Tensor],
    names: Iterable[str],
    mesh: Mesh,
    *,
    shapes: Mapping[str, torch.Size],
    layout: Layout | None,
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Tensor]:
    """Gather whole parameters of these names, in `dtypes`, from the parts of all ranks of the mesh (`params`: this
    rank's). Every rank must call.

    `shapes` are those of the layout's parts, or whole ones without a layout.
    """
    if layout is None:
        return fsdp.gather({name: params[name] for name in names}, shapes, mesh, dtypes=dtypes)
    pieces = _on_all_stages(params, list(names), mesh, layout, dtypes)
    pieces = fsdp.gather(pieces, {name: layout.shape(name) for name in pieces}, mesh, cuts=layout.cuts)
    return {name: layout.gather(name, pieces.pop(name), mesh.__getitem__) for name in list(pieces)}


def _on_all_stages(
    params: Mapping[str, Tensor], names: list[str], mesh: Mesh, layout: Layout, dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Collect this rank's pieces of all stages' parameters. The first pipeline rank that holds a parameter sends it to
    stages without it."""
    axis, device = mesh["pipeline"], device_of(params)
    pieces = {name: params[name].to(dtypes[name]) for name in names if layout.holds(name)}
    sent: dict[tuple[int, torch.dtype], list[str]] = {}
    for name in names:
        if layout.stages and len(layout.stages[name]) < axis.size:
            sent.setdefault((layout.source(name), dtypes[name]), []).append(name)
    for (source, dtype), group in sent.items():
        shapes = [torch.Size(part_of(layout.extent(name), mesh).own_shape) for name in group]
        if axis.rank == source:
            flat = torch.cat([pieces[name].flatten() for name in group])
        else:
            flat = torch.empty(sum(shape.numel() for shape in shapes), dtype=dtype, device=device)
        dist.broadcast(flat, group=axis.group, group_src=source)
        for name, shape, x in zip(group, shapes, flat.split([shape.numel() for shape in shapes]), strict=True):
            pieces.setdefault(name, x.view(shape))
    return {name: pieces[name] for name in names}
