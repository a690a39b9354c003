"""The mesh as this process sees it, and sums over its data axes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from fppo.metrics import Max, Mean, Metrics, Min, Sum, Term
from fppo.runtime.layout import Cut, Layout
from fppo_kernels import collectives
from fppo_kernels.collectives import Axis

T = TypeVar("T")
# ranks of the last axis are neighbours
AXES = ("pipeline", "replicate", "shard", "expert", "sequence", "context", "tensor")
DATA_AXES = ("replicate", "shard", "expert")  # the axes whose ranks hold different rows
CUTTING_AXES = ("expert", "tensor")  # over which a layout cuts parameters, each of them over one
SHARD_AXES = ("shard", "expert")  # over which rows of parameters are sharded, as over one axis, the last one fastest
DENSE = "shard-expert"  # the name of that axis, where both are wider than one rank; it is none of `AXES`
_OPS = {Sum: dist.ReduceOp.SUM, Max: dist.ReduceOp.MAX, Min: dist.ReduceOp.MIN}
BUCKET_BYTES = 25 * 2**20  # of one all-reduce of many tensors
# the axes over which gradients are shares; over the tensor axis, those of what it does not cut
GRADIENT_AXES = (*DATA_AXES, "sequence", "context", "tensor")


@attrs.frozen
class Sharding:
    """How parameters, gradients and moments lie on the ranks of `Mesh.shard_axis`, each of which holds a part, and when
    they are gathered.

    `stage` 3 gathers a layer where it is used, forward and again backward; 2 keeps it from one to the other; 1
    gathers all layers once for a mini-batch, whose gradients are reduced once. What a step takes and gives is the same.
    Gradients are added up in `reduce_dtype`, those of float64 parameters in float64. With `prefetch` a layer is
    gathered while the one before it runs, and what is outside the layers (embeddings, last norm, head) once for all
    passes of a mini-batch, but on a pipeline axis.
    """

    stage: int = attrs.field(default=3, validator=attrs.validators.in_((1, 2, 3)))
    reduce_dtype: torch.dtype = torch.float32
    prefetch: bool = True


@attrs.frozen
class Mesh:
    """Axis names to axes. An axis that is not named is one rank wide.

    Without `sharding` every rank of the shard axis holds whole parameters, and the axis only divides the data. Each
    rank of the pipeline axis has `virtual_stages` stages of a model's layers, which it runs by turns. `layout` is that
    of a model's parameters on the tensor, expert and pipeline axes, where gradients of them are summed, counted and
    applied.
    With `ring` keys and values travel around the context axis, where else each of its ranks gathers them all.
    """

    axes: Mapping[str, Axis] = attrs.field(factory=dict)
    sharding: Sharding | None = None
    layout: Layout | None = None
    virtual_stages: int = 1
    ring: bool = False

    def __attrs_post_init__(self) -> None:
        unknown = sorted(set(self.axes) - {*AXES, DENSE})
        if unknown:
            raise ValueError(f"unknown mesh axes {unknown}; there are {list(AXES)}")

    def __getitem__(self, name: str) -> Axis:
        return self.axes.get(name, Axis())

    @property
    def token_axis(self) -> Axis:
        """The axis whose ranks have different tokens of a packed row."""
        return self["context"] if self["context"].size > 1 else self["sequence"]

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded over several ranks."""
        return self.shard_axis().size > 1

    def shard_axis(self, cut: Cut | None = None) -> Axis:
        """The ranks that share the rows of a parameter with this cut: those of the shard and expert axes as one axis,
        of a part that the expert axis cuts those of the shard axis alone; without `sharding` one rank.

        It has a group where the mesh has one for it (`DENSE`), or needs none of its own.
        """
        if self.sharding is None:
            return Axis()
        shard, expert = self["shard"], self["expert"]
        if expert.size == 1 or (cut is not None and cut.axis == "expert"):
            return shard
        place = Axis(shard.size * expert.size, shard.rank * expert.size + expert.rank)
        return self.axes.get(DENSE, expert if shard.size == 1 else place)

    @property
    def cuts(self) -> bool:
        """Whether a rank holds less than all parameters whole, on any axis."""
        return self.sharded or any(self[name].size > 1 for name in (*CUTTING_AXES, "pipeline"))

    @staticmethod
    def local() -> Mesh:
        """The mesh of one process."""
        return Mesh()

    @staticmethod
    def of(device_mesh: DeviceMesh) -> Mesh:
        """The axes of torch's DeviceMesh, which must have names, as this process sees them."""
        names = device_mesh.mesh_dim_names or ()
        if len(names) != device_mesh.ndim:
            raise ValueError(
                f"the dimensions of {device_mesh} have no names: give mesh_dim_names, some of {list(AXES)}"
            )
        sizes = {name: device_mesh.size(dim) for dim, name in enumerate(names)}
        axes = {
            name: Axis(n, device_mesh.get_local_rank(name), device_mesh.get_group(name)) for name, n in sizes.items()
        }
        axes = with_dense(axes, device_mesh.mesh, dist.get_rank())
        return Mesh(with_lanes(axes, device_mesh.mesh, dist.get_rank()))


def with_dense(axes: Mapping[str, Axis], ranks: Tensor, rank: int, limit: timedelta | None = None) -> dict[str, Axis]:
    """The axes of a mesh of `ranks`, in their order; if there is an expert axis, also `SHARD_AXES` as one, with a new
    group, whose collectives wait no longer than `limit`. All processes must call.

    Raises ValueError for an expert axis before the shard axis: torch's groups have their ranks in order.
    """
    if axes.get("expert", Axis()).size == 1:
        return dict(axes)
    lines = lines_of(ranks, list(axes), SHARD_AXES)
    if any(line != sorted(line) for line in lines):
        raise ValueError(f"the mesh has the axes {list(axes)}: name shard before expert")
    groups = [(line, dist.new_group(line, timeout=limit)) for line in lines]  # every rank makes all of them
    line, group = next((line, group) for line, group in groups if rank in line)
    return {**axes, DENSE: Axis(len(line), line.index(rank), group)}


def lines_of(ranks: Tensor, names: Sequence[str], axes: Sequence[str]) -> list[list[int]]:
    """The ranks that have other places on these axes alone, the last one fastest, of `ranks` whose dimensions are those
    of `names`."""
    dims = [names.index(name) for name in axes if name in names]
    size = math.prod(ranks.shape[dim] for dim in dims)
    return ranks.movedim(dims, list(range(-len(dims), 0))).reshape(-1, size).tolist()


def with_lanes(axes: Mapping[str, Axis], ranks: Tensor, rank: int, limit: timedelta | None = None) -> dict[str, Axis]:
    """The axes of a mesh of `ranks`, in their order; the pipeline axis with a lane to and from either neighbour around
    it, with new groups, whose messages wait no longer than `limit`. All processes must call."""
    axis = axes.get("pipeline", Axis())
    if axis.size == 1:
        return dict(axes)
    ring = [(place, (place + 1) % axis.size) for place in range(axis.size)]
    lanes = {}
    for line in lines_of(ranks, list(axes), ["pipeline"]):
        for pair in dict.fromkeys([*ring, *((after, before) for before, after in ring)]):
            own = sorted(line[place] for place in pair)
            group = dist.new_group(own, timeout=limit)  # all processes make all groups
            lanes |= {pair: group} if rank in own else {}
    return {**axes, "pipeline": attrs.evolve(axis, lanes=lanes)}


LOCAL = Mesh.local()  # the default of functions that take a mesh


def all_reduce(x: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """`x` reduced over the axis, a new tensor; `x` itself on an axis of one rank. Not differentiable."""
    if axis.size == 1:
        return x
    reduced = x.detach().clone()
    dist.all_reduce(reduced, op=op, group=axis.group)
    return reduced


def data_sum(values: T, mesh: Mesh) -> T:
    """The tree with every tensor summed over all ranks that hold other rows."""
    return _sum(values, mesh, DATA_AXES)


def gradient_sum(grads: T, mesh: Mesh) -> T:
    """The gradient, from each rank's share: of its rows, and of its slices of the packed rows.

    Gradients of sharded parameters are summed over `Mesh.shard_axis` already, as they were scattered; those of experts
    are sums over the expert axis, whose tokens came to them. Over the tensor axis, and over the expert axis if nothing
    is sharded, those of parameters that they do not cut are summed, and those of a part over the ranks that hold it;
    over the pipeline axis those of parameters that several of its ranks hold (tied embeddings).
    """
    done = set(SHARD_AXES) if mesh.sharded else set()
    cutting = [] if mesh.layout is None else [axis for axis in CUTTING_AXES if axis not in done]
    done |= {"tensor", *cutting}
    result: Any = _sum(grads, mesh, [name for name in GRADIENT_AXES if name not in done])
    if mesh.layout is None:
        return result
    for axis in cutting:
        slots = {name: _slots(g, mesh.layout.cuts.get(name), axis, mesh[axis]) for name, g in result.items()}
        whole = _sum({name: slot for name, (slot, _) in slots.items() if slot is not None}, mesh, [axis])
        result = {name: whole[name][slots[name][1]] if name in whole else g for name, g in result.items()}
    for name, stages in mesh.layout.stages.items():
        if len(stages) > 1:
            result |= _sum_copies(name, result, stages, mesh["pipeline"])
    return result


def _sum_copies(name: str, grads: Mapping[str, Tensor], stages: Sequence[int], axis: Axis) -> dict[str, Tensor]:
    """The gradient of a parameter that these ranks of the axis hold, summed in their order, so all have the same bits;
    other ranks exchange nothing, and get nothing. Every rank of the axis must call."""
    own = grads.get(name)
    empty = next(iter(grads.values())).new_empty(0)
    flat = empty if own is None else own.detach().flatten()
    others = [stage for stage in stages if stage != axis.rank]
    counts = [len(flat) if stage in others else 0 for stage in range(axis.size)]
    received = flat.new_empty(sum(counts))
    dist.all_to_all_single(received, flat.repeat(len(others) if len(flat) else 1), counts, counts, group=axis.group)
    if own is None:
        return {}
    copies = dict(zip(others, received.split(len(flat)), strict=True)) | {axis.rank: flat}
    first, *rest = (copies[stage] for stage in stages)
    total = first.clone()
    for copy in rest:
        total += copy
    return {name: total.view(own.shape)}


def _slots(grad: Tensor, cut: Cut | None, name: str, axis: Axis) -> tuple[Tensor | None, int]:
    """A place for the gradient of each part [parts, ...] on the axis of this name, zero but for this rank's, and this
    rank's part; None where every rank has a part of its own."""
    if cut is None or cut.axis != name:
        return grad[None], 0
    if cut.parts == axis.size:
        return None, axis.rank
    part = cut.part(axis.rank, axis.size)
    slots = grad.new_zeros(cut.parts, *grad.shape)
    slots[part] = grad
    return slots, part


def _sum(values: T, mesh: Mesh, names: Iterable[str]) -> T:
    """The tree with every tensor summed over these axes, in buckets of one dtype: new tensors that share memory."""
    axes = [mesh[name] for name in names if mesh[name].size > 1]
    if not axes:
        return values
    leaves, spec = pytree.tree_flatten(values)
    reduced = dict(enumerate(leaves))
    buckets = [(places, torch.cat([leaves[i].detach().flatten() for i in places])) for places in _buckets(leaves)]
    for axis in axes:
        for work in [dist.all_reduce(flat, group=axis.group, async_op=True) for _, flat in buckets]:
            work.wait()  # type: ignore[union-attr]
    for places, flat in buckets:
        for i, x in zip(places, flat.split([leaves[i].numel() for i in places]), strict=True):
            reduced[i] = x.view(leaves[i].shape)
    return pytree.tree_unflatten(list(reduced.values()), spec)


def _buckets(leaves: Sequence[Any]) -> list[list[int]]:
    """Places of the tensors that one collective takes: of one dtype and device, of `BUCKET_BYTES` or one tensor."""
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor):
            continue
        places, size = filling.pop((x.dtype, x.device), ([], 0))
        if places and size + x.nbytes > BUCKET_BYTES:
            full.append(places)
            places, size = [], 0
        filling[x.dtype, x.device] = ([*places, i], size + x.nbytes)
    return full + [places for places, _ in filling.values()]


def ranks_on(mesh: Mesh, axes: Sequence[str]) -> int:
    """How many ranks there are over these axes."""
    return math.prod(mesh[name].size for name in axes)


def place_on(mesh: Mesh, axes: Sequence[str]) -> int:
    """This rank's number among those of these axes, the last axis fastest."""
    place = 0
    for name in axes:
        place = place * mesh[name].size + mesh[name].rank
    return place


def is_first(mesh: Mesh) -> bool:
    """Whether this is the rank that speaks for all: it logs, and writes what all ranks hold."""
    return place_on(mesh, AXES) == 0


def any_rank(flag: bool, mesh: Mesh, device: torch.device) -> bool:
    """Whether the flag is set on any rank; every rank gets the same answer."""
    return bool(gather_over(torch.tensor(int(flag), device=device), mesh, AXES).any())


def gather_over(x: Tensor, mesh: Mesh, axes: Sequence[str]) -> Tensor:
    """`x` of all ranks of these axes, of equal shapes, one after the other [ranks, *x.shape]. No gradients."""
    gathered = x.detach()[None]
    for name in reversed(axes):
        gathered = collectives.all_gather(gathered, mesh[name])
    return gathered


def gather_objects(value: Any, mesh: Mesh, axes: Sequence[str], device: torch.device) -> list[Any]:
    """A value that fits JSON, of every rank of these axes. It travels as text: nothing is unpickled."""
    if ranks_on(mesh, axes) == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = gather_over(torch.tensor(len(text), device=device), mesh, axes).tolist()
    padded = text.new_zeros(max(lengths))
    padded[: len(text)] = text
    texts = gather_over(padded, mesh, axes).cpu()
    return [json.loads(bytes(x[:length].tolist())) for x, length in zip(texts, lengths, strict=True)]


def data_metrics(metrics: Metrics, mesh: Mesh) -> Metrics:
    """Metrics over all data ranks; every rank must hold the same names."""
    if ranks_on(mesh, DATA_AXES) == 1:
        return metrics
    sums = data_sum({name: tuple(metric) for name, metric in metrics.items() if isinstance(metric, Mean | Term)}, mesh)
    reduced: Metrics = {}
    for name, metric in metrics.items():
        match metric:
            case Mean() | Term():
                reduced[name] = type(metric)(*sums[name])
            case Sum(value) | Max(value) | Min(value):
                op = _OPS[type(metric)]
                for axis in DATA_AXES:
                    value = all_reduce(value, mesh[axis], op)
                reduced[name] = type(metric)(value)
    return reduced


def device_of(params: Mapping[str, Tensor]) -> torch.device:
    """The device that the parameters are on."""
    return next(iter(params.values())).device
