"""One pass of a model over rows: per-token log-probs, entropies and values, aligned with the response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import batch as batches
from fppo import models
from fppo.models.model import Model
from fppo.runtime.mesh import Mesh
from fppo.runtime.offload import OnHost
from fppo.steps.micro_batching import MicroBatching, partition
from fppo.steps.ranks import blank, rounds
from fppo.steps.sharded import Opened, Whole, opened, whole
from fppo.steps.train_state import Params
from fppo_kernels.collectives import Axis
from fppo_kernels.record import Kernels
from fppo_kernels.ulysses import gather_sequence, slice_sequence, ulysses

OUTPUTS = ("log_probs", "entropy", "sum_squared_probs", "values")


class Rows(Protocol):
    """What a pass reads of a record: a Rollout or any later stage."""

    @property
    def tokens(self) -> Tensor: ...  # [B, S] int64
    @property
    def attention_mask(self) -> Tensor: ...  # [B, S] bool
    @property
    def response_mask(self) -> Tensor: ...  # [B, T] bool


class TokenOutputs(NamedTuple):
    """Per-token outputs [B, T], float32 (float64 from float64 parameters), zero outside the response mask."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    sum_squared_probs: Tensor | None = None
    values: Tensor | None = None


def forward_micro_batch(
    params: Params | Whole | OnHost,
    micro_batch: Rows,
    *,
    model: Model,
    kernels: Kernels,
    mesh: Mesh,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("log_probs",),
    remove_padding: bool = True,
) -> TokenOutputs:
    """The outputs at every position t of the response, computed from the hidden state of the token before it.

    "log_probs" of the response tokens under logits / `temperature`, "entropy" and "sum_squared_probs" of that
    distribution need a model with a vocabulary head; "values" need one with a value head. Only positions in the
    response mask reach a head. `remove_padding` packs the rows; without it the padded rows run as they are.

    On a mesh with a sequence axis all its ranks hold the same rows; each runs its slice of the packed row, and all get
    all outputs. If all compute the same loss from them, each rank's gradient is its share: the sum over the axis is
    the gradient.
    """
    _check_outputs(model, outputs)
    mask = micro_batch.response_mask
    at_hand = opened(params, model, mesh)
    hidden, before = _hidden_before_responses(at_hand, micro_batch, model, kernels, mesh, remove_padding)
    own = _own(before, len(hidden), mesh["sequence"])
    index = mask.flatten().nonzero().flatten()
    head = models.output_head(model, at_hand.root)
    states = hidden[own.places]
    if "values" in outputs:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        bias = None if head.bias is None else head.bias.to(dtype)
        found = {"values": F.linear(states.to(dtype), head.weight.to(dtype), bias)[:, 0]}
    else:
        result = kernels.log_probs(
            states,
            head.weight,
            micro_batch.tokens[:, -mask.shape[1] :].flatten()[index][own.numbers],
            bias=head.bias,
            temperature=temperature,
            softcap=head.softcap,
            scale=head.scale,
            entropy="entropy" in outputs,
            sum_squared="sum_squared_probs" in outputs,
        )
        found = {
            "log_probs": result.log_probs,
            "entropy": result.entropy,
            "sum_squared_probs": result.sum_squared,
        }
    names = [name for name, x in found.items() if x is not None]
    columns = _gathered([x for x in found.values() if x is not None], own, before, len(hidden), mesh["sequence"])
    return TokenOutputs(**{name: kernels.pad(x, index, mask.shape) for name, x in zip(names, columns, strict=True)})


class _Own(NamedTuple):
    """Which of M tokens of the packed row are in this rank's slice."""

    numbers: Tensor | slice  # among the M
    places: Tensor  # in the slice


def _own(tokens: Tensor, length: int, axis: Axis) -> _Own:
    """Those of `tokens` (places in the whole row [M]) that are in this rank's slice of `length` tokens."""
    if axis.size == 1:
        return _Own(slice(None), tokens)
    places = tokens - axis.rank * length
    numbers = ((places >= 0) & (places < length)).nonzero().flatten()
    return _Own(numbers, places[numbers])


def _gathered(columns: Sequence[Tensor], own: _Own, tokens: Tensor, length: int, axis: Axis) -> Sequence[Tensor]:
    """Numbers of this rank's tokens as those of all `tokens` [M], on every rank, by one collective."""
    if axis.size == 1:
        return columns
    stacked = torch.stack(list(columns), 1)
    slots = stacked.new_zeros(length, len(columns)).index_copy(0, own.places, stacked)
    return gather_sequence(slots, axis)[tokens].unbind(1)


def _check_outputs(model: Model, outputs: Sequence[str]) -> None:
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"unknown outputs {unknown}; there are {list(OUTPUTS)}")
    needed = {"value" if name == "values" else "lm" for name in outputs}
    if needed - {model.head}:
        has, lacks = ("value", "vocabulary") if model.head == "value" else ("vocabulary", "value")
        raise ValueError(f"outputs {list(outputs)} need a {lacks} head; this model has a {has} head")


def _hidden_before_responses(
    params: Opened, rows: Rows, model: Model, kernels: Kernels, mesh: Mesh, remove_padding: bool
) -> tuple[Tensor, Tensor]:
    """Hidden states of this rank's slice [N, H], and for each response token [M] the place in the whole row of the
    token before it."""
    batch, width = rows.tokens.shape
    length = rows.response_mask.shape[1]
    columns = torch.arange(width - length, width, device=rows.tokens.device)
    flat = (torch.arange(batch, device=columns.device)[:, None] * width + columns)[rows.response_mask]
    if remove_padding:
        place = rows.attention_mask.flatten().cumsum(0) - 1
        return _packed_hidden(params, rows, model, kernels, mesh), place[flat] - 1
    if mesh["sequence"].size > 1:
        raise ValueError(
            f"remove_padding=False runs padded rows as they are, and a sequence axis of {mesh['sequence'].size} ranks "
            "cuts one packed row: remove padding, or use a mesh without a sequence axis"
        )
    positions = (rows.attention_mask.cumsum(1) - 1).clamp(min=0)
    attend = models.padded_attention(rows.attention_mask)
    hidden = models.hidden_states(
        model, params.root, rows.tokens, positions, attend=attend, apply_layer=params.apply_layer
    )
    return hidden.flatten(0, 1), flat - 1


def _packed_hidden(params: Opened, rows: Rows, model: Model, kernels: Kernels, mesh: Mesh) -> Tensor:
    """Hidden states of this rank's slice of the packed row, filled up to a multiple of the sequence axis."""
    axis = mesh["sequence"]
    packed = kernels.unpad(rows.tokens, rows.attention_mask, multiple=axis.size)
    attend = models.packed_attention(ulysses(kernels.attention, axis, kernels.all_to_all), packed.lengths)
    tokens, positions = (slice_sequence(x, axis) for x in (packed.tokens, packed.positions))
    return models.hidden_states(model, params.root, tokens, positions, attend=attend, apply_layer=params.apply_layer)


def _passes(batch: Rows, micro_batching: MicroBatching, mesh: Mesh) -> tuple[Tensor, Iterable[Rows]]:
    """Where each row's result is [B] among those of the micro-batches, and these, with blank ones at the end so that
    all ranks make equally many passes."""
    parts = partition(row_lengths(batch), micro_batching)
    (count,) = rounds([len(parts)], mesh, batch.tokens.device)
    order = batches.inverse([i for part in parts for i in part]).to(batch.tokens.device)
    return order, chain((batches.rows(batch, part) for part in parts), repeat(blank(batch), count - len(parts)))


def _held(params: Params | Whole | OnHost, model: Model, mesh: Mesh) -> Params | Whole | OnHost:
    """The parameters as several passes use them: whole where the sharding keeps them so between passes."""
    if mesh.sharded and mesh.sharding is not None and mesh.sharding.stage == 1:
        return whole(params, model, mesh)
    return params


def row_lengths(rows: Rows) -> list[int]:
    """The number of real tokens of each row, on the host."""
    return rows.attention_mask.sum(1).tolist()


def compute_outputs(
    params: Params | Whole | OnHost,
    batch: Rows,
    *,
    model: Model,
    kernels: Kernels,
    mesh: Mesh,
    micro_batching: MicroBatching,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("log_probs",),
    remove_padding: bool = True,
) -> TokenOutputs:
    """`forward_micro_batch` over all rows, of which there may be none, without gradients; rows come back in order."""
    order, micro_batches = _passes(batch, micro_batching, mesh)
    results: list[TokenOutputs] = []
    with torch.no_grad():
        held = _held(params, model, mesh)
        for rows in micro_batches:
            results.append(
                forward_micro_batch(
                    held,
                    rows,
                    model=model,
                    kernels=kernels,
                    mesh=mesh,
                    temperature=temperature,
                    outputs=outputs,
                    remove_padding=remove_padding,
                )
            )
    joined = {
        name: torch.cat([x for r in results if (x := getattr(r, name)) is not None])[order]
        for name in TokenOutputs._fields
        if getattr(results[0], name) is not None
    }
    return TokenOutputs(**joined)


def compute_log_probs(
    params: Params | Whole | OnHost,
    batch: Rows,
    *,
    model: Model,
    kernels: Kernels,
    mesh: Mesh,
    micro_batching: MicroBatching,
    temperature: float = 1.0,
    remove_padding: bool = True,
) -> Tensor:
    """Log-probs [B, T] of the response tokens under the policy or the reference; zero outside the response mask."""
    out = compute_outputs(
        params,
        batch,
        model=model,
        kernels=kernels,
        mesh=mesh,
        micro_batching=micro_batching,
        temperature=temperature,
        outputs=("log_probs",),
        remove_padding=remove_padding,
    )
    assert out.log_probs is not None
    return out.log_probs


def compute_values(
    params: Params | Whole | OnHost,
    batch: Rows,
    *,
    model: Model,
    kernels: Kernels,
    mesh: Mesh,
    micro_batching: MicroBatching,
    remove_padding: bool = True,
) -> Tensor:
    """The critic's values [B, T] before each response token; zero outside the response mask."""
    out = compute_outputs(
        params,
        batch,
        model=model,
        kernels=kernels,
        mesh=mesh,
        micro_batching=micro_batching,
        outputs=("values",),
        remove_padding=remove_padding,
    )
    assert out.values is not None
    return out.values


def compute_reward_scores(
    params: Params | Whole | OnHost,
    batch: Rows,
    *,
    model: Model,
    kernels: Kernels,
    mesh: Mesh,
    micro_batching: MicroBatching,
) -> Tensor:
    """A reward model's score [B] of each row: its head at the row's last real token. The model has a value head."""
    _check_outputs(model, ("values",))
    order, micro_batches = _passes(batch, micro_batching, mesh)
    scores: list[Tensor] = []
    with torch.no_grad():
        held = _held(params, model, mesh)
        for rows in micro_batches:
            at_hand = opened(held, model, mesh)
            head = models.output_head(model, at_hand.root)
            hidden = _packed_hidden(at_hand, rows, model, kernels, mesh)
            last = rows.attention_mask.sum(1).cumsum(0) - 1
            own = _own(last, len(hidden), mesh["sequence"])
            found = F.linear(hidden[own.places].to(head.weight.dtype), head.weight, head.bias)[:, 0].float()
            scores += _gathered([found], own, last, len(hidden), mesh["sequence"])
    return torch.cat(scores)[order]
