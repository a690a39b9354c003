"""The loop that all updates share: epochs of mini-batches of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fppo import batch as batches
from fppo import losses, metrics, tree
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.metrics import Mean, Metrics
from fppo.runtime.mesh import Mesh, data_metrics, data_sum, gradient_sum
from fppo.steps.forward import Rows, row_lengths
from fppo.steps.micro_batching import MicroBatching, partition
from fppo.steps.optimizer import Optimizer, optimizer_step
from fppo.steps.train_state import Params, TrainState
from fppo_kernels.record import Kernels


class TrainRows(Rows, Protocol):
    """What the loop reads of a record."""

    @property
    def row_ids(self) -> Tensor: ...  # [B] int64


# The terms of all objectives: their metrics are weighted sums, one number per mini-batch.
TERMS = ("actor/pg_loss", "actor/entropy_loss", "actor/kl_loss", "critic/vf_loss", "supervised/nll_loss")

# (params, micro-batch, weights [B, T], selected tokens [B, T] or None) -> (0-d loss, metrics)
MicroLoss = Callable[[Params, Any, Tensor, Tensor | None], tuple[Tensor, Metrics]]
# (params, mini-batch, its micro-batches' row numbers, key) -> selected tokens [B, T] or None
Select = Callable[[Params, Any, list[list[int]], Key], Tensor | None]


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
    donate: bool,
) -> tuple[TrainState, Metrics]:
    """`epochs` passes over `batch`: an optimizer step per mini-batch, a gradient per micro-batch, all counts global.

    `micro_loss` gives the weighted sum of a micro-batch; `select` chooses tokens over a whole mini-batch (or returns
    None). With `key` the mini-batches are drawn anew in every epoch, else they are taken in order.
    """
    history: list[Metrics] = []
    place = key or Key(0)
    for epoch in range(epochs):
        ordered = batch if key is None else _shuffled(batch, key.fold("epoch", epoch))
        for number, mini in enumerate(batches.split(ordered, mini_batch_size)):
            parts = partition(row_lengths(mini), micro_batching)
            totals = data_sum(losses.count_totals(mini.response_mask), mesh)
            weights = losses.loss_weights(mini.response_mask, weight_mode, totals=totals, horizon=horizon)
            selected = select(state.params, mini, parts, place.fold("select", epoch, number)) if select else None
            grads, report = _gradients(state.params, mini, parts, weights, selected, micro_loss)
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


def _gradients(
    params: Params,
    mini: TrainRows,
    parts: list[list[int]],
    weights: Tensor,
    selected: Tensor | None,
    micro_loss: MicroLoss,
) -> tuple[Params, Metrics]:
    """The gradient and metrics of the mini-batch: sums over its micro-batches."""
    grad_fn = value_and_grad(micro_loss, has_aux=True)
    grads: Params = {}
    reports: list[Metrics] = []
    for part in parts:
        index = torch.tensor(part, device=weights.device)
        chosen = None if selected is None else selected[index]
        (_, report), new = grad_fn(params, batches.rows(mini, part), weights[index], chosen)
        grads = tree.add(grads, new) if reports else new
        reports.append(report)
    return grads, metrics.merge(*reports)


def _shuffled(batch: TrainRows, key: Key) -> TrainRows:
    """The rows in an order that depends on the key and their `row_ids`, not on the order they are in."""
    draws = key.uniform(batch.row_ids, 1)[:, 0]
    return batches.rows(batch, torch.argsort(draws, stable=True))
