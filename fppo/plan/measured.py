"""The same stages on real tensors and a real mesh, simulated or not: what a plan is compared with."""

# pyright: reportIncompatibleMethodOverride=false
# torch's stubs name the parameters of its C++ classes otherwise than torch calls them
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fppo import models
from fppo.key import Key
from fppo.plan import passes
from fppo.plan._group import Sent
from fppo.plan._track import Tracker
from fppo.plan.case import Case
from fppo.plan.values import Phase
from fppo.runtime import fsdp
from fppo.runtime.mesh import Mesh
from fppo.runtime.watch import wire_bytes
from fppo.steps.forward import Forward
from fppo.steps.train_state import TrainState, init_state
from fppo_kernels.collectives import Axis


def measured(case: Case, name: str, mesh: Mesh) -> list[Phase]:
    """What the stage holds, computes and sends on this rank of `mesh`, whose sizes are the case's.

    It runs on the CPU, in as many passes as a plan runs.
    """
    tracker = Tracker(on_gpu=case.hardware.on_gpu)
    state, run, batch = prepared(case, name, telling(mesh, tracker.sent), tracker)
    return passes.tracked(case, tracker, run, state, batch)


def prepared(
    case: Case, name: str, mesh: Mesh, tracker: Tracker
) -> tuple[TrainState, Callable[[TrainState], Any], Any]:
    """A fresh state of the stage's model on this rank, the stage as a function of it, and the rows that it runs on."""
    if case.size("shard") > 1:
        mesh = attrs.evolve(mesh, sharding=case.sharding)
    model, batch = passes.model_of(case, passes.STAGES[name]), passes.rows_of_stage(case, name)
    forward = Forward(model, kernels=passes.kernels_of(case, tracker), mesh=mesh)
    shards = fsdp.shard(models.init_params(model, Key(0)), mesh)
    return init_state(shards, passes.optimizer_of(case)), passes.stage_of(case, name, batch, forward=forward), batch


def telling(mesh: Mesh, sent: Sent) -> Mesh:
    """The mesh, whose collectives go to `sent` before they run."""
    axes = {
        name: axis if axis.group is None else Axis(axis.size, axis.rank, _TellingGroup(name, axis, sent))
        for name, axis in mesh.axes.items()
    }
    return attrs.evolve(mesh, axes=axes)


class _TellingGroup(dist.ProcessGroup):
    """A group that hands everything on to another."""

    def __init__(self, name: str, axis: Axis, sent: Sent) -> None:
        super().__init__(axis.rank, axis.size)  # type: ignore[call-arg]
        self._name, self._axis, self._sent = name, axis, sent

    def __deepcopy__(self, memo: dict) -> _TellingGroup:
        return self

    def size(self) -> int:
        return self._axis.size

    def rank(self) -> int:
        return self._axis.rank

    def _tell(self, op: str, whole: list[Tensor], inputs: list[Tensor], outputs: list[Tensor], opts: Any) -> None:
        size = sum(x.numel() * x.element_size() for x in whole)
        waits = not getattr(opts, "asyncOp", False)
        self._sent(self._name, op, wire_bytes(op, size, self._axis.size), inputs, outputs, waits)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        self._tell("all_reduce", tensors, tensors, tensors, opts)
        with _disable_current_modes():
            return self._axis.group.allreduce(tensors, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        self._tell("all_gather", [output], [input], [output], opts)
        with _disable_current_modes():
            return self._axis.group.all_gather_single(output, input, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        self._tell("reduce_scatter", [input], [input], [output], opts)
        with _disable_current_modes():
            return self._axis.group.reduce_scatter_single(output, input, opts)

    def all_to_all_single(self, output: Tensor, input: Tensor, received: Any, sent: Any, opts: Any = None) -> Any:
        self._tell("all_to_all", [input], [input], [output], opts)
        with _disable_current_modes():
            return self._axis.group.all_to_all_single(output, input, received, sent, opts)

    def barrier(self, opts: Any = None) -> Any:
        self._tell("barrier", [], [], [], opts)
        return self._axis.group.barrier(opts)

    # the names before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
