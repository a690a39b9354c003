"""The state of one model's training, which is everything that must be saved, and one step of it."""

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
from fppo.runtime.layout import Extent, Layout, block_of, divided
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.steps.clock import Clock, UpdateTurn, after_update, before_update
from fppo.steps.optimizers import Optimizer
from fppo.tree import state

__all__ = ["Params", "Scale", "TrainState", "check_cuts", "init_state", "optimizer_step", "whole_shapes"]


def _nothing() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@state
class Scale:
    """The running means of returns and their squares, before division by the batches' total weight; 0-d float64. See
    `steps.popart`."""

    mean: Tensor = attrs.field(factory=_nothing)
    square: Tensor = attrs.field(factory=_nothing)
    weight: Tensor = attrs.field(factory=_nothing)


OPTIONAL = (".token_budget", ".cursor.earlier")  # ends of the paths of what a state may go on with or without


@state
class TrainState:
    """Parameters, optimizer state, and the number of attempted updates, skipped ones included. `scale` has the
    statistics of a critic with PopArt; with a `clock` the learning rate follows the clock's schedule. `token_budget` is
    the most tokens of a pass, where it is halved if there is no memory for one."""

    params: Params
    opt: Any
    step: int
    scale: Scale | None = None
    clock: Clock | None = None
    token_budget: int | None = None


def init_state(params: Params, optimizer: Optimizer, *, token_budget: int | None = None) -> TrainState:
    """A fresh state with `params`, which are not copied."""
    return TrainState(params=params, opt=optimizer.init(params), step=0, token_budget=token_budget)


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
    """Update a state with `grads`, which are already summed over all ranks; return the new state and the optimizer's
    metrics.

    On a mesh that cuts parameters, gradients and state are shards. Parameters in `fixed`, such as
    `Model.untrained_params`, do not change. The learning rate is that of the state's clock at this `turn`; without
    clock or turn, that of the number of attempted updates. With `donate` the memory of `state` and `grads` is taken
    over, and they are left empty.
    """
    # optimizers decay parameters with zero gradients, too
    kept = {name: state.params[name].clone() for name in fixed if name in state.params}
    clock, place = (
        (state.clock, state.step) if state.clock is None or turn is None else before_update(state.clock, turn)
    )
    params, opt, report = optimizer.update(state.params, grads, state.opt, place, mesh=mesh, donate=donate)
    clock = clock if clock is None or turn is None else after_update(clock, turn, report)
    return tree.replace(state, params=params | kept, opt=opt, step=state.step + 1, clock=clock), report


def whole_shapes(state: TrainState, shapes: Mapping[str, torch.Size | Extent]) -> dict[str, torch.Size | Extent]:
    """The whole shapes of the leaves that a mesh cuts, by their paths in `state`: parameters with whole `shapes`, also
    of other stages, and optimizer tensors with the names of this rank's parameters and their shapes, or one number for
    each block along one of their axes.

    If parameters are cut, raises ValueError for an optimizer tensor that is neither 0-d nor shaped like that, and for
    a cut inside of a block.
    """
    cut = any(x.shape != shapes[name] for name, x in state.params.items())
    whole = {f".params[{name!r}]": extent for name, extent in shapes.items()}
    for path, leaf in pytree.tree_flatten_with_path(state.opt)[0]:
        name = str(getattr(path[-1], "key", "")) if path else ""
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            continue
        own = state.params[name].shape if name in state.params else torch.Size()
        if leaf.shape == own:
            whole[f".opt{pytree.keystr(path)}"] = shapes[name]
        elif (block := block_of(own, leaf.shape)) is not None:
            whole[f".opt{pytree.keystr(path)}"] = divided(name, shapes[name], *block)
        elif cut:
            raise ValueError(
                f"the optimizer's state .opt{pytree.keystr(path)} of shape {tuple(leaf.shape)} is neither a number nor "
                "of the shape of the parameter with its name, or with one axis divided by the size of a block: it "
                "cannot be saved where parameters are cut"
            )
    return whole


def check_cuts(optimizer: Optimizer, layout: Layout) -> None:
    """Check that the state of this rank's parts of parameters is the same part of the state of whole parameters, by the
    shapes that `optimizer.init` gives tensors without data. Raises ValueError if not, as for a cut inside of a block.
    """
    extents = {name: layout.extent(name) for name in layout.held}

    def leaves(shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size | Extent]:
        params = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return whole_shapes(init_state(params, optimizer), extents)

    whole, own = leaves({name: layout.whole[name] for name in layout.held}), leaves(layout.shapes)
    if wrong := [path for path in {**whole, **own} if whole.get(path) != own.get(path)]:
        raise ValueError(
            "the optimizer's state of parts of parameters is no part of the state of whole ones: "
            + ", ".join(wrong[:3])
        )
