"""Run planned stages on real tensors and a real or simulated mesh, for comparison with a plan."""

# pyright: reportIncompatibleMethodOverride=false
# torch's stubs name the parameters of its C++ classes otherwise than torch calls them
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fppo import models, tree
from fppo.batch import Experience
from fppo.key import Key
from fppo.runtime.mesh import Mesh
from fppo.runtime.watch import RelayGroup, wire_bytes, without_default
from fppo.steps import experts
from fppo.steps.forward import Forward, compute_outputs
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.train_state import Params, TrainState, init_state
from fppo.studies.plan import passes
from fppo.studies.plan.case import Case
from fppo.studies.plan.passes import STAGES, model_of
from fppo.studies.plan.track import Phase, Sent, Tracker
from fppo_kernels.collectives import Axis


def measured(case: Case, name: str, mesh: Mesh) -> list[Phase]:
    """Measure memory, FLOPs and traffic of the stage on this rank of `mesh`, whose sizes are the case's.

    It runs on the CPU, in as many passes as a plan runs.
    """
    tracker = Tracker(on_gpu=case.hardware.on_gpu)
    state, run, batch = prepared(case, name, telling(mesh, tracker.sent), tracker)
    return passes.tracked(case, tracker, run, state, batch)


def prepared(
    case: Case, name: str, mesh: Mesh, tracker: Tracker
) -> tuple[TrainState, Callable[[TrainState], Any], Any]:
    """A fresh state of the stage's model on this rank, the stage as a function of that state, and the stage's rows."""
    params, forward, batch = _parts(case, name, mesh, tracker)
    stage = passes.stage_of(
        case, name, batch, forward=forward, shelf=passes.Shelf(tracker), home=passes.Shelf(tracker, passes.HOST)
    )
    return init_state(params, passes.optimizer_of(case)), stage, batch


def loads_of(case: Case, name: str, mesh: Mesh) -> list[float]:
    """Token loads of the ranks of an expert axis, relative to their mean, as the model's routers choose experts for all
    rows of the stage. Every rank of `mesh` must call this."""
    params, forward, batch = _parts(case, name, mesh, Tracker())
    passed = MicroBatching(token_budget=case.tokens)
    routed = compute_outputs(params, batch, forward=forward, micro_batching=passed, outputs=("routed",)).routed
    assert routed is not None
    mask = experts.counted(batch.attention_mask, batch.response_mask).flatten()
    loads = experts.loads(routed.flatten(0, 1), mask, forward.model.routers[0].experts)
    return experts.rank_loads(loads, case.size("expert")).tolist()


def _parts(case: Case, name: str, mesh: Mesh, tracker: Tracker) -> tuple[Params, Forward, Experience]:
    """The parameters of the stage's model on this rank, its `Forward`, and rows of random tokens."""
    mesh = attrs.evolve(mesh, sharding=case.sharding if case.shards > 1 else None, ring=case.ring)
    model = models.place(model_of(case, STAGES[name]), mesh)
    batch = passes.rows_of_stage(case, name)
    words = torch.arange(batch.tokens.numel()).view_as(batch.tokens) % model.config.vocab_size
    forward = Forward(model, kernels=passes.kernels_of(case, tracker), mesh=mesh, share_prompts=False)
    shards = tree.map(lambda x: x.to(case.dtype), models.own_params(model, models.init_params(model, Key(0)), mesh))
    return shards, forward, tree.replace(batch, tokens=words)


def telling(mesh: Mesh, sent: Sent) -> Mesh:
    """A copy of the mesh whose process groups report each collective to `sent` before running it."""
    axes = {
        name: axis if axis.group is None else Axis(axis.size, axis.rank, _TellingGroup(name, axis.group, sent))
        for name, axis in mesh.axes.items()
    }
    return attrs.evolve(mesh, axes=axes)


class _TellingGroup(RelayGroup):
    """A process group that reports each collective to `sent` before running it."""

    def __init__(self, name: str, group: Any, sent: Sent) -> None:
        super().__init__(group)
        self._name, self._sent = name, sent

    def _call(
        self, op: str, whole: Sequence[Tensor], call: Callable[..., Any], *args: Any, sent: int | None = None
    ) -> Any:
        if sent is None:
            sent = wire_bytes(op, sum(x.numel() * x.element_size() for x in whole), self._size)
        waits = not getattr(args[-1], "asyncOp", False)
        outputs, inputs = map(pytree.tree_leaves, args[:2]) if len(args) > 2 else (list(whole), list(whole))
        self._sent(self._name, op, sent, inputs, outputs, waits)
        with _disable_current_modes():
            return call(*without_default(args))
