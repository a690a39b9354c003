"""A pass of a model that scores any tokens: log-probs of targets at every token of a row, not only of the next ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import models
from fppo.models.heads import Head
from fppo.models.logits import LogitForm
from fppo.models.model import Model
from fppo.runtime.mesh import AXES, DATA_AXES, Mesh
from fppo.runtime.offload import OnHost
from fppo.steps.forward import hidden_of
from fppo.steps.outputs import Forward, Rows
from fppo.steps.packed import Indices, indices_of
from fppo.steps.sharded import Gathered, opened
from fppo.steps.train_state import Params
from fppo_kernels.shapes import Float, Int
from fppo_kernels.shared import read, readings


class TargetRows(Rows, Protocol):
    """The columns that a pass over targets reads.

    `targets` [B, S, K] int64 are K tokens that may follow each token. Where `graded` [B, S] is False their log-probs
    are constants to the gradient, which saves the head's backward pass there.
    """

    @property
    def targets(self) -> Tensor: ...
    @property
    def graded(self) -> Tensor: ...


def forward_targets(
    params: Params | Gathered | OnHost, rows: TargetRows, *, forward: Forward, indices: Indices | None = None
) -> Float[Tensor, "b s k"]:
    """Compute log-probs [B, S, K] of the targets after each token, under the model's distribution of the next token:
    float32 (float64 for float64 parameters), zero at padding.

    The rows run as in `forward_micro_batch`: packed, and common prefixes once if the forward shares them. The response
    mask tells prompts from responses, which only sharing needs. Raises ValueError for a model without a vocabulary
    head, and on a mesh that cuts rows or models.
    """
    check_targets(forward.model, forward.mesh)
    indices = indices_of(rows, indices, forward)
    ready = opened(params, forward.model, forward.mesh)
    hidden = hidden_of(ready, rows, indices, forward)
    return score_targets(hidden, rows, [models.output_head(forward.model, ready.root)], forward, indices)


def score_targets(
    hidden: Float[Tensor, "n h"],
    rows: TargetRows,
    heads: Sequence[Head],
    forward: Forward,
    indices: Indices,
    head_of: Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b s k"]:
    """Compute the log-probs of `forward_targets` from hidden states. `head_of` is the index of each row's head among
    `heads`; None: the first."""
    shared = indices.shared
    real = indices.real.index if shared is None else shared.real.index  # [R], in [B * S]
    if shared is not None:
        places = shared.places
    else:
        places = torch.arange(len(real), device=real.device) if forward.remove_padding else real
    targets, graded = rows.targets.flatten(0, 1)[real], rows.graded.flatten()[real]
    number = torch.zeros_like(real) if head_of is None else head_of[real // rows.graded.shape[1]]
    values, order = list[Tensor](), list[Tensor]()
    for index, head in enumerate(heads):
        chosen, others = ((number == index) & counts for counts in (graded, ~graded))
        chosen, others = chosen.nonzero().flatten(), others.nonzero().flatten()
        order += [chosen, others]
        if len(chosen):
            own = places[chosen]
            states = hidden[own] if shared is None else read(hidden, readings(own.cpu(), len(hidden), hidden.device))
            values.append(_scores(states, targets[chosen], head, forward))
        if len(others):
            with torch.no_grad():
                values.append(_constants(hidden, places[others], targets[others], head, forward, shared is not None))
    return forward.kernels.pad(torch.cat(values)[torch.cat(order).argsort()], real, rows.attention_mask.shape)


def check_targets(model: Model, mesh: Mesh) -> None:
    """Raise ValueError for a model and a mesh that have no pass over targets."""
    if model.head != "lm":
        raise ValueError("log-probs of targets need a vocabulary head; this model has a value head")
    if cut := [name for name in AXES if name not in DATA_AXES and mesh[name].size > 1]:
        raise ValueError(
            f"log-probs of targets need whole rows and a whole model; this mesh has {cut}: use none of them"
        )


def _constants(
    hidden: Float[Tensor, "n h"],
    places: Int[Tensor, " m"],
    targets: Int[Tensor, "m k"],
    head: Head,
    forward: Forward,
    repeats: bool,
) -> Float[Tensor, "m k"]:
    """Score targets after the tokens at `places`, as constants to the gradient. With `repeats` places may repeat, as in
    shared prompts, and equal pairs of place and targets are scored once."""
    if not repeats:
        return _scores(hidden[places], targets, head, forward)
    pairs, back = torch.unique(torch.cat([places[:, None], targets], 1), dim=0, return_inverse=True)
    return _scores(hidden[pairs[:, 0]], pairs[:, 1:], head, forward)[back]


def _scores(
    states: Float[Tensor, "m h"], targets: Int[Tensor, "m k"], head: Head, forward: Forward
) -> Float[Tensor, "m k"]:
    """Log-probs of K targets of each state: the kernel computes that of the first target that the head does not
    exclude; the others follow by their logits' differences to it."""
    logits, place = None, targets.new_zeros(len(targets), 1)
    if targets.shape[1] > 1:
        logits = _logits(states, targets, head)
        place = (logits > -torch.inf).int().argmax(1, keepdim=True)
    first = forward.kernels.log_probs(
        states,
        head.weight,
        targets.gather(1, place)[:, 0],
        bias=head.bias,
        temperature=1.0,
        softcap=head.softcap,
        scale=head.scale,
        entropy=False,
        sum_squared=False,
    ).log_probs[:, None]
    if logits is None:
        return first
    beside = logits.gather(1, place)
    return first + (logits - beside.where(beside > -torch.inf, 0.0))  # where all are excluded, -inf for each


def _logits(states: Float[Tensor, "m h"], targets: Int[Tensor, "m k"], head: Head) -> Float[Tensor, "m k"]:
    """The logits of K targets of each state, in float32 or wider."""
    wide = torch.promote_types(torch.promote_types(states.dtype, head.weight.dtype), torch.float32)
    products = (F.embedding(targets, head.weight).to(wide) * states[:, None].to(wide)).sum(-1)
    if head.bias is not None:
        products = products + head.bias.to(wide)[targets]
    return LogitForm(head.softcap, head.scale)(products)
