"""The whole state of one model's training: saving it saves everything; and one step of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fppo import tree
from fppo.metrics import Metrics
from fppo.models.model import Params
from fppo.runtime.layout import Extent
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.steps.clock import Clock, UpdateTurn, tick, tock
from fppo.steps.optimizers import Optimizer
from fppo.tree import state

__all__ = ["Params", "Scale", "TrainState", "init_state", "optimizer_step", "whole_shapes"]


def _nothing() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@state
class Scale:
    """The running mean of returns and of their squares, before they are divided by the weight of the batches in them;
    0-d float64. See `steps.popart`."""

    mean: Tensor = attrs.field(factory=_nothing)
    square: Tensor = attrs.field(factory=_nothing)
    weight: Tensor = attrs.field(factory=_nothing)


@state
class TrainState:
    """Parameters, the optimizer's own state, and the number of updates tried, of which some may have been skipped; of a
    critic with PopArt the scale of its returns; with a `clock` the schedule of learning rates goes by that."""

    params: Params
    opt: Any
    step: int
    scale: Scale | None = None
    clock: Clock | None = None


def init_state(params: Params, optimizer: Optimizer) -> TrainState:
    """A fresh state around `params`, which it keeps without copying."""
    return TrainState(params=params, opt=optimizer.init(params), step=0)


def optimizer_step(
    state: TrainState,
    grads: Params,
    *,
    optimizer: Optimizer,
    mesh: Mesh = LOCAL,
    fixed: Collection[str] = (),
    turn: UpdateTurn | None = None,
    donate: bool = False,
) -> tuple[TrainState, Metrics]:
    """The state after one update with `grads`, which are summed over all ranks already, and the optimizer's metrics.

    On a mesh that cuts parameters, gradients and state are shards. What is in `fixed` (`Model.fixed`) stays as it
    is. The schedule is asked for the rate of the state's clock at this `turn`, or without one of the two by the number
    of updates tried. With `donate` the memory of `state` and of `grads` is taken over, and they are left empty.
    """
    # an optimizer decays also what has a gradient of zero
    kept = {name: state.params[name].clone() for name in fixed if name in state.params}
    clock, place = (state.clock, state.step) if state.clock is None or turn is None else tick(state.clock, turn)
    params, opt, report = optimizer.update(state.params, grads, state.opt, place, mesh=mesh, donate=donate)
    clock = clock if clock is None or turn is None else tock(clock, turn, report)
    return tree.replace(state, params=params | kept, opt=opt, step=state.step + 1, clock=clock), report


def whole_shapes(state: TrainState, shapes: Mapping[str, torch.Size | Extent]) -> dict[str, torch.Size | Extent]:
    """By their paths in `state`, the whole shapes of the leaves that a mesh cuts: parameters, of whole `shapes`, also
    those of other stages, and what the optimizer keeps under the names of this rank's in their shapes.

    Raises ValueError for a tensor of the optimizer's that could be cut or not, where parameters are.
    """
    cut = any(x.shape != shapes[name] for name, x in state.params.items())
    whole = {f".params[{name!r}]": extent for name, extent in shapes.items()}
    for path, leaf in pytree.tree_flatten_with_path(state.opt)[0]:
        name = getattr(path[-1], "key", None) if path else None
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            continue
        if name in state.params and leaf.shape == state.params[name].shape:
            whole[f".opt{pytree.keystr(path)}"] = shapes[name]
        elif cut:
            raise ValueError(
                f"the optimizer's state .opt{pytree.keystr(path)} of shape {tuple(leaf.shape)} is neither a number nor "
                "of the shape of the parameter it is named by: it cannot be saved where parameters are cut"
            )
    return whole
