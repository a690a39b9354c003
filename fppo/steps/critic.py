"""The update of the critic. Results do not depend on the split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from fppo import losses, metrics
from fppo.batch import Experience
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.steps.loop import Loop, Objective, update, weighted_sum
from fppo.steps.optimizers import Optimizer
from fppo.steps.outputs import Forward, TokenOutputs
from fppo.steps.recorded import Recorder
from fppo.steps.train_state import TrainState

ValueLossFn = Callable[..., tuple[Tensor, Metrics]]


def as_it_is(batch: Any) -> Any:
    """Return the batch unchanged: the critic sees what the policy sees."""
    return batch


@attrs.frozen(kw_only=True)
class ValueObjective:
    """The objective that updates of the critic minimise: the weighted sum of a value loss over tokens."""

    loss_fn: ValueLossFn

    def __call__(self, out: TokenOutputs, rows: Experience, weights: Tensor) -> tuple[Tensor, Metrics]:
        """Compute the objective, 0-d, and metrics for some rows of a mini-batch, from a pass over them and their
        weights [b, T]."""
        assert out.values is not None
        assert rows.values is not None
        given = out.values if out.outputs is None else out.outputs
        mask = rows.response_mask
        total, report = weighted_value_loss(given, rows.values, rows.returns, mask, weights, loss_fn=self.loss_fn)
        return total, report | {"critic/vpred_mean": metrics.masked_mean(out.values, mask)}


@attrs.frozen(kw_only=True)
class UpdateCritic:
    """A stage that updates the critic in `loop.epochs` passes over a batch, by a value loss with its scalars bound.

    `loss_fn(values, old_values, returns, mask)` takes values [B, T] from a head with one output. From a head with K
    outputs it takes all of them, [B, T, K], like the loss of a `losses.ValueHead`; `forward.read` must then be that
    head's `read`. `view` replaces the batch by what the critic sees, such as `data.with_truth`. See `UpdateActor` for
    the rest.
    """

    forward: Forward
    loop: Loop
    optimizer: Optimizer
    loss_fn: ValueLossFn = losses.value_loss
    view: Callable[[Any], Any] = as_it_is
    record: Recorder | None = None

    def __call__(
        self, state: TrainState, batch: Experience, *, key: Key | None = None, donate: bool = False
    ) -> tuple[TrainState, Metrics]:
        """Update the critic; return the new state and the metrics. Raises ValueError for a batch without values, and
        for a loss that is not [B, T]."""
        if batch.values is None:
            raise ValueError("UpdateCritic needs values in the batch: annotate it with compute_values first")
        return update(
            state,
            self.view(batch),
            forward=self.forward,
            objective=self.objective(),
            loop=self.loop,
            optimizer=self.optimizer,
            prefix="critic",
            record=self.record,
            key=key,
            donate=donate,
        )

    def objective(self) -> Objective:
        """The objective that this stage's updates minimise."""
        wanted = ("values",) if self.forward.model.outputs == 1 else ("values", "outputs")
        return Objective(loss=ValueObjective(loss_fn=self.loss_fn), outputs=wanted)


def weighted_value_loss(
    outputs: Tensor, values: Tensor, returns: Tensor, mask: Tensor, weights: Tensor, *, loss_fn: ValueLossFn
) -> tuple[Tensor, Metrics]:
    """Sum weight times loss over tokens, 0-d, for a critic's `outputs` [B, T] or [B, T, K], with metrics. All other
    arguments are [B, T]. Raises ValueError for a loss of another shape."""
    loss, report = loss_fn(outputs, values, returns, mask)
    if loss.shape != mask.shape:
        raise ValueError(f"the value loss is {list(loss.shape)}, expected [B, T] = {list(mask.shape)}: sum nothing")
    total, sums = weighted_sum({"critic/vf_loss": loss}, weights)
    return total, report | sums
