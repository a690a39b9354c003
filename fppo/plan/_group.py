"""Process groups that send nothing: they count, and answer as if every other rank did what this one does."""

# pyright: reportIncompatibleMethodOverride=false
# torch's stubs name the parameters of its C++ classes otherwise than torch calls them
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor

from fppo.runtime.mesh import DENSE, SHARD_AXES, Mesh, Sharding, place_on, ranks_on
from fppo.runtime.watch import wire_bytes
from fppo_kernels.collectives import Axis

# (axis, collective, bytes this rank sends, inputs, outputs, whether the caller waits)
Sent = Callable[[str, str, int, Sequence[Tensor], Sequence[Tensor], bool], None]


class CountingGroup(dist.ProcessGroup):
    """One rank's end of an axis whose other ranks are only imagined: equal to this one.

    Real tensors get what equal ranks would give; tensors without data get nothing.
    """

    def __init__(self, axis: str, size: int, rank: int, sent: Sent) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._axis, self._size, self._rank, self._sent = axis, size, rank, sent

    def __deepcopy__(self, memo: dict) -> CountingGroup:
        return self

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _count(
        self, op: str, whole: Sequence[Tensor], inputs: Any, outputs: Any, opts: Any, *, sent: int | None = None
    ) -> Any:
        if sent is None:
            sent = wire_bytes(op, sum(x.numel() * x.element_size() for x in whole), self._size)
        waits = not getattr(opts, "asyncOp", False)
        self._sent(self._axis, op, sent, list(inputs), list(outputs), waits)
        future: torch.futures.Future = torch.futures.Future()
        future.set_result([])
        return _create_work_from_future(future)

    @torch.no_grad()
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for x in tensors:
            if op == dist.ReduceOp.SUM and not isinstance(x, FakeTensor):
                x.mul_(self._size)
        return self._count("all_reduce", tensors, tensors, tensors, opts)

    @torch.no_grad()
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if not isinstance(output, FakeTensor):
            output.view(self._size, -1).copy_(input.reshape(1, -1))
        return self._count("all_gather", [output], [input], [output], opts)

    @torch.no_grad()
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if not isinstance(output, FakeTensor):
            output.view(-1).copy_(input.reshape(self._size, -1)[self._rank] * self._size)
        return self._count("reduce_scatter", [input], [input], [output], opts)

    @torch.no_grad()
    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Any:
        if not isinstance(output, FakeTensor):
            output.copy_(input)
        size = None
        if len(sent):
            size = (len(input) - sent[self._rank]) * math.prod(input.shape[1:]) * input.element_size()
        return self._count("all_to_all", [input], [input], [output], opts, sent=size)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._count("broadcast", tensors, tensors, tensors, opts)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Any:
        del target, tag
        return self._count("send", tensors, tensors, [], None)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        del source, tag
        return self._count("receive", tensors, [], tensors, None)

    def barrier(self, opts: Any = None) -> Any:
        return self._count("barrier", [], [], [], opts)

    # the names before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def counting_mesh(
    sizes: Mapping[str, int],
    ranks: Mapping[str, int],
    sharding: Sharding | None,
    sent: Sent,
    *,
    virtual_stages: int = 1,
) -> Mesh:
    """The mesh of these sizes as the rank at these places sees it; a rank that is not given is 0."""
    axes = {
        name: Axis(size, ranks.get(name, 0), CountingGroup(name, size, ranks.get(name, 0), sent) if size > 1 else None)
        for name, size in sizes.items()
    }
    mesh = Mesh(axes, sharding=sharding, virtual_stages=virtual_stages)
    if mesh["expert"].size == 1:
        return mesh
    size, rank = ranks_on(mesh, SHARD_AXES), place_on(mesh, SHARD_AXES)
    return attrs.evolve(mesh, axes={**axes, DENSE: Axis(size, rank, CountingGroup(DENSE, size, rank, sent))})
