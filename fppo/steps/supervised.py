"""Supervised learning on demonstrations: the warm-up before reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fppo.key import Key
from fppo.metrics import Metrics, report
from fppo.models.model import Model
from fppo.runtime.mesh import Mesh
from fppo.steps.epochs import update_epochs, weighted
from fppo.steps.forward import forward_micro_batch
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizer import Optimizer
from fppo.steps.sharded import Whole
from fppo.steps.train_state import Params, TrainState, init_state
from fppo.tree import state
from fppo_kernels.record import Kernels


@state
class Demonstrations:
    """Prompts with the responses to imitate, padded as in a Rollout."""

    tokens: Tensor  # [B, S] int64
    attention_mask: Tensor  # [B, S] bool
    response_mask: Tensor  # [B, T] bool
    row_ids: Tensor  # [B] int64


def demonstrations(prompts: list[list[int]], responses: list[list[int]], *, pad_token_id: int) -> Demonstrations:
    """Token ids as a record: prompts padded on the left, responses on the right. No prompt may be empty."""
    left, right = max(map(len, prompts)), max(map(len, responses))
    tokens = torch.full((len(prompts), left + right), pad_token_id)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not prompt:
            raise ValueError(f"demonstration {i} has an empty prompt: its first response token has nothing before it")
        tokens[i, left - len(prompt) : left + len(response)] = torch.tensor([*prompt, *response])
        mask[i, left - len(prompt) : left + len(response)] = True
    return Demonstrations(
        tokens=tokens, attention_mask=mask, response_mask=mask[:, left:], row_ids=torch.arange(len(prompts))
    )


def update_supervised(
    state: TrainState,
    batch: Demonstrations,
    *,
    model: Model,
    optimizer: Optimizer,
    kernels: Kernels,
    mesh: Mesh,
    mini_batch_size: int,
    micro_batching: MicroBatching,
    epochs: int = 1,
    weight_mode: str = "token-mean",
    key: Key | None = None,
    whole_batch: bool = False,
    donate: bool = False,
) -> tuple[TrainState, Metrics]:
    """The model after `epochs` passes of maximum likelihood on the responses; see `update_actor` for the rest."""

    def micro_loss(params: Params | Whole, rows: Demonstrations, weights: Tensor, selected: Tensor | None):
        del selected
        out = forward_micro_batch(params, rows, model=model, kernels=kernels, mesh=mesh)
        assert out.log_probs is not None
        return weighted({"supervised/nll_loss": -out.log_probs}, weights, {})

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
        horizon=None,
        prefix="supervised",
        key=key,
        whole_batch=whole_batch,
        donate=donate,
    )


def imitate(
    params: Params,
    batches: Iterable[Demonstrations],
    *,
    model: Model,
    optimizer: Optimizer,
    kernels: Kernels,
    mesh: Mesh,
    micro_batching: MicroBatching,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    every: int = 100,
) -> Params:
    """The parameters after one supervised update per batch; `on_step` hears the loss of every `every`-th."""
    state = init_state(params)
    for number, batch in enumerate(batches, start=1):
        state, metrics = update_supervised(
            state,
            batch,
            model=model,
            optimizer=optimizer,
            kernels=kernels,
            mesh=mesh,
            mini_batch_size=len(batch.tokens),
            micro_batching=micro_batching,
            donate=number > 1,
        )
        if number % every == 0:
            on_step(number, report(metrics)["supervised/nll_loss"])
    return state.params
