"""Scores of a reward model."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import models
from fppo.runtime.offload import OnHost
from fppo.steps.forward import Forward, Rows, check_outputs, for_passes, ordered_passes, packed_hidden, run_passes
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.packed import MicroBatch, gathered, own_tokens
from fppo.steps.sharded import Gathered, Whole, opened
from fppo.steps.train_state import Params
from fppo_kernels.shapes import Float


@torch.no_grad()
def compute_reward_scores(
    params: Params | Whole | OnHost, rows: Rows, *, forward: Forward, micro_batching: MicroBatching
) -> Float[Tensor, " b"]:
    """A reward model's score [B] of each row: the output of its value head at the row's last real token.

    For a sequence classifier that is the last token other than its config's padding token (`Model.padding`), as in
    transformers, also where that token ends a text; for a row of padding tokens alone, the first token. Rows are always
    packed.
    """
    check_outputs(forward.model, ("values",))
    forward = attrs.evolve(forward, remove_padding=True)
    order, micro_batches = ordered_passes(rows, micro_batching, forward)
    ready = for_passes(params, forward)
    halve = "a pass for reward scores" if micro_batching.halve_on_oom else None
    shape = lambda rows: rows.tokens.shape[:1]  # noqa: E731
    scores = run_passes(_scores, ready, micro_batches, forward=forward, shape=shape, halve=halve)
    return torch.cat(scores)[order].float()


def _scores(
    params: Params | Gathered | OnHost, micro: MicroBatch, *, forward: Forward, received: Tensor | None
) -> Tensor:
    """The head's output [b] at one token of each row, chosen by `_read`."""
    ready = opened(params, forward.model, forward.mesh)
    head, axis = models.output_head(forward.model, ready.root), forward.mesh.token_axis
    hidden, places, _ = packed_hidden(ready, micro.rows, micro.indices, forward, received=received)
    own = own_tokens(places[_read(micro.rows, forward.model.padding)], len(hidden), axis)
    numbers = F.linear(hidden[own.places].to(head.weight.dtype), head.weight, head.bias)[:, 0].float()
    return gathered([numbers], own, axis)[0]


def _read(rows: Rows, padding: int | None) -> Tensor:
    """The index, int64 [b], of each row's last token that is not `padding`, among the real tokens of all rows."""
    real = rows.attention_mask.bool()
    lengths = real.sum(1)
    last = lengths.cumsum(0) - 1
    if padding is None:
        return last
    numbers = real.cumsum(1)  # of a row's real tokens, from 1
    said = numbers.where(real & (rows.tokens != padding), 0).amax(1)
    return last - (lengths - said.clamp(min=1)).where(lengths > 0, 0)
