"""The mesh of a process, from its rank, and sums over the data axes."""

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
CUTTING_AXES = ("expert", "tensor")  # the axes over which a layout cuts parameters, each parameter over one
SHARD_AXES = ("shard", "expert")  # rows of parameters are sharded over both as over one axis, the last one fastest
DENSE = "shard-expert"  # the name of that joint axis, where both are wider than one rank; not among `AXES`
_OPS = {Sum: dist.ReduceOp.SUM, Max: dist.ReduceOp.MAX, Min: dist.ReduceOp.MIN}
BUCKET_BYTES = 25 * 2**20  # size of one all-reduce of many tensors
# the axes over which gradients are shares of a sum; over the tensor axis those of uncut parameters
GRADIENT_AXES = (*DATA_AXES, "sequence", "context", "tensor")


@attrs.frozen
class Sharding:
    """Sharding of parameters, gradients and moments over the ranks of `Mesh.shard_axis`: when they are gathered.

    `stage` 3 gathers a layer for its use, forward and again backward; 2 keeps it from forward to backward; 1 gathers
    all layers once for a mini-batch, and reduces its gradients once. Inputs and results of a step are the same.
    Gradients are summed in `reduce_dtype`, for float64 parameters in float64. With `prefetch` a layer is gathered while
    the one before it runs, and parameters outside the layers (embeddings, last norm, head) once for all passes of a
    mini-batch, except on a pipeline axis.
    """

    stage: int = attrs.field(default=3, validator=attrs.validators.in_((1, 2, 3)))
    reduce_dtype: torch.dtype = torch.float32
    prefetch: bool = True


@attrs.frozen
class Mesh:
    """A mesh of named axes; missing names are axes of one rank.

    Without `sharding` every rank of the shard axis holds whole parameters, and the axis only divides the data. Each
    rank of the pipeline axis has `virtual_stages` stages of a model's layers, which it runs in turn. `layout` is that
    of a model's parameters on the tensor, expert and pipeline axes, for summing, counting and applying gradients. With
    `ring` keys and values travel around the context axis; otherwise each rank of that axis gathers all of them. `wire`
    is the device that collectives take tensors from, where gradients are on the host (`host_step`).
    """

    axes: Mapping[str, Axis] = attrs.field(factory=dict)
    sharding: Sharding | None = None
    layout: Layout | None = None
    virtual_stages: int = 1
    ring: bool = False
    wire: torch.device | None = None

    def __attrs_post_init__(self) -> None:
        unknown = sorted(set(self.axes) - {*AXES, DENSE})
        if unknown:
            raise ValueError(f"unknown mesh axes {unknown}; choose from {list(AXES)}")

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
        """The axis that shards the rows of a parameter with this cut: the shard and expert axes as one; the shard axis
        alone for a cut over the expert axis; one rank without `sharding`.

        Its process group is the mesh's (`DENSE`), or that of a single axis.
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
        """Whether any axis leaves ranks with only some of the parameters, or with parts of them."""
        return self.sharded or any(self[name].size > 1 for name in (*CUTTING_AXES, "pipeline"))

    def counted(self, calls: collectives.Calls) -> Mesh:
        """This mesh, whose shard axis counts the collectives of sharded parameters in `calls`."""
        return attrs.evolve(self, axes={**self.axes, "shard": attrs.evolve(self["shard"], calls=calls)})

    @staticmethod
    def local() -> Mesh:
        """The mesh of one process."""
        return Mesh()

    @staticmethod
    def of(device_mesh: DeviceMesh) -> Mesh:
        """The mesh of torch's DeviceMesh, which must have named dimensions, from this process's rank."""
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
    """The axes of a mesh of `ranks`, in the order of its dimensions; with an expert axis also `SHARD_AXES` as one axis.
    Its new process group's collectives time out after `limit`. All processes must call.

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
    """The lines of `ranks` along these axes, the last one fastest: ranks that differ on no other axis. `names` are the
    dimensions of `ranks`."""
    dims = [names.index(name) for name in axes if name in names]
    size = math.prod(ranks.shape[dim] for dim in dims)
    return ranks.movedim(dims, list(range(-len(dims), 0))).reshape(-1, size).tolist()


def with_lanes(axes: Mapping[str, Axis], ranks: Tensor, rank: int, limit: timedelta | None = None) -> dict[str, Axis]:
    """Extend the pipeline axis of a mesh of `ranks`, as a ring, by process groups to and from each neighbour, whose
    messages time out after `limit`. All processes must call."""
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
    """The tree with every tensor summed over the ranks with different rows."""
    return _sum(values, mesh, DATA_AXES)


def gradient_sum(grads: T, mesh: Mesh) -> T:
    """Sum each rank's share of the gradient, from its rows and its slices of packed rows.

    Gradients of sharded parameters are already summed over `Mesh.shard_axis` by their reduce-scatter, and experts'
    gradients over the expert axis by the exchange of tokens. Over the tensor axis, and over the expert axis if nothing
    is sharded, gradients of uncut parameters are summed over all ranks and those of a part over its holders; over the
    pipeline axis those of parameters on several of its ranks (tied embeddings).
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
    """Sum the gradient of a parameter over the ranks `stages` that hold it, in their order, so that all get the same
    bits; other ranks get nothing. Every rank of the axis must call."""
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
    """Slots for the gradients of all parts [parts, ...] on the axis of this name, zero but for this rank's, and the
    index of this rank's part; None for the slots if every rank has a different part."""
    if cut is None or cut.axis != name:
        return grad[None], 0
    if cut.parts == axis.size:
        return None, axis.rank
    part = cut.part(axis.rank, axis.size)
    slots = grad.new_zeros(cut.parts, *grad.shape)
    slots[part] = grad
    return slots, part


def _sum(values: T, mesh: Mesh, names: Iterable[str]) -> T:
    """The tree with every tensor summed over these axes, in buckets of one dtype; results share memory by bucket."""
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
    """Group tensors for collectives: lists of indices, each of tensors of one dtype and device, which take at most
    `BUCKET_BYTES` together, or of one larger tensor. Leaves that are no tensors are left out."""
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
    """The number of ranks over these axes."""
    return math.prod(mesh[name].size for name in axes)


def place_on(mesh: Mesh, axes: Sequence[str]) -> int:
    """This rank's index over these axes, the last axis fastest."""
    place = 0
    for name in axes:
        place = place * mesh[name].size + mesh[name].rank
    return place


def is_first(mesh: Mesh) -> bool:
    """Whether this is the first rank, which logs, and writes replicated values."""
    return place_on(mesh, AXES) == 0


def any_rank(flag: bool, mesh: Mesh, device: torch.device) -> bool:
    """Whether the flag is set on any rank; every rank gets the same answer."""
    return bool(gather_over(torch.tensor(int(flag), device=device), mesh, AXES).any())


def gather_over(x: Tensor, mesh: Mesh, axes: Sequence[str]) -> Tensor:
    """Gather `x` from all ranks of these axes, of equal shapes: [ranks, *x.shape]. No gradients."""
    gathered = x.detach()[None]
    for name in reversed(axes):
        gathered = collectives.all_gather(gathered, mesh[name])
    return gathered


def gather_objects(value: Any, mesh: Mesh, axes: Sequence[str], device: torch.device) -> list[Any]:
    """Gather a JSON value from every rank of these axes. It travels as text: nothing is unpickled."""
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
    """The device of the parameters."""
    return next(iter(params.values())).device
