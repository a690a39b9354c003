"""The loop that all updates share: epochs of mini-batches of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fppo import batch as batches
from fppo import losses, metrics, tree
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.metrics import Mean, Metrics
from fppo.models.model import Model
from fppo.runtime.mesh import DATA_AXES, Mesh, data_metrics, data_sum, gradient_sum, place_on, ranks_on
from fppo.steps.forward import Rows, row_lengths
from fppo.steps.micro_batching import MicroBatching, partition
from fppo.steps.optimizer import Optimizer, optimizer_step
from fppo.steps.ranks import blank, mini_batches, rounds, shares
from fppo.steps.sharded import Whole, accumulable, scattered, whole
from fppo.steps.train_state import Params, TrainState
from fppo_kernels.record import Kernels


class TrainRows(Rows, Protocol):
    """What the loop reads of a record."""

    @property
    def row_ids(self) -> Tensor: ...  # [B] int64


# The terms of all objectives: their metrics are weighted sums, one number per mini-batch.
TERMS = ("actor/pg_loss", "actor/entropy_loss", "actor/kl_loss", "critic/vf_loss", "supervised/nll_loss")

# (params, micro-batch, weights [B, T], selected tokens [B, T] or None) -> (0-d loss, metrics)
MicroLoss = Callable[[Params | Whole, Any, Tensor, Tensor | None], tuple[Tensor, Metrics]]
# (params, mini-batch, its micro-batches' row numbers, their count over ranks, key) -> selected tokens [b, T] or None
Select = Callable[[Params, "MiniBatch", list[list[int]], int, Key], Tensor | None]


class MiniBatch(NamedTuple):
    """This rank's `rows` of a mini-batch, and what it holds of it: all of it if `parts`, the rows of each data rank,
    are known."""

    rows: Any
    held: Any
    parts: list[list[int]] | None
    totals: losses.Totals  # of `held`


def weighted(terms: dict[str, Tensor], weights: Tensor, report: Metrics) -> tuple[Tensor, Metrics]:
    """sum(weights * terms), and the terms as metrics, named as in `TERMS`, that add up to one number per mini-batch.

    Their count is 0 here; `update_epochs` counts each mini-batch once.
    """
    sums = {name: (weights * term).sum() for name, term in terms.items()}
    parts: Metrics = {name: Mean(x.detach().double(), torch.zeros_like(x).double()) for name, x in sums.items()}
    return torch.stack(list(sums.values())).sum(), report | parts


def update_epochs(
    state: TrainState,
    batch: TrainRows,
    *,
    model: Model,
    micro_loss: MicroLoss,
    select: Select | None = None,
    optimizer: Optimizer,
    kernels: Kernels,
    mesh: Mesh,
    mini_batch_size: int,
    micro_batching: MicroBatching,
    epochs: int,
    weight_mode: str,
    horizon: int | None,
    prefix: str,
    key: Key | None,
    whole_batch: bool,
    donate: bool,
) -> tuple[TrainState, Metrics]:
    """`epochs` passes over `batch`: an optimizer step per mini-batch, a gradient per micro-batch, all counts global.

    A mini-batch is `mini_batch_size` rows of all data ranks. With `whole_batch` all of them hold all rows, and each
    takes a share of equal work of every mini-batch; else `batch` is this rank's rows, of which a mini-batch has some or
    none. `micro_loss` gives the weighted sum of a micro-batch; `select` chooses tokens over a whole mini-batch (or
    returns None). With `key` the mini-batches are drawn anew in every epoch, else they are taken in order.
    """
    history: list[Metrics] = []
    place = key or Key(0)
    for epoch in range(epochs):
        drawn = None if key is None else key.fold("epoch", epoch)
        minis = _minis(batch, mini_batch_size, model, mesh, drawn, whole_batch)
        cuts = [partition(row_lengths(mini.rows), micro_batching) for mini in minis]
        passes = rounds([len(parts) for parts in cuts], mesh, batch.tokens.device)
        for number, (mini, parts, count) in enumerate(zip(minis, cuts, passes, strict=True)):
            totals = mini.totals if whole_batch else data_sum(mini.totals, mesh)
            weights = losses.loss_weights(mini.rows.response_mask, weight_mode, totals=totals, horizon=horizon)
            selected = None
            if select is not None:
                selected = select(state.params, mini, parts, count, place.fold("select", epoch, number))
            micros = _micro_batches(mini.rows, parts, count, weights, selected)
            grads, report = _gradients(state.params, micros, micro_loss, model, mesh)
            report = data_metrics(report, mesh)
            once = {name: metrics.mean(0.0) for name in report if name in TERMS}
            grads = gradient_sum(grads, mesh)
            state, stepped = optimizer_step(
                state,
                grads,
                optimizer=optimizer,
                kernels=kernels,
                mesh=mesh,
                donate=donate or bool(history),
                donate_grads=True,
            )
            history.append(metrics.merge(report, once, {f"{prefix}/{name}": m for name, m in stepped.items()}))
    return state, metrics.merge(*history)


def _minis(
    batch: TrainRows, size: int, model: Model, mesh: Mesh, key: Key | None, whole_batch: bool
) -> list[MiniBatch]:
    """The mini-batches of an epoch, each with this rank's rows of it."""
    found: list[MiniBatch] = []
    for numbers in mini_batches(batch.row_ids, size, Mesh.local() if whole_batch else mesh, key=key):
        mini = batches.rows(batch, numbers)
        parts = shares(model, row_lengths(mini), mesh) if whole_batch and ranks_on(mesh, DATA_AXES) > 1 else None
        own = mini if parts is None else batches.rows(mini, parts[place_on(mesh, DATA_AXES)])
        found.append(MiniBatch(own, mini, parts, losses.count_totals(mini.response_mask)))
    return found


def _micro_batches(
    mini: TrainRows, parts: list[list[int]], count: int, weights: Tensor, selected: Tensor | None
) -> Iterator[tuple[Any, Tensor, Tensor | None]]:
    """The rows, weights and selected tokens of `count` micro-batches: those of `parts`, then ones that add nothing."""
    for part in parts:
        index = torch.tensor(part, device=weights.device)
        yield batches.rows(mini, part), weights[index], None if selected is None else selected[index]
    row = blank(mini)
    for _ in range(count - len(parts)):
        nothing = None if selected is None else selected.new_zeros(row.response_mask.shape)
        yield row, weights.new_zeros(row.response_mask.shape), nothing


def _gradients(
    params: Params,
    micros: Iterable[tuple[Any, Tensor, Tensor | None]],
    micro_loss: MicroLoss,
    model: Model,
    mesh: Mesh,
) -> tuple[Params, Metrics]:
    """This rank's share of the gradient, and its metrics: sums over its micro-batches."""
    once = mesh.sharded and mesh.sharding is not None and mesh.sharding.stage == 1
    inputs = whole(params, model, mesh) if once else params
    grad_fn = value_and_grad(micro_loss, has_aux=True)
    grads: Any = {}
    reports: list[Metrics] = []
    for rows, weights, selected in micros:
        (_, report), new = grad_fn(inputs, rows, weights, selected)
        new = accumulable(new, params, mesh) if once else new
        grads = tree.add(grads, new) if reports else new
        del new  # or it would live through the next pass
        reports.append(report)
    return scattered(grads, params, mesh) if once else grads, metrics.merge(*reports)
