"""The update of the critic. What it computes does not depend on the split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from fppo import losses, metrics
from fppo.batch import Experience
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.steps.forward import Forward, forward_micro_batch
from fppo.steps.loop import Loop, update, weighted_sum
from fppo.steps.optimizers import Optimizer
from fppo.steps.sharded import Gathered
from fppo.steps.train_state import Params, TrainState

ValueLossFn = Callable[..., tuple[Tensor, Metrics]]


def update_critic(
    state: TrainState,
    batch: Experience,
    *,
    forward: Forward,
    loop: Loop,
    optimizer: Optimizer,
    loss_fn: ValueLossFn = losses.value_loss,
    view: Callable[[Any], Any] = lambda batch: batch,
    key: Key | None = None,
    donate: bool = False,
) -> tuple[TrainState, Metrics]:
    """The critic after `loop.epochs` passes over `batch`, with a value loss whose scalars are bound.

    `loss_fn(values, old_values, returns, mask)` takes values [B, T] of a head of one output; of one of K it takes them
    all, [B, T, K], as the loss of a `losses.ValueHead` does, whose `read` is that of `forward` then. `view` makes of
    the batch what the critic sees in its place, such as `data.with_truth`. See `update_actor` for the rest.
    """
    return update(
        state,
        view(batch),
        forward=forward,
        objective=partial(value_objective, loss_fn=loss_fn),
        loop=loop,
        optimizer=optimizer,
        prefix="critic",
        key=key,
        donate=donate,
    )


def value_objective(
    params: Params | Gathered,
    rows: Experience,
    weights: Tensor,
    *,
    forward: Forward,
    loss_fn: ValueLossFn = losses.value_loss,
) -> tuple[Tensor, Metrics]:
    """`update_critic`'s objective on some rows of a mini-batch, with their weights [B, T], and its metrics.

    Raises ValueError for rows without values, and for a loss of another shape.
    """
    if rows.values is None:
        raise ValueError("update_critic needs values in the batch: annotate it with compute_values first")
    mask, wanted = rows.response_mask, ("values",) if forward.model.outputs == 1 else ("values", "outputs")
    out = forward_micro_batch(params, rows, forward=forward, outputs=wanted)
    assert out.values is not None
    given = out.values if out.outputs is None else out.outputs
    total, report = weighted_value_loss(given, rows.values, rows.returns, mask, weights, loss_fn=loss_fn)
    return total, report | {"critic/vpred_mean": metrics.masked_mean(out.values, mask)}


def weighted_value_loss(
    outputs: Tensor, values: Tensor, returns: Tensor, mask: Tensor, weights: Tensor, *, loss_fn: ValueLossFn
) -> tuple[Tensor, Metrics]:
    """The sum of weight times loss, 0-d, of a critic's `outputs`, [B, T] or [B, T, K]; and its metrics. The rest is
    [B, T]. Raises ValueError for a loss of another shape."""
    loss, report = loss_fn(outputs, values, returns, mask)
    if loss.shape != mask.shape:
        raise ValueError(f"the value loss is {list(loss.shape)}, expected [B, T] = {list(mask.shape)}: sum nothing")
    total, sums = weighted_sum({"critic/vf_loss": loss}, weights)
    return total, report | sums
