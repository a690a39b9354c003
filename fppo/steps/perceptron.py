"""A critic with one hidden layer, over features that exist without a model of its own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import batch as batches
from fppo import losses, metrics, tree
from fppo.batch import Experience
from fppo.episodes import num_episodes
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.models.model import Params
from fppo.steps.critic import ValueLossFn, weighted_value_loss
from fppo.steps.loop import Loop
from fppo.steps.optimizers import Optimizer
from fppo.steps.train_state import TrainState, optimizer_step
from fppo_kernels.padding import sent
from fppo_kernels.shapes import Float, Int

UNCLIPPED = partial(losses.value_loss, clip=None)


def init_perceptron(key: Key, inputs: int, *, width: int, outputs: int, members: int = 1, signs: int = 0) -> Params:
    """Initialise a perceptron with one hidden layer: float32 `in_weight` [width, inputs], drawn from `key`, `in_bias`
    [width], `out_weight` [outputs, width] and `out_bias` [outputs]. All but `in_weight` are 0, so that it first gives
    0.

    `members` above 1 makes an ensemble, whose parameters have a further first dimension of that size. A privileged
    critic reads `signs` more inputs, the features of the truth.
    """
    inputs += signs
    if members > 1:
        each = [init_perceptron(key.fold("member", n), inputs, width=width, outputs=outputs) for n in range(members)]
        return {name: torch.stack([params[name] for params in each]) for name in each[0]}
    draws = torch.randn(width, inputs, generator=key.generator(), dtype=torch.float64)
    return {
        "in_weight": (draws / math.sqrt(inputs)).float(),
        "in_bias": torch.zeros(width),
        "out_weight": torch.zeros(outputs, width),
        "out_bias": torch.zeros(outputs),
    }


def perceptron(params: Params, features: Float[Tensor, "b t f"]) -> Float[Tensor, "*n b t k"]:
    """Compute the outputs [B, T, K] of a perceptron for `features` [B, T, F], or of an ensemble's N members,
    [N, B, T, K]."""
    features = features.to(params["in_weight"].dtype)
    if params["in_weight"].dim() == 2:
        hidden = F.gelu(F.linear(features, params["in_weight"], params["in_bias"]))
        return F.linear(hidden, params["out_weight"], params["out_bias"])
    hidden = F.gelu(torch.einsum("btf,nwf->nbtw", features, params["in_weight"]) + params["in_bias"][:, None, None])
    return torch.einsum("nbtw,nkw->nbtk", hidden, params["out_weight"]) + params["out_bias"][:, None, None]


def with_truth_signs(
    features: Float[Tensor, "b t f"], truth_signs: Float[Tensor, "b t g"] | None
) -> Float[Tensor, "b t h"]:
    """Concatenate `features` with a privileged critic's `truth_signs`, if any: [B, T, F + G]."""
    return features if truth_signs is None else torch.cat([features, truth_signs.to(features)], -1)


def member_of(ids: Sequence[str], members: int) -> Int[Tensor, " b"]:
    """The index of the ensemble member [B] that learns from each row. It depends only on the name of the prompt's data
    row, so that no two members learn from the same prompt."""
    digests = (hashlib.sha256(str(name).encode()).digest() for name in ids)
    return torch.tensor([int.from_bytes(digest[:8], "big") % members for digest in digests])


def update_perceptron(
    state: TrainState,
    batch: Experience,
    features: Float[Tensor, "b t f"],
    *,
    loop: Loop,
    optimizer: Optimizer,
    loss_fn: ValueLossFn,
    key: Key | None,
    donate: bool,
) -> tuple[TrainState, Metrics]:
    """Update a perceptron critic in `loop.epochs` passes over `batch`, of the given `features` [B, T, F].

    The critic also reads the batch's `truth_signs`, if there are any, and minimises a value loss as in `UpdateCritic`.
    Each member of an ensemble learns from its own rows (`member_of`). All ranks hold all rows and compute the same.
    Raises ValueError for a batch without values, and for a loss that is not [B, T].
    """
    if batch.values is None:
        raise ValueError("the update of a critic needs values in the batch: annotate it first")
    state = state if donate else tree.copy(state)
    weight = state.params["in_weight"]
    member = sent(member_of(list(batch.ids), len(weight) if weight.dim() == 3 else 1), batch.values.device)
    columns = (batch.values, batch.returns, batch.response_mask, with_truth_signs(features, batch.truth_signs), member)
    history: list[Metrics] = []
    for epoch in range(loop.epochs):
        drawn = None if key is None else key.fold("epoch", epoch)
        for numbers in loop.mini_batches(batch, drawn):
            (_, report), grads = _gradient(
                state.params, _PolicyRows(*batches.rows(columns, numbers)), loop=loop, loss_fn=loss_fn
            )
            turn = loop.turn(len(history), num_episodes(batch))
            state, stepped = optimizer_step(state, grads, optimizer=optimizer, turn=turn, donate=True)
            history.append(metrics.settled(report) | {f"critic/{name}": m for name, m in stepped.items()})
    return state, metrics.merge(*history)


class _PolicyRows(NamedTuple):
    values: Tensor  # [b, T]
    returns: Tensor  # [b, T]
    mask: Tensor  # [b, T]
    seen: Tensor  # [b, T, F]
    member: Tensor  # [b]


def _objective(params: Params, rows: _PolicyRows, *, loop: Loop, loss_fn: ValueLossFn) -> tuple[Tensor, Metrics]:
    outputs, mask = perceptron(params, rows.seen), rows.mask
    if outputs.dim() == 4:
        outputs = outputs[rows.member, torch.arange(len(mask), device=mask.device)]
    outputs = outputs[..., 0] if outputs.shape[-1] == 1 else outputs
    weights = losses.loss_weights(mask, loop.weight_mode, totals=losses.count_totals(mask), horizon=loop.horizon)
    return weighted_value_loss(outputs, rows.values, rows.returns, mask, weights, loss_fn=loss_fn)


_gradient = value_and_grad(_objective, has_aux=True)
