"""The loop that all updates share: epochs of mini-batches of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fppo import batch as batches
from fppo import losses, metrics, tree
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.runtime import fsdp
from fppo.runtime.mesh import DATA_AXES, data_metrics, gradient_sum, place_on, ranks_on
from fppo.runtime.schedule import MakeSchedule, one_f_one_b
from fppo.shapes import Tokens
from fppo.steps.clock import Timeline, UpdateTurn
from fppo.steps.experts import (
    RouterLosses,
    balanced,
    check_biases,
    outputs_of,
    router_terms,
    router_totals,
    split_loads,
    with_router_terms,
)
from fppo.steps.forward import Forward, Rows, goes_on, slice_length, stage_states
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import Optimizer
from fppo.steps.packed import Indices, Masks, blank_masks, cut, indexed, masks_of, worth
from fppo.steps.ranks import blank, mini_batches, rounds, saved_work, shares
from fppo.steps.recorded import identity_of, ready
from fppo.steps.sharded import Gathered, Rooted, Whole, accumulable, rooted, scattered, whole
from fppo.steps.stages import stage_gradients
from fppo.steps.train_state import Params, TrainState, optimizer_step
from fppo_kernels.shapes import Float


class TrainRows(Rows, Protocol):
    """What the loop reads of a record."""

    @property
    def row_ids(self) -> Tensor: ...  # [B] int64


@attrs.frozen(kw_only=True)
class Loop:
    """How a batch becomes updates: an optimizer step per mini-batch of `mini_batch_size` rows, a gradient per
    micro-batch, `epochs` times over. `weight_mode` and `horizon` are those of `losses.loss_weights`. On a pipeline axis
    micro-batches run by what `stage_schedule` makes; see `laws.check_schedule`. By `balance_rate` the biases of routers
    of experts move with every update (`experts.balanced`). `timeline` is the optimizer's schedule, for a state with a
    `clock.Clock`. Raises ValueError for a size or a number of epochs below 1."""

    mini_batch_size: int
    micro_batching: MicroBatching
    epochs: int = 1
    weight_mode: str = "token-mean"
    horizon: int | None = None
    stage_schedule: MakeSchedule = one_f_one_b
    balance_rate: float = 0.0
    timeline: Timeline | None = None

    def __attrs_post_init__(self) -> None:
        for name, value in (("mini_batch_size", self.mini_batch_size), ("epochs", self.epochs)):
            if value < 1:
                raise ValueError(f"{name}={value}: give 1 or more")

    def turn(self, number: int, rows: int) -> UpdateTurn | None:
        """Update `number` of those that a batch of so many rows becomes, by the timeline; None without one."""
        each = self.epochs * -(-rows // self.mini_batch_size)
        return None if self.timeline is None else UpdateTurn(self.timeline, number, each)


class MiniBatch(NamedTuple):
    """A mini-batch, as all data ranks have it, and this rank's share of it."""

    rows: Any  # all of them
    own: Any
    masks: Masks  # of this rank's, on the host
    shares: list[list[int]]  # the numbers of the rows that each data rank takes
    micro_batches: list[list[int]]  # of this rank's rows
    passes: int  # that this rank makes: as many as its micro-batches, or more, to keep up with others


class Pass(NamedTuple):
    """A micro-batch as a pass takes it."""

    objective: Objective
    rows: Any
    weights: Tensor  # [b, T]
    indices: Indices  # of the rows
    scale: Tensor | None  # 0-d, what the loss is multiplied by; None: nothing
    routers: RouterLosses | None  # of the mini-batch, which the objective has too
    marks: dict[str, Tensor] | None = None  # each [b, T]
    masks: Masks | None = None  # of the rows; None: the pass is not recorded

    def loss(self, params: Params | Gathered, *, forward: Forward) -> tuple[Tensor, Metrics]:
        """What is made smaller, and the metrics of the objective."""
        ready = attrs.evolve(forward, indices=self.indices)
        objective = self.objective if self.marks is None else partial(self.objective, marks=self.marks)
        loss, report = objective(params, self.rows, self.weights, forward=ready)
        return (loss if self.scale is None else loss * self.scale), report

    def stage(self, params: Params | Gathered, prefix: str, *, forward: Forward) -> tuple[Any, Metrics]:
        """What a stage of a pipeline before the last hands on, with the loss of its routers if it has one, and their
        metrics."""
        ready = attrs.evolve(forward, indices=self.indices)
        outputs = outputs_of(forward.model, self.routers)
        states, out = stage_states(params, self.rows, forward=ready, outputs=outputs)
        added, report = router_terms(out.loads, out.router_sums, self.routers, prefix)
        loss = torch.stack(added).sum() if added else None
        if loss is None or not loss.requires_grad:  # a stage without routers
            return states, report
        return (states, loss if self.scale is None else loss * self.scale), report


# What an update makes smaller: objective(params, rows, weights, *, forward) -> (0-d loss, metrics), the part of it that
# some rows of a mini-batch add, with their weights [B, T] of the whole; see `weighted_sum`. Where the loop marks
# tokens it is called with marks=, tensors [B, T] by name, too.
Objective = Callable[..., tuple[Tensor, Metrics]]
# mark(params, mini_batch, key, *, forward) -> what is to be known of this rank's tokens by the whole mini-batch, [b, T]
Mark = Callable[..., dict[str, Tensor]]


@attrs.frozen
class WithRouters:
    """An objective that takes `routers=`, the losses of the model's routers in the passes of a mini-batch, with these
    factors, and adds those of its pass; the stages of a pipeline before the last add their own."""

    objective: Objective
    balance_coef: float = 0.0
    z_coef: float = 0.0


def weighted_sum(terms: dict[str, Tokens], weights: Tokens) -> tuple[Float[Tensor, ""], Metrics]:
    """The sum over all `terms` [B, T] of sum(weights * term), 0-d; and each of these sums as a metric of its name."""
    sums = {name: (weights * term).sum() for name, term in terms.items()}
    return torch.stack(list(sums.values())).sum(), {name: metrics.term(x) for name, x in sums.items()}


def update(
    state: TrainState,
    batch: TrainRows,
    *,
    forward: Forward,
    objective: Objective | WithRouters,
    loop: Loop,
    optimizer: Optimizer,
    prefix: str = "update",
    mark: Mark | None = None,
    key: Key | None = None,
    donate: bool = False,
) -> tuple[TrainState, Metrics]:
    """The state after `loop.epochs` passes over `batch`, all of which every data rank has; each takes a share of equal
    work of every mini-batch, so that the result does not depend on how many there are.

    `objective` gives the weighted sum of a micro-batch; `mark` looks at a whole mini-batch before. The
    optimizer's metrics are named `prefix`/.... With `key` the mini-batches are drawn anew in every epoch, else they
    are taken in order. `donate` gives up the memory of `state`. Raises ValueError for mini-batches larger than `batch`,
    and for a balance rate of a model without biases to balance by.
    """
    if loop.balance_rate:
        check_biases(forward.model, f"leave out balance_rate={loop.balance_rate}")
    if loop.mini_batch_size > (count := len(batch.row_ids)):
        raise ValueError(f"mini_batch_size={loop.mini_batch_size}: the batch has {count} rows; give at most as many")
    history: list[Metrics] = []
    place, masks = key or Key(0), masks_of(batch, forward)
    mesh = attrs.evolve(forward.mesh, layout=forward.model.state_layout)
    for epoch in range(loop.epochs):
        drawn = None if key is None else key.fold("epoch", epoch)
        for number, mini in enumerate(_mini_batches(batch, masks, loop, forward, drawn)):
            totals = losses.count_totals(mini.rows.response_mask)
            weights = losses.loss_weights(mini.own.response_mask, loop.weight_mode, totals=totals, horizon=loop.horizon)
            marks = None
            if mark is not None:
                marks = mark(state.params, mini, place.fold("select", epoch, number), forward=forward)
            own, routers = (
                _of_routers(objective, mini, forward) if isinstance(objective, WithRouters) else (objective, None)
            )
            scale = None if optimizer.loss_scale is None else optimizer.loss_scale(state.opt)
            passes = _passes(mini, weights, own, marks, forward, scale, routers)
            if forward.model.spans:
                grads, report = _stage_gradients(state.params, list(passes), forward, loop.stage_schedule, prefix)
            else:
                grads, report = _gradients(state.params, passes, forward)
            if masks.tokens is not None:
                report |= saved_work(forward.model, mini.masks, mini.micro_batches, prefix)
            report, loads = split_loads(metrics.settled(data_metrics(report, mesh)), prefix, forward.model.routers)
            grads = gradient_sum(grads, mesh)
            state = state if donate or history else tree.copy(state)
            how = {"fixed": forward.model.fixed, "turn": loop.turn(len(history), count)}
            state, stepped = optimizer_step(state, grads, optimizer=optimizer, mesh=mesh, **how, donate=True)
            if loop.balance_rate and loads is not None:
                moved = balanced(state.params, loads, forward.model, mesh, rate=loop.balance_rate, unless=stepped)
                state = tree.replace(state, params=moved)
            history.append(metrics.merge(report, {f"{prefix}/{name}": m for name, m in stepped.items()}))
    return state, metrics.merge(*history)


def _of_routers(objective: WithRouters, mini: MiniBatch, forward: Forward) -> tuple[Objective, RouterLosses]:
    """The objective of a mini-batch's passes, and the losses of routers that it has."""
    totals = router_totals(mini.rows, forward.model)
    routers = RouterLosses(totals, objective.balance_coef, objective.z_coef)
    return partial(objective.objective, routers=routers), routers


def _mini_batches(batch: TrainRows, masks: Masks, loop: Loop, forward: Forward, key: Key | None) -> list[MiniBatch]:
    """The mini-batches of an epoch over rows with these masks."""
    mesh, numbers = forward.mesh, mini_batches(batch.row_ids, loop.mini_batch_size, key=key)
    every, masks_of_every = zip(*(batches.rows((batch, masks), each) for each in numbers), strict=True)
    masks_of_every = [worth(each, forward) for each in masks_of_every]
    shared = [shares(forward.model, each.lengths, mesh, each.sorted()) for each in masks_of_every]
    own, masks_of_own = every, masks_of_every
    if ranks_on(mesh, DATA_AXES) > 1:
        parts = [each[place_on(mesh, DATA_AXES)] for each in shared]
        both = zip(every, masks_of_every, strict=True)
        own, masks_of_own = zip(*(batches.rows(x, part) for x, part in zip(both, parts, strict=True)), strict=True)
        masks_of_own = [worth(each, forward) for each in masks_of_own]
    cuts = [cut(each, loop.micro_batching) for each in masks_of_own]
    passes = rounds([len(each) for each in cuts], mesh, batch.tokens.device)
    if len(forward.model.spans) > 1:  # interleaved schedules take so many
        passes = [-(-count // mesh["pipeline"].size) * mesh["pipeline"].size for count in passes]
    return [MiniBatch(*mini) for mini in zip(every, own, masks_of_own, shared, cuts, passes, strict=True)]


def _passes(
    mini: MiniBatch,
    weights: Tensor,
    objective: Objective,
    marks: dict[str, Tensor] | None,
    forward: Forward,
    scale: Tensor | None,
    routers: RouterLosses | None,
) -> Iterator[Pass]:
    """This rank's micro-batches, then ones that add nothing."""
    for numbers in mini.micro_batches:
        rows, masks, own, marked = batches.rows((mini.own, mini.masks, weights, marks or {}), numbers)
        marked = marked if marks is not None else None
        yield Pass(objective, rows, own, indexed(rows, masks, forward).indices, scale, routers, marked, masks)
    row, indices, masks = indexed(blank(mini.own), blank_masks(mini.masks), forward)
    nothing = row.response_mask
    for _ in range(mini.passes - len(mini.micro_batches)):
        marked = None if marks is None else {name: x.new_zeros(nothing.shape) for name, x in marks.items()}
        yield Pass(objective, row, weights.new_zeros(nothing.shape), indices, scale, routers, marked, masks)


def _gradients(params: Params, passes: Iterable[Pass], forward: Forward) -> tuple[Params, Metrics]:
    """This rank's share of the gradient, and its metrics: sums over its passes."""
    mesh, inputs = forward.mesh, _inputs(params, forward)
    once = isinstance(inputs, Whole)
    kinds = [x.dtype for x in params.values()]
    total: list[Tensor] = []
    structure: pytree.TreeSpec | None = None
    reports: list[Metrics] = []
    for number, one in enumerate(passes):
        report, new = _gradient(one, inputs, forward)
        leaves, structure = pytree.tree_flatten(accumulable(new, params, mesh) if once else new)
        del new  # or it would live through the next pass
        if number == 0:
            for place, kind in enumerate(() if once else kinds):
                leaves[place] = leaves[place].to(kind, copy=forward.record is not None)
            total = leaves
        elif number == 1:  # one by one, so that two trees are in memory and never three
            for place in range(len(total)):
                leaves[place] = total[place] = total[place] + leaves[place]
        else:  # the memory of the sums is this function's own by now
            torch._foreach_add_(total, leaves)  # pyright: ignore[reportPrivateImportUsage]
        del leaves
        reports.append(report)
    grads: Any = pytree.tree_unflatten(total, structure) if structure is not None else {}
    if isinstance(grads, Rooted):
        grads = grads.params
    return scattered(grads, params, forward.model, mesh) if once else grads, metrics.merge(*reports)


def _gradient(one: Pass, inputs: Params | Gathered, forward: Forward) -> tuple[Metrics, Any]:
    """The metrics and the gradient of a pass; of one that is recorded, until the next."""
    recorder, what, objective = forward.record, identity_of(one.objective), one.objective
    columns = one.rows, one.weights, one.marks, one.scale
    if (
        recorder is None
        or what is None
        or one.masks is None
        or isinstance(inputs, Gathered)
        or not recorder.takes(inputs, columns, one.masks, forward)
    ):
        (_, report), grads = value_and_grad(one.loss, has_aux=True)(inputs, forward=forward)
        return report, grads

    def run(params: Params, columns: Any, indices: Indices) -> Any:
        rows, weights, marks, scale = columns
        again = Pass(objective, rows, weights, indices, scale, None, marks)
        return value_and_grad(again.loss, has_aux=True)(params, forward=forward)

    (_, report), grads = recorder(run, ("gradient", what), inputs, columns, one.masks, forward)
    return tree.copy(report), grads


def _inputs(params: Params, forward: Forward) -> Params | Gathered:
    """The parameters as the passes of a mini-batch take them: whole where the sharding gathers them once for all of
    these, else what is outside the layers, and cast once where nothing is cut."""
    mesh = forward.mesh
    if not mesh.sharded:
        return ready(params, forward)
    once = mesh.sharding is not None and mesh.sharding.stage == 1
    return whole(params, forward.model, mesh) if once else rooted(params, forward.model, mesh)


def _stage_gradients(
    params: Params, passes: Sequence[Pass], forward: Forward, make_schedule: MakeSchedule, prefix: str
) -> tuple[Params, Metrics]:
    """What `_gradients` gives, where a pipeline axis has the layers."""
    mesh, inputs = forward.mesh, _inputs(params, forward)
    others: list[Metrics] = []
    once, kinds = isinstance(inputs, Whole), [x.dtype for x in params.values()]
    if once and mesh.sharding is not None:
        kinds = [fsdp.reduce_dtype(kind, mesh.sharding) for kind in kinds]

    def run(params: Params | Gathered, one: Pass, *, forward: Forward) -> Any:
        if goes_on(forward.model):
            out, report = one.stage(params, prefix, forward=forward)
            others.append(report)
            return out
        return one.loss(params, forward=forward)

    grads, report = stage_gradients(
        run,
        inputs,
        passes,
        forward=forward,
        lengths=[slice_length(one.rows, attrs.evolve(forward, indices=one.indices)) for one in passes],
        make_schedule=make_schedule,
        dtypes=kinds,
    )
    report = with_router_terms(report, prefix, others, mesh["pipeline"])
    return scattered(grads, params, forward.model, mesh) if once else grads, report
