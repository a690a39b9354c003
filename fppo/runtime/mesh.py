"""The mesh as this process sees it, and sums over its data axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fppo import tree
from fppo.metrics import Max, Mean, Metrics, Min
from fppo_kernels.collectives import Axis

T = TypeVar("T")
AXES = ("replicate", "shard", "sequence", "tensor", "pipeline", "expert")
DATA_AXES = ("replicate", "shard")  # the axes whose ranks hold different rows
GRADIENT_AXES = (*DATA_AXES, "sequence")  # the axes over which gradients are shares


@attrs.frozen
class Sharding:
    """How parameters, gradients and moments lie on the shard axis: each rank holds a part, and when it gathers them.

    `stage` 3 gathers a layer where it is used, forward and again backward; 2 keeps it from one to the other; 1
    gathers all layers once for a mini-batch, whose gradients are reduced once. What a step takes and gives is the same.
    Gradients are added up in `reduce_dtype`, those of float64 parameters in float64. With `prefetch` a layer is
    gathered while the one before it runs.
    """

    stage: int = attrs.field(default=3, validator=attrs.validators.in_((1, 2, 3)))
    reduce_dtype: torch.dtype = torch.float32
    prefetch: bool = True


@attrs.frozen
class Mesh:
    """Axis names to axes. An axis that is not named is one rank wide.

    Without `sharding` every rank of the shard axis holds whole parameters, and the axis only parts the data.
    """

    axes: Mapping[str, Axis] = attrs.field(factory=dict)
    sharding: Sharding | None = None

    def __attrs_post_init__(self) -> None:
        unknown = sorted(set(self.axes) - set(AXES))
        if unknown:
            raise ValueError(f"unknown mesh axes {unknown}; there are {list(AXES)}")

    def __getitem__(self, name: str) -> Axis:
        return self.axes.get(name, Axis())

    @property
    def sharded(self) -> bool:
        """Whether parameters are cut over several ranks."""
        return self.sharding is not None and self["shard"].size > 1

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
        return Mesh(
            {name: Axis(n, device_mesh.get_local_rank(name), device_mesh.get_group(name)) for name, n in sizes.items()}
        )


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

    Gradients of sharded parameters are summed over the shard axis already, as they were scattered.
    """
    return _sum(grads, mesh, [name for name in GRADIENT_AXES if not (mesh.sharded and name == "shard")])


def _sum(values: T, mesh: Mesh, names: Iterable[str]) -> T:
    for name in names:
        if mesh[name].size > 1:
            axis = mesh[name]
            values = tree.map(lambda x, axis=axis: all_reduce(x, axis), values)
    return values


def data_metrics(metrics: Metrics, mesh: Mesh) -> Metrics:
    """Metrics over all data ranks; every rank must hold the same names."""
    if all(mesh[name].size == 1 for name in DATA_AXES):
        return metrics
    reduced: Metrics = {}
    for name, metric in metrics.items():
        match metric:
            case Mean():
                reduced[name] = Mean(*data_sum(tuple(metric), mesh))
            case Max(value) | Min(value):
                op = dist.ReduceOp.MAX if isinstance(metric, Max) else dist.ReduceOp.MIN
                for axis in DATA_AXES:
                    value = all_reduce(value, mesh[axis], op)
                reduced[name] = type(metric)(value)
    return reduced


def device_of(params: Mapping[str, Tensor]) -> torch.device:
    """The device that the parameters are on."""
    return next(iter(params.values())).device
