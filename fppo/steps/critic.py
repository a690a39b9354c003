"""The update of the critic. What it computes does not depend on the split into micro-batches."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fppo import losses, metrics
from fppo.batch import Experience
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.steps.forward import Forward, forward_micro_batch
from fppo.steps.loop import Loop, update, weighted_sum
from fppo.steps.optimizers import Optimizer
from fppo.steps.sharded import Whole
from fppo.steps.train_state import Params, TrainState


def update_critic(
    state: TrainState,
    batch: Experience,
    *,
    forward: Forward,
    loop: Loop,
    optimizer: Optimizer,
    clip: float = 0.5,
    key: Key | None = None,
    donate: bool = False,
) -> tuple[TrainState, Metrics]:
    """The critic after `loop.epochs` passes over `batch`, with `losses.value_loss` clipped at `clip`.

    See `update_actor` for the rest.
    """
    return update(
        state,
        batch,
        forward=forward,
        objective=partial(value_objective, clip=clip),
        loop=loop,
        optimizer=optimizer,
        prefix="critic",
        key=key,
        donate=donate,
    )


def value_objective(
    params: Params | Whole, rows: Experience, weights: Tensor, *, forward: Forward, clip: float = 0.5
) -> tuple[Tensor, Metrics]:
    """`update_critic`'s objective on some rows of a mini-batch, with their weights [B, T], and its metrics.

    Raises ValueError for rows without values.
    """
    if rows.values is None:
        raise ValueError("update_critic needs values in the batch: annotate it with compute_values first")
    out = forward_micro_batch(params, rows, forward=forward, outputs=("values",))
    assert out.values is not None
    loss, report = losses.value_loss(out.values, rows.values, rows.returns, rows.response_mask, clip=clip)
    total, sums = weighted_sum({"critic/vf_loss": loss}, weights)
    return total, report | {"critic/vpred_mean": metrics.masked_mean(out.values, rows.response_mask)} | sums
