"""A critic that reads how sure the policy is, and no tokens: no second model, and no pass of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import batch as batches
from fppo import losses, metrics, tree
from fppo.batch import Experience
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.losses.value import first_output
from fppo.metrics import Metrics
from fppo.models.model import Params
from fppo.shapes import Mask, Outputs, Tokens
from fppo.steps.critic import ValueLossFn
from fppo.steps.loop import Loop, weighted_sum
from fppo.steps.optimizers import Optimizer
from fppo.steps.ranks import mini_batches
from fppo.steps.train_state import TrainState, optimizer_step
from fppo_kernels.shapes import Float

SIGNS = 8  # numbers that the critic reads before each token

UNCLIPPED = partial(losses.value_loss, clip=None)


def init_confidence(key: Key, *, width: int = 64, outputs: int = 1) -> Params:
    """A perceptron with one hidden layer, whose K outputs are 0: float32 `in_weight` [width, SIGNS], `in_bias` [width],
    `out_weight` [K, width], `out_bias` [K]."""
    draws = torch.randn(width, SIGNS, generator=key.fold("confidence").generator(), dtype=torch.float64)
    return {
        "in_weight": (draws / math.sqrt(SIGNS)).float(),
        "in_bias": torch.zeros(width),
        "out_weight": torch.zeros(outputs, width),
        "out_bias": torch.zeros(outputs),
    }


def signs(log_probs: Tokens, entropy: Tokens, mask: Mask) -> Float[Tensor, "b t f"]:
    """What shows how sure the policy is before each response token, [B, T, SIGNS] in the dtype of `log_probs`.

    `log_probs` and `entropy` [B, T] are the policy's; of the row's tokens in the mask before t it reads the sum of the
    log-probs, the least of them and the last one, as they are (over 5, from -2 on) and as probabilities; of the token
    at t the entropy of its distribution, which does not depend on which one was sampled; and how many tokens came
    before, as 1 - 1 / (1 + count). Tokens outside the mask are bridged as if they were not there.
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
    *,
    read: Callable[[Tensor], Tensor] = first_output,
) -> Tokens:
    """The values [B, T] before each response token, 0 outside the mask, from a policy's log-probs and entropies; `read`
    makes them of the K outputs, [..., K]."""
    return read(_outputs(params, signs(log_probs, entropy, mask))).where(mask, 0.0)


def _outputs(params: Params, seen: Float[Tensor, "b t f"]) -> Outputs:
    hidden = F.gelu(F.linear(seen.to(params["in_weight"].dtype), params["in_weight"], params["in_bias"]))
    return F.linear(hidden, params["out_weight"], params["out_bias"])


def update_confidence(
    state: TrainState,
    batch: Experience,
    *,
    loop: Loop,
    optimizer: Optimizer,
    loss_fn: ValueLossFn = UNCLIPPED,
    key: Key | None = None,
    donate: bool = False,
) -> tuple[TrainState, Metrics]:
    """The critic after `loop.epochs` passes over `batch`, with a value loss as in `update_critic`.

    All ranks hold all rows and compute the same. Raises ValueError for a batch without values or entropies.
    """
    if batch.values is None or batch.entropy is None:
        raise ValueError("update_confidence needs values and entropies in the batch: annotate it first")
    state = state if donate else tree.copy(state)
    seen = signs(batch.old_log_probs, batch.entropy, batch.response_mask)  # the same in all epochs
    history: list[Metrics] = []
    for epoch in range(loop.epochs):
        drawn = None if key is None else key.fold("epoch", epoch)
        for numbers in mini_batches(batch.row_ids, loop.mini_batch_size, key=drawn):
            rows, own = batches.rows((batch, seen), numbers)
            (_, report), grads = _gradient(state.params, rows=rows, seen=own, loop=loop, loss_fn=loss_fn)
            state, stepped = optimizer_step(state, grads, optimizer=optimizer, donate=True)
            history.append(metrics.settled(report) | {f"critic/{name}": m for name, m in stepped.items()})
    return state, metrics.merge(*history)


def _objective(
    params: Params, *, rows: Experience, seen: Tensor, loop: Loop, loss_fn: ValueLossFn
) -> tuple[Tensor, Metrics]:
    assert rows.values is not None
    mask, outputs = rows.response_mask, _outputs(params, seen)
    loss, report = loss_fn(outputs[..., 0] if outputs.shape[-1] == 1 else outputs, rows.values, rows.returns, mask)
    weights = losses.loss_weights(mask, loop.weight_mode, totals=losses.count_totals(mask), horizon=loop.horizon)
    total, sums = weighted_sum({"critic/vf_loss": loss}, weights)
    return total, report | sums


_gradient = value_and_grad(_objective, has_aux=True)
