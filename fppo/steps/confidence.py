"""A critic that reads the policy's confidence and no tokens: it needs neither a second model nor a pass of its own."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo.batch import Experience
from fppo.key import Key
from fppo.losses.value import first_output
from fppo.metrics import Metrics
from fppo.models.model import Params
from fppo.shapes import Mask, Tokens
from fppo.steps.critic import ValueLossFn
from fppo.steps.loop import Loop
from fppo.steps.optimizers import Optimizer
from fppo.steps.perceptron import UNCLIPPED, init_perceptron, perceptron, update_perceptron, with_truth_signs
from fppo.steps.train_state import TrainState
from fppo_kernels.shapes import Float

SIGNS = 8  # features before each token


def init_confidence(key: Key, *, width: int = 64, outputs: int = 1, members: int = 1, signs: int = 0) -> Params:
    """Initialise a perceptron with SIGNS inputs and `outputs` outputs, or an ensemble of `members`; see
    `init_perceptron`."""
    shape = {"width": width, "outputs": outputs, "members": members, "signs": signs}
    return init_perceptron(key.fold("confidence"), SIGNS, **shape)


def signs(log_probs: Tokens, entropy: Tokens, mask: Mask) -> Float[Tensor, "b t f"]:
    """Features of the policy's confidence before each response token, [B, T, SIGNS] in the dtype of `log_probs`.

    `log_probs` and `entropy` [B, T] are the policy's. From the row's masked-in tokens before t: the sum and the minimum
    of the log-probs, both as they are (divided by 5, at least -2) and as probabilities, and the last token's
    probability. From the token at t: the entropy of its distribution, as it is and as exp(-entropy); it does not depend
    on the sampled token. The last feature is the number of earlier tokens, as 1 - 1 / (1 + count). Tokens outside the
    mask are skipped.
    """
    said = log_probs.detach().where(mask, 0.0)
    before = F.pad(said, (1, 0))[:, :-1]
    seen = F.pad(mask, (1, 0))[:, :-1]
    place = torch.arange(mask.shape[1], device=mask.device).expand_as(seen).where(seen, 0).cummax(1).values
    last, total, least = before.gather(1, place), before.cumsum(1), before.cummin(1).values
    count = seen.cumsum(1).to(said.dtype)
    undecided = entropy.detach().where(mask, 0.0)
    logs = [(x / 5).clamp(min=-2.0) for x in (total, least)]
    return torch.stack(
        [total.exp(), least.exp(), last.exp(), *logs, undecided, (-undecided).exp(), 1 - 1 / (1 + count)], -1
    )


def confidence_values(
    params: Params,
    log_probs: Tokens,
    entropy: Tokens,
    mask: Mask,
    truth_signs: Float[Tensor, "b t f"] | None = None,
    *,
    read: Callable[[Tensor], Tensor] = first_output,
) -> Float[Tensor, "*n b t"]:
    """Values [B, T] before each response token, 0 outside the mask, from a policy's log-probs and entropies [B, T].

    `read` computes them from the K outputs [..., K]. A privileged critic also reads `data.truth_signs` [B, T, F]. For
    an ensemble of N members: [N, B, T].
    """
    return read(perceptron(params, with_truth_signs(signs(log_probs, entropy, mask), truth_signs))).where(mask, 0.0)


@attrs.frozen(kw_only=True)
class UpdateConfidence:
    """A stage that updates the critic in `loop.epochs` passes over a batch, with a value loss as in `UpdateCritic`; see
    `update_perceptron` for the rest."""

    loop: Loop
    optimizer: Optimizer
    loss_fn: ValueLossFn = UNCLIPPED

    def __call__(
        self, state: TrainState, batch: Experience, *, key: Key | None = None, donate: bool = False
    ) -> tuple[TrainState, Metrics]:
        """Update the critic; return the new state and the metrics. Raises ValueError for a batch without entropies."""
        if batch.entropy is None:
            raise ValueError("UpdateConfidence needs entropies in the batch: annotate it first")
        seen = signs(batch.old_log_probs, batch.entropy, batch.response_mask)  # equal in all epochs
        how = {"loop": self.loop, "optimizer": self.optimizer, "loss_fn": self.loss_fn}
        return update_perceptron(state, batch, seen, **how, key=key, donate=donate)
