"""A critic that reads the policy's hidden states (a probe): it needs neither a second model nor a pass of its own."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from torch import Tensor

from fppo.batch import Experience
from fppo.key import Key
from fppo.losses.value import first_output
from fppo.metrics import Metrics
from fppo.models.model import Params
from fppo.shapes import Mask, Outputs
from fppo.steps.critic import ValueLossFn
from fppo.steps.loop import Loop
from fppo.steps.optimizers import Optimizer
from fppo.steps.perceptron import UNCLIPPED, init_perceptron, perceptron, update_perceptron, with_truth_signs
from fppo.steps.train_state import TrainState
from fppo_kernels.shapes import Float


def init_hidden(key: Key, size: int, *, width: int = 64, outputs: int = 1, members: int = 1, signs: int = 0) -> Params:
    """Initialise a perceptron over hidden states of `size` features (`models.hidden_width`) with `outputs` outputs, or
    an ensemble of `members`; see `init_perceptron`."""
    shape = {"width": width, "outputs": outputs, "members": members, "signs": signs}
    return init_perceptron(key.fold("hidden"), size, **shape)


def hidden_values(
    params: Params,
    hidden: Outputs,
    mask: Mask,
    truth_signs: Float[Tensor, "b t f"] | None = None,
    *,
    read: Callable[[Tensor], Tensor] = first_output,
) -> Float[Tensor, "*n b t"]:
    """Values [B, T] before each response token, 0 outside the mask, from a policy's hidden states.

    `hidden` [B, T, H] is what the policy's head reads there ("hidden" of `compute_outputs`): the state before t depends
    on the prompt and the response before t, not on the token at t. `read` computes values from the K outputs [..., K].
    A privileged critic also reads `data.truth_signs` [B, T, F]. For an ensemble of N members: [N, B, T].
    """
    return read(perceptron(params, with_truth_signs(hidden.detach(), truth_signs))).where(mask, 0.0)


@attrs.frozen(kw_only=True)
class UpdateHidden:
    """A stage that updates the critic in `loop.epochs` passes over the states in a batch, with a value loss as in
    `UpdateCritic`; see `update_perceptron` for the rest.

    The states are those of the policy that sampled. They get no gradient.
    """

    loop: Loop
    optimizer: Optimizer
    loss_fn: ValueLossFn = UNCLIPPED

    def __call__(
        self, state: TrainState, batch: Experience, *, key: Key | None = None, donate: bool = False
    ) -> tuple[TrainState, Metrics]:
        """Update the critic; return the new state and the metrics. Raises ValueError for a batch without states."""
        if batch.hidden is None:
            raise ValueError("UpdateHidden needs hidden states in the batch: annotate it first")
        seen = batch.hidden.where(batch.response_mask[..., None], 0.0)
        how = {"loop": self.loop, "optimizer": self.optimizer, "loss_fn": self.loss_fn}
        return update_perceptron(state, batch, seen, **how, key=key, donate=donate)
