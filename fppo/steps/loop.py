"""The loop of all updates: epochs of mini-batches, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fppo import batch as batches
from fppo import losses, metrics, tree
from fppo.episodes import episode_rows, num_episodes
from fppo.grad import detached, gradients, value_and_grad, variables
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.runtime import fsdp
from fppo.runtime.mesh import DATA_AXES, Mesh, data_metrics, gradient_sum, place_on, ranks_on
from fppo.runtime.schedule import MakeSchedule, one_f_one_b
from fppo.shapes import Tokens
from fppo.steps import memory
from fppo.steps.clock import Timeline, UpdateTurn
from fppo.steps.experts import (
    RouterLosses,
    balanced,
    check_biases,
    router_terms,
    router_totals,
    split_loads,
    with_router_terms,
)
from fppo.steps.forward import forward_micro_batch, has_next_stage, stage_states
from fppo.steps.host_step import Leaving, leaves_early
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import Landing, Optimizer
from fppo.steps.outputs import Forward, Rows, TokenOutputs
from fppo.steps.packed import Indices, Masks, MicroBatch, blank_masks, cut, indexed, keep_tokens_if_shared, masks_of
from fppo.steps.ranks import blank, mini_batches, rounds, saved_work, shares
from fppo.steps.recorded import Recorder, ready
from fppo.steps.sharded import Gathered, Rooted, Whole, accumulable, rooted, scattered, whole
from fppo.steps.stages import stage_gradients
from fppo.steps.train_state import Params, TrainState, optimizer_step
from fppo_kernels.collectives import Calls
from fppo_kernels.shapes import Float
from fppo_kernels.transforms import active


class TrainRows(Rows, Protocol):
    """The columns of a record that the loop reads."""

    @property
    def row_ids(self) -> Tensor: ...  # [B] int64


@attrs.frozen(kw_only=True)
class Loop:
    """The division of a batch into updates.

    There is an optimizer step for each mini-batch of `mini_batch_size` rows, or of as many episodes where these have
    several rows (`Rollout.episodes`), with gradients summed over micro-batches, in each of `epochs` epochs.
    `weight_mode` and `horizon` are those of `losses.loss_weights`. On a pipeline axis micro-batches run by the schedule
    that `stage_schedule` makes; see `laws.check_schedule`. Every update adjusts the biases of routers of experts by
    `balance_rate` (`experts.balanced`). `timeline` is the optimizer's schedule, for a state with a `clock.Clock`. With
    `by_prompt` mini-batches are drawn by a record's groups. Raises ValueError for a size or a number of epochs below 1.
    """

    mini_batch_size: int
    micro_batching: MicroBatching
    epochs: int = 1
    weight_mode: str = "token-mean"
    horizon: int | None = None
    stage_schedule: MakeSchedule = one_f_one_b
    balance_rate: float = 0.0
    timeline: Timeline | None = None
    by_prompt: bool = False

    def __attrs_post_init__(self) -> None:
        for name, value in (("mini_batch_size", self.mini_batch_size), ("epochs", self.epochs)):
            if value < 1:
                raise ValueError(f"{name}={value}: give 1 or more")

    def mini_batches(self, batch: Any, key: Key | None) -> list[Tensor]:
        """The indices of a record's rows in each mini-batch of an epoch, drawn by `key` or in order.

        Raises ValueError for rows without groups if mini-batches are drawn by groups.
        """
        groups = getattr(batch, "groups", None) if self.by_prompt else None
        if self.by_prompt and groups is None:
            raise ValueError(f"by_prompt: the rows of a {type(batch).__name__} have no groups; leave by_prompt out")
        if getattr(batch, "episodes", None) is None:
            return mini_batches(batch.row_ids, self.mini_batch_size, key=key, groups=groups)
        numbers, rows = episode_rows(batch.episodes)
        of_prompts = None if groups is None else groups[[each[0] for each in rows]]
        parts = mini_batches(numbers, self.mini_batch_size, key=key, groups=of_prompts)
        return [torch.tensor([row for episode in part.tolist() for row in rows[episode]]) for part in parts]

    def turn(self, number: int, episodes: int) -> UpdateTurn | None:
        """The position of update `number` among the updates of a batch of `episodes` episodes, on the timeline; None
        without one."""
        each = self.epochs * -(-episodes // self.mini_batch_size)
        return None if self.timeline is None else UpdateTurn(self.timeline, number, each)


class MiniBatch(NamedTuple):
    """A mini-batch, which all data ranks hold, and this rank's share of it: its rows are `own`."""

    rows: Any  # all rows
    own: Any
    weights: Tensor  # [b, T]: `losses.loss_weights` of this rank's rows, by the totals of all rows
    masks: Masks  # the masks of this rank's rows, on the host
    shares: list[list[int]]  # the indices of each data rank's rows
    micro_batches: list[list[int]]  # the indices of this rank's rows in each micro-batch
    passes: int  # this rank's number of passes: its micro-batches, and blank ones to keep in step with other ranks
    key: Key  # the key for draws over its rows
    shares_tokens: bool = False  # whether rows of the batch share tokens; equal on all ranks


@attrs.frozen(kw_only=True)
class Objective:
    """The quantity that an update minimises, as a function of a model's outputs for some rows.

    `loss(out, rows, weights)` returns the contribution of rows [b, ...] to the mini-batch's loss, 0-d, and metrics. It
    gets the `outputs` of a pass at this `temperature`, and the rows' weights [b, T] (`weighted_sum`). `prepare(params,
    mini_batch, *, forward)` may read the whole mini-batch before its passes, and returns this rank's rows with more
    columns. With a coefficient above 0 the losses of the model's routers are added to those of all passes
    (`experts.RouterLosses`). `settle` changes a mini-batch's metrics once they are summed over passes and ranks.
    `first(out, rows)` returns further metrics from the first mini-batch's passes alone, whose parameters are those
    before the update.
    """

    loss: Callable[[TokenOutputs, Any, Tensor], tuple[Tensor, Metrics]]
    outputs: tuple[str, ...] = ("log_probs",)
    temperature: float = 1.0
    prepare: Callable[..., Any] | None = attrs.field(default=None, eq=False)
    balance_coef: float = 0.0
    router_z_coef: float = 0.0
    first: Callable[[TokenOutputs, Any], Metrics] | None = None
    settle: Callable[[Metrics], Metrics] | None = None

    def routers(self, mini: MiniBatch, forward: Forward) -> RouterLosses | None:
        """The losses of routers in the passes of a mini-batch."""
        if not (self.balance_coef or self.router_z_coef):
            return None
        return RouterLosses(router_totals(mini.rows, forward.model), self.balance_coef, self.router_z_coef)


@attrs.frozen(eq=False)
class _Passes:
    """The loss of each pass of a mini-batch, and the parameters of that loss, which all passes share."""

    objective: Objective
    forward: Forward
    scale: Tensor | None  # 0-d, a factor of the loss; None: no factor
    routers: RouterLosses | None
    prefix: str  # of metrics' names

    def counted(self, calls: Calls) -> _Passes:
        """These passes, with their collectives of sharded parameters counted in `calls`, if there are any."""
        return attrs.evolve(self, forward=memory.counted(self.forward, calls))

    def loss(
        self,
        params: Params | Gathered,
        micro: MicroBatch,
        weights: Tensor,
        *,
        forward: Forward | None = None,
        received: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """The loss of rows with weights [b, T], 0-d, and its metrics."""
        objective, forward = self.objective, forward or self.forward
        out = forward_micro_batch(
            params,
            micro.rows,
            forward=forward,
            outputs=self._outputs(objective.outputs),
            temperature=objective.temperature,
            indices=micro.indices,
            received=received,
        )
        loss, report = objective.loss(out, micro.rows, weights)
        report = report if objective.first is None else report | objective.first(out, micro.rows)
        added, of_routers = router_terms(out.loads, out.router_sums, self.routers, self.prefix)
        if added:
            loss = torch.stack([loss, *(x.to(loss) for x in added)]).sum()
        if not loss.requires_grad:  # a loss without any token still gets a backward pass, for its collectives
            loss = loss + 0.0 * getattr(out, objective.outputs[0]).sum()
        return (loss if self.scale is None else loss * self.scale), report | of_routers

    def stage(
        self, params: Params | Gathered, micro: MicroBatch, *, forward: Forward, received: Tensor | None
    ) -> tuple[Any, Metrics]:
        """The hidden states that a pipeline stage before the last passes on, from those `received` (None on the first),
        with the loss of its routers if it has any; and their metrics."""
        outputs = self._outputs(self.objective.outputs)
        states, out = stage_states(params, micro, forward=forward, received=received, outputs=outputs)
        added, report = router_terms(out.loads, out.router_sums, self.routers, self.prefix)
        loss = torch.stack(added).sum() if added else None
        if loss is None or not loss.requires_grad:  # a stage without routers
            return states, report
        return (states, loss if self.scale is None else loss * self.scale), report

    def _outputs(self, requested: Sequence[str]) -> tuple[str, ...]:
        return (*requested, *(() if self.routers is None else ("router_sums",)))


def weighted_sum(terms: dict[str, Tokens], weights: Tokens) -> tuple[Float[Tensor, ""], Metrics]:
    """The sum of weights * term over all `terms` [B, T], 0-d; each term's sum is also a metric of its name."""
    sums = {name: (weights * term).sum() for name, term in terms.items()}
    return torch.stack(list(sums.values())).sum(), {name: metrics.term(x) for name, x in sums.items()}


def update(
    state: TrainState,
    batch: TrainRows,
    *,
    forward: Forward,
    objective: Objective,
    loop: Loop,
    optimizer: Optimizer,
    prefix: str = "update",
    record: Recorder | None = None,
    key: Key | None = None,
    donate: bool = False,
) -> tuple[TrainState, Metrics]:
    """Update a model in `loop.epochs` passes over `batch`, which every data rank holds whole.

    The optimizer's metrics are named `prefix`/.... `record` runs passes of few tokens on a GPU by one launch each. With
    `key` the mini-batches are drawn anew in every epoch, else they are taken in order. `donate` gives up the memory of
    `state`. Raises ValueError for mini-batches larger than `batch`, and for a balance rate of a model without biases to
    balance by.
    """
    count = _divisible(batch, loop, forward)
    history: list[Metrics] = []
    mesh = attrs.evolve(forward.mesh, layout=forward.model.state_layout)
    step = partial(optimizer_step, optimizer=optimizer, mesh=mesh, fixed=forward.model.untrained_params, donate=True)
    staged = partial(_stage_gradients, make_schedule=loop.stage_schedule)
    gradient = staged if forward.model.spans else partial(_gradients, record=record)
    begun = fitted = memory.remembered(loop.micro_batching, state.token_budget, mesh)
    for mini in _mini_batches(batch, attrs.evolve(loop, micro_batching=begun), forward, key):
        mini = mini if fitted == begun else _recut(mini, fitted, mesh)
        if objective.prepare is not None:
            mini = mini._replace(own=objective.prepare(state.params, mini, forward=forward))
        scale = None if optimizer.loss_scale is None else optimizer.loss_scale(state.opt)
        passes = _Passes(objective, forward, scale, objective.routers(mini, forward), prefix)
        landing = None if optimizer.landing is None else optimizer.landing(state.opt)
        grads, report = None, {}
        while grads is None:
            calls = Calls()
            with memory.lack_noted(repeat=fitted.halve_on_oom) as errors:
                grads, report = gradient(state.params, mini, passes.counted(calls), landing)
            if errors:
                memory.released()
            if errors and mesh.sharded:  # so that other ranks can end theirs
                gradient(state.params, mini._replace(micro_batches=[]), passes.counted(Calls(calls.begun)), landing)
            if (smaller := _smaller(mini, fitted, errors, passes)) is not None:
                grads, (mini, fitted) = None, smaller
        if mini.shares_tokens:
            report |= saved_work(forward.model, mini.masks, mini.micro_batches, prefix)
        report, loads = split_loads(metrics.settled(data_metrics(report, mesh)), prefix, forward.model.routers)
        report = report if objective.settle is None else objective.settle(report)
        state = state if donate or history else tree.copy(state)
        state, stepped = step(state, gradient_sum(grads, mesh), turn=loop.turn(len(history), count))
        if loop.balance_rate and loads is not None:
            moved = balanced(state.params, loads, forward.model, mesh, rate=loop.balance_rate, unless=stepped)
            state = tree.replace(state, params=moved)
        objective = attrs.evolve(objective, first=None)
        history.append(metrics.merge(report, {f"{prefix}/{name}": m for name, m in stepped.items()}))
    if loop.micro_batching.halve_on_oom:
        assert fitted.token_budget is not None
        state = tree.replace(state, token_budget=memory.agreed(fitted.token_budget, batch.tokens.device, mesh))
    return state, metrics.merge(*history)


def _divisible(batch: TrainRows, loop: Loop, forward: Forward) -> int:
    """The number of episodes of a batch. Raises ValueError if the loop cannot divide them, or the model has no biases
    that it could balance."""
    if loop.balance_rate:
        check_biases(forward.model, f"leave out balance_rate={loop.balance_rate}")
    if loop.mini_batch_size > (count := num_episodes(batch)):
        raise ValueError(f"mini_batch_size={loop.mini_batch_size}: the batch has {count} rows; give at most as many")
    return count


def _smaller(
    mini: MiniBatch, micro_batching: MicroBatching, errors: Sequence[str], passes: _Passes
) -> tuple[MiniBatch, MicroBatching] | None:
    """A mini-batch cut by a smaller token budget, and the micro-batching that has this budget; None if all passes
    fitted. They did not where there are `errors`, or on another rank that gathers parameters with this one."""
    if not micro_batching.halve_on_oom:
        return None
    mesh, budget = passes.forward.mesh, micro_batching.token_budget
    assert budget is not None
    if errors:
        budget = memory.halved(budget, mini.masks, mini.micro_batches, passes.prefix, errors[0])
    budget = memory.agreed(budget, mini.weights.device, mesh, ("shard",) if mesh.sharded else ())
    if budget == micro_batching.token_budget:
        return None
    micro_batching = attrs.evolve(micro_batching, token_budget=budget)
    return _recut(mini, micro_batching, mesh), micro_batching


def _recut(mini: MiniBatch, micro_batching: MicroBatching, mesh: Mesh) -> MiniBatch:
    """Cut this rank's rows of a mini-batch into other micro-batches."""
    micro_batches = cut(mini.masks, micro_batching)
    (passes,) = rounds([len(micro_batches)], mesh, mini.weights.device)
    return mini._replace(micro_batches=micro_batches, passes=passes)


def _mini_batches(batch: TrainRows, loop: Loop, forward: Forward, key: Key | None) -> Iterator[MiniBatch]:
    """Yield the mini-batches of all epochs, drawn by the key or in order."""
    mesh, masks, place = forward.mesh, masks_of(batch, forward), key or Key(0)
    for epoch in range(loop.epochs):
        drawn = None if key is None else key.fold("epoch", epoch)
        numbers = loop.mini_batches(batch, drawn)
        every, masks_of_every = zip(*(batches.rows((batch, masks), each) for each in numbers), strict=True)
        masks_of_every = [keep_tokens_if_shared(each, forward) for each in masks_of_every]
        shared = [shares(forward.model, each.lengths, mesh, each.sorted()) for each in masks_of_every]
        own, masks_of_own = every, masks_of_every
        if ranks_on(mesh, DATA_AXES) > 1:
            parts = [each[place_on(mesh, DATA_AXES)] for each in shared]
            both = zip(every, masks_of_every, strict=True)
            own, masks_of_own = zip(*(batches.rows(x, part) for x, part in zip(both, parts, strict=True)), strict=True)
            masks_of_own = [keep_tokens_if_shared(each, forward) for each in masks_of_own]
        cuts = [cut(each, loop.micro_batching) for each in masks_of_own]
        passes = rounds([len(each) for each in cuts], mesh, batch.tokens.device)
        if len(forward.model.spans) > 1:  # interleaved schedules need a multiple of the ranks
            passes = [-(-count // mesh["pipeline"].size) * mesh["pipeline"].size for count in passes]
        for number, rows in enumerate(every):
            totals = losses.count_totals(rows.response_mask)
            yield MiniBatch(
                rows,
                own[number],
                losses.loss_weights(own[number].response_mask, loop.weight_mode, totals=totals, horizon=loop.horizon),
                masks_of_own[number],
                shared[number],
                cuts[number],
                passes[number],
                place.fold("select", epoch, number),
                masks.tokens is not None,
            )


def micro_batches(mini: MiniBatch, forward: Forward) -> Iterator[tuple[MicroBatch, Tensor]]:
    """Yield this rank's micro-batches with their weights [b, T], then blank ones that add nothing."""
    for numbers in mini.micro_batches:
        rows, masks, weights = batches.rows((mini.own, mini.masks, mini.weights), numbers)
        yield indexed(rows, masks, forward), weights
    nothing = indexed(blank(mini.own), blank_masks(mini.masks), forward)
    for _ in range(mini.passes - len(mini.micro_batches)):
        yield nothing, mini.weights.new_zeros(nothing.rows.response_mask.shape)


def _gradients(
    params: Params, mini: MiniBatch, passes: _Passes, landing: Landing | None, *, record: Recorder | None
) -> tuple[Params, Metrics]:
    """This rank's share of a mini-batch's gradient, and its metrics: sums over its passes. With a `landing` the sums
    are on their way to the host, if no other rank adds to them."""
    forward, inputs = passes.forward, _inputs(params, passes.forward, record)
    once, kinds = isinstance(inputs, Whole), _dtypes(params, landing)
    leaving = None if landing is None or not leaves_early(forward.mesh) else Leaving(landing)
    total: list[Tensor] = []
    structure: pytree.TreeSpec | None = None
    reports: list[Metrics] = []
    for number, (micro, weights) in enumerate(micro_batches(mini, forward)):
        last = number == mini.passes - 1
        if record is not None and record.takes(inputs, micro.rows, micro.masks, forward):
            report, new = _recorded(inputs, micro, weights, passes, record)
        elif active():
            (_, report), new = value_and_grad(passes.loss, has_aux=True)(inputs, micro, weights)
        else:  # equal to value_and_grad, with the loss called from here: a shorter traceback in a debugger
            leaves = variables(inputs)
            if leaving is not None and last:
                leaving.watch(leaves, total)
            with torch.enable_grad():
                loss, report = passes.loss(leaves, micro, weights)
                report, new = detached(report), gradients(loss, leaves)
            del loss
        reports.append(report)
        if leaving is not None and last:
            return leaving.landed(new, total), metrics.merge(*reports)
        leaves, structure = pytree.tree_flatten(accumulable(new, params, forward.mesh) if once else new)
        del new  # it would live through the next pass
        if number == 0:
            for place, kind in enumerate(() if once else kinds):
                leaves[place] = leaves[place].to(kind, copy=record is not None)
            total = leaves
        elif number == 1:  # one by one: two trees in memory, never three
            for place in range(len(total)):
                leaves[place] = total[place] = total[place] + leaves[place]
        elif active():
            total = [x + y for x, y in zip(total, leaves, strict=True)]
        else:  # this function owns the memory of the sums by now
            torch._foreach_add_(total, leaves)  # pyright: ignore[reportPrivateImportUsage]
        del leaves
    assert structure is not None  # every rank makes at least one pass
    return _shards(pytree.tree_unflatten(total, structure), params, forward), metrics.merge(*reports)


def _dtypes(params: Params, landing: Landing | None) -> list[torch.dtype]:
    """The dtypes in which gradients are summed over passes: those of the weights that they update."""
    return [x.dtype if landing is None else landing.dtypes[name] for name, x in params.items()]


def _shards(grads: Any, params: Params, forward: Forward) -> Params:
    """Convert gradients with respect to a pass's inputs, which may be gathered, into those of `params`."""
    if isinstance(grads, Whole):
        return scattered(grads, params, forward.model, forward.mesh)
    return grads.params if isinstance(grads, Rooted) else grads


def _recorded(
    params: Any, micro: MicroBatch, weights: Tensor, passes: _Passes, record: Recorder
) -> tuple[Metrics, Any]:
    """The metrics and the gradient of a recorded pass; valid until the next pass."""

    def run(params: Params, columns: Any, indices: Indices) -> Any:
        rows, weights, scale = columns
        again = attrs.evolve(passes, scale=scale)
        return value_and_grad(again.loss, has_aux=True)(params, MicroBatch(rows, indices, None), weights)

    columns, what = (micro.rows, weights, passes.scale), ("gradient", passes.objective)
    assert micro.masks is not None
    (_, report), grads = record(run, what, params, columns, micro.masks, passes.forward)
    return tree.copy(report), grads


def _inputs(params: Params, forward: Forward, record: Recorder | None) -> Params | Gathered:
    """Prepare parameters for the passes of a mini-batch: gathered whole if the sharding gathers once for all of them,
    else only those outside the layers; uncut ones are cast once."""
    mesh = forward.mesh
    if not mesh.sharded:
        return ready(params, forward, record)
    once = mesh.sharding is not None and mesh.sharding.stage == 1
    return whole(params, forward.model, mesh) if once else rooted(params, forward.model, mesh)


def _stage_gradients(
    params: Params, mini: MiniBatch, passes: _Passes, landing: Landing | None, *, make_schedule: MakeSchedule
) -> tuple[Params, Metrics]:
    """This rank's share of a mini-batch's gradient on a pipeline axis, and the metrics: sums over the passes of all
    stages, run by the schedule."""
    forward, mesh, kinds = passes.forward, passes.forward.mesh, _dtypes(params, landing)
    inputs, given = _inputs(params, forward, None), list(micro_batches(mini, forward))
    others: list[Metrics] = []
    if isinstance(inputs, Whole) and mesh.sharding is not None:
        kinds = [fsdp.reduce_dtype(kind, mesh.sharding) for kind in kinds]

    def run(
        params: Params | Gathered, one: tuple[MicroBatch, Tensor], *, forward: Forward, received: Tensor | None
    ) -> Any:
        micro, weights = one
        if has_next_stage(forward.model):
            out, report = passes.stage(params, micro, forward=forward, received=received)
            others.append(report)
            return out
        return passes.loss(params, micro, weights, forward=forward, received=received)

    grads, report = stage_gradients(
        run,
        inputs,
        given,
        forward=forward,
        lengths=[micro.indices.length for micro, _ in given],
        make_schedule=make_schedule,
        dtypes=kinds,
    )
    return _shards(grads, params, forward), with_router_terms(report, passes.prefix, others, mesh["pipeline"])
