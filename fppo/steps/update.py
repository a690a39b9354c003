"""The updates of actor and critic. What they compute does not depend on the split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fppo import batch as batches
from fppo import losses, metrics
from fppo.batch import Experience
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.models.model import Model
from fppo.runtime.mesh import DATA_AXES, Mesh, place_on, ranks_on
from fppo.steps.epochs import MiniBatch, update_epochs, weighted
from fppo.steps.forward import TokenOutputs, forward_micro_batch
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizer import Optimizer
from fppo.steps.ranks import blank, collect
from fppo.steps.sharded import Whole
from fppo.steps.train_state import Params, TrainState
from fppo_kernels.record import Kernels

SelectFn = Callable[..., Tensor]


def update_actor(
    state: TrainState,
    batch: Experience,
    *,
    model: Model,
    loss_fn: Callable[..., tuple[Tensor, Metrics]],
    optimizer: Optimizer,
    kernels: Kernels,
    mesh: Mesh,
    mini_batch_size: int,
    micro_batching: MicroBatching,
    epochs: int = 1,
    temperature: float = 1.0,
    weight_mode: str = "token-mean",
    horizon: int | None = None,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_kind: str = "k3",
    select_fn: SelectFn | None = None,
    on_policy: bool = False,
    measure_gap: bool = False,
    key: Key | None = None,
    remove_padding: bool = True,
    whole_batch: bool = False,
    donate: bool = False,
) -> tuple[TrainState, Metrics]:
    """The policy after `epochs` passes over `batch`: an optimizer step per mini-batch of `mini_batch_size` sequences.

    The objective of a mini-batch is sum(weights * (policy loss * correction - entropy_coef * entropy + kl_coef * KL
    to the reference)), with weights [B, T] from `losses.loss_weights` over the whole mini-batch and all data ranks.
    `loss_fn(log_probs, old_log_probs, advantages, mask)` is a policy loss with its scalars bound. One that selects
    tokens over the mini-batch comes with `select_fn`, which sees the whole mini-batch's current log-probs first.
    `on_policy` takes old log-probs from the same pass: right when one mini-batch and one epoch make the ratio 1.
    `measure_gap` reports `rollout_gap` of the policy being updated, where no pass before did. Mini-batches are drawn by
    `key`, or taken in order without one. `batch` is this data rank's rows; with `whole_batch` it is all rows, on every
    rank, and each takes its share. `donate` gives up the memory of `state`.
    """
    if select_fn is not None and not whole_batch and ranks_on(mesh, DATA_AXES) > 1:
        raise ValueError("select_fn needs the whole mini-batch: give all data ranks all rows, and whole_batch=True")
    shared: dict[str, Any] = {"model": model, "kernels": kernels, "mesh": mesh}
    forward = partial(forward_micro_batch, temperature=temperature, remove_padding=remove_padding, **shared)
    scalars: dict[str, Any] = {"entropy_coef": entropy_coef, "kl_coef": kl_coef, "kl_kind": kl_kind}
    scalars |= {"on_policy": on_policy, "measure_gap": measure_gap or on_policy}
    return update_epochs(
        state,
        batch,
        micro_loss=partial(policy_objective, forward=forward, loss_fn=loss_fn, **scalars),
        select=None if select_fn is None else partial(_select, forward=forward, mesh=mesh, select_fn=select_fn),
        optimizer=optimizer,
        mini_batch_size=mini_batch_size,
        micro_batching=micro_batching,
        weight_mode=weight_mode,
        horizon=horizon,
        prefix="actor",
        epochs=epochs,
        key=key,
        whole_batch=whole_batch,
        donate=donate,
        **shared,
    )


def policy_objective(
    params: Params | Whole,
    rows: Experience,
    weights: Tensor,
    selected: Tensor | None,
    *,
    forward: Callable[..., TokenOutputs],
    loss_fn: Callable[..., tuple[Tensor, Metrics]],
    entropy_coef: float,
    kl_coef: float,
    kl_kind: str,
    on_policy: bool,
    measure_gap: bool,
) -> tuple[Tensor, Metrics]:
    """`update_actor`'s objective on some rows of a mini-batch, given their weights [B, T], and its metrics."""
    out = forward(params, rows, outputs=("log_probs", "entropy"))
    assert out.log_probs is not None
    assert out.entropy is not None
    mask = rows.response_mask
    old = out.log_probs.detach() if on_policy else rows.old_log_probs
    chosen = {} if selected is None else {"selected": selected}
    policy, report = loss_fn(out.log_probs, old, rows.advantages, mask, **chosen)
    if rows.correction_weights is not None:
        policy = policy * rows.correction_weights.where(mask, 0.0)
    terms = {"actor/pg_loss": policy}
    if entropy_coef:
        terms["actor/entropy_loss"] = -entropy_coef * out.entropy
    if kl_coef:
        if rows.ref_log_probs is None:
            raise ValueError(f"kl_coef={kl_coef} needs ref_log_probs in the batch: give a reference policy")
        terms["actor/kl_loss"] = kl_coef * losses.kl_estimate(out.log_probs, rows.ref_log_probs, kl_kind, mask=mask)
    report = report | {"actor/entropy": metrics.masked_mean(out.entropy, mask)}
    if measure_gap:
        report = report | rollout_gap(out.log_probs, rows.rollout_log_probs, mask)
    loss, report = weighted(terms, weights, report)
    if not loss.requires_grad:  # a loss without a token: the backward pass is still there, for its collectives
        loss = loss + 0.0 * out.log_probs.sum()
    return loss, report


def _select(
    params: Params,
    mini: MiniBatch,
    micros: list[list[int]],
    count: int,
    place: Key,
    *,
    forward: Callable[..., TokenOutputs],
    mesh: Mesh,
    select_fn: SelectFn,
) -> Tensor:
    """The tokens [b, T] of this rank's rows that `select_fn` chooses in a mini-batch, by the log-probs of a pass
    without gradients, of `count` micro-batches on every rank."""
    log_probs = torch.zeros_like(mini.rows.old_log_probs)
    for part in [*micros, *([[]] * (count - len(micros)))]:
        with torch.no_grad():
            rows = batches.rows(mini.rows, part) if part else blank(mini.rows)
            new = forward(params, rows, outputs=("log_probs",)).log_probs
        assert new is not None
        if part:
            log_probs = log_probs.index_copy(0, torch.tensor(part, device=log_probs.device), new.to(log_probs))
    if mini.parts is not None:
        log_probs = collect(log_probs, mini.parts, mesh)
    held = mini.held
    noise = place.uniform(held.row_ids, held.response_mask.shape[1])
    chosen = select_fn(log_probs, held.old_log_probs, held.advantages, held.response_mask, noise=noise)
    return chosen if mini.parts is None else chosen[mini.parts[place_on(mesh, DATA_AXES)]]


def update_critic(
    state: TrainState,
    batch: Experience,
    *,
    model: Model,
    optimizer: Optimizer,
    kernels: Kernels,
    mesh: Mesh,
    mini_batch_size: int,
    micro_batching: MicroBatching,
    epochs: int = 1,
    clip: float = 0.5,
    weight_mode: str = "token-mean",
    horizon: int | None = None,
    key: Key | None = None,
    remove_padding: bool = True,
    whole_batch: bool = False,
    donate: bool = False,
) -> tuple[TrainState, Metrics]:
    """The critic after `epochs` passes over `batch`, with `losses.value_loss` clipped at `clip`; see `update_actor`."""

    def micro_loss(params: Params | Whole, rows: Experience, weights: Tensor, selected: Tensor | None):
        del selected
        if rows.values is None:
            raise ValueError("update_critic needs values in the batch: annotate it with compute_values first")
        out = forward_micro_batch(
            params,
            rows,
            model=model,
            kernels=kernels,
            mesh=mesh,
            outputs=("values",),
            remove_padding=remove_padding,
        )
        assert out.values is not None
        loss, report = losses.value_loss(out.values, rows.values, rows.returns, rows.response_mask, clip=clip)
        report = report | {"critic/vpred_mean": metrics.masked_mean(out.values, rows.response_mask)}
        return weighted({"critic/vf_loss": loss}, weights, report)

    return update_epochs(
        state,
        batch,
        model=model,
        micro_loss=micro_loss,
        optimizer=optimizer,
        kernels=kernels,
        mesh=mesh,
        mini_batch_size=mini_batch_size,
        micro_batching=micro_batching,
        epochs=epochs,
        weight_mode=weight_mode,
        horizon=horizon,
        prefix="critic",
        key=key,
        whole_batch=whole_batch,
        donate=donate,
    )


def rollout_gap(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Metrics:
    """How far the engine's probabilities are from the trainer's, over the mask: the gap is zero if they run the same
    numbers with the same weights. rollout_corr/... are `losses.off_policy_metrics`.
    """
    gap = (log_probs.detach().exp() - rollout_log_probs.exp()).abs()
    ratio = (log_probs.detach() - rollout_log_probs).where(mask, 0.0).exp()
    return {
        "training/rollout_probs_diff_mean": metrics.masked_mean(gap, mask),
        "training/rollout_probs_diff_max": metrics.masked_max(gap, mask),
        "training/rollout_ratio_mean": metrics.masked_mean(ratio, mask),
        "training/rollout_ratio_max": metrics.masked_max(ratio, mask),
        **losses.off_policy_metrics(log_probs, rollout_log_probs, mask),
    }
