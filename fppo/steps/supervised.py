"""Supervised learning on demonstrations, as a warm-up before reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs
import torch
from torch import Tensor

from fppo.batch import Column, RowInputs
from fppo.key import Key
from fppo.metrics import Metrics, report
from fppo.steps.loop import Loop, Objective, update, weighted_sum
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import Optimizer
from fppo.steps.outputs import Forward, TokenOutputs
from fppo.steps.train_state import Params, TrainState, init_state
from fppo.tree import state


@state
class Demonstrations:
    """Prompts with responses to imitate, padded as in a Rollout."""

    tokens: Tensor  # [B, S] int64
    attention_mask: Tensor  # [B, S] bool
    response_mask: Tensor  # [B, T] bool
    row_ids: Tensor  # [B] int64
    inputs: Column | None = None  # RowInputs of prompts that have images, else None


def demonstrations(
    prompts: list[list[int]],
    responses: list[list[int]],
    *,
    pad_token_id: int,
    inputs: Sequence[RowInputs | None] | None = None,
    imitated: Sequence[Sequence[bool]] | None = None,
) -> Demonstrations:
    """Make a record of token ids: prompts padded on the left, responses on the right. `inputs` are the prompts' images;
    `imitated` is True for each response token to imitate, by default all. Raises ValueError for an empty prompt."""
    if (empty := next((i for i, prompt in enumerate(prompts) if not prompt), None)) is not None:
        raise ValueError(f"demonstration {empty} has an empty prompt: its first response token has nothing before it")
    left, right = max(map(len, prompts)), max(map(len, responses))
    rows = [
        (left - len(prompt), [*prompt, *response], right - len(response))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    tokens = torch.tensor([[pad_token_id] * before + ids + [pad_token_id] * after for before, ids, after in rows])
    mask = torch.tensor([[False] * before + [True] * len(ids) + [False] * after for before, ids, after in rows])
    return Demonstrations(
        tokens=tokens,
        attention_mask=mask,
        response_mask=mask[:, left:] if imitated is None else _padded(imitated, right),
        row_ids=torch.arange(len(prompts)),
        inputs=None if inputs is None else Column(inputs),
    )


def _padded(masks: Sequence[Sequence[bool]], width: int) -> Tensor:
    """Pad masks with False on the right, to bool [B, width]."""
    rows = [[*mask, *[False] * (width - len(mask))] for mask in masks]
    return torch.tensor(rows, dtype=torch.bool).reshape(len(rows), width)


@attrs.frozen(kw_only=True)
class UpdateSupervised:
    """A stage that fits the model to the responses by maximum likelihood, in `loop.epochs` passes over a batch; see
    `UpdateActor` for the rest."""

    forward: Forward
    loop: Loop
    optimizer: Optimizer

    def __call__(
        self, state: TrainState, batch: Demonstrations, *, key: Key | None = None, donate: bool = False
    ) -> tuple[TrainState, Metrics]:
        """Update the model; return the new state and the metrics."""
        return update(
            state,
            batch,
            forward=self.forward,
            objective=Objective(loss=likelihood_loss),
            loop=self.loop,
            optimizer=self.optimizer,
            prefix="supervised",
            key=key,
            donate=donate,
        )


def likelihood_loss(out: TokenOutputs, rows: Demonstrations, weights: Tensor) -> tuple[Tensor, Metrics]:
    """The negative log-likelihood of some rows of a mini-batch, 0-d, by their weights [b, T], and its metrics."""
    del rows
    assert out.log_probs is not None
    return weighted_sum({"supervised/nll_loss": -out.log_probs}, weights)


def imitate(
    params: Params,
    batches: Iterable[Demonstrations],
    *,
    forward: Forward,
    optimizer: Optimizer,
    micro_batching: MicroBatching,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    every: int = 100,
) -> Params:
    """Make one supervised update per batch, and return the parameters; `on_step` gets the number and the loss of every
    `every`-th update."""
    state = init_state(params, optimizer)
    for number, batch in enumerate(batches, start=1):
        loop = Loop(mini_batch_size=len(batch.tokens), micro_batching=micro_batching)
        update_model = UpdateSupervised(forward=forward, loop=loop, optimizer=optimizer)
        state, metrics = update_model(state, batch, donate=number > 1)
        if number % every == 0:
            on_step(number, report(metrics)["supervised/nll_loss"])
    return state.params
