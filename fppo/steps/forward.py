"""One pass of a model over rows: per-token log-probs, entropies and values, aligned with the response."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import NamedTuple, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import batch as batches
from fppo import models
from fppo.losses.value import first_output
from fppo.models.model import Model
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.runtime.offload import OnHost
from fppo.shapes import Outputs, Tokens
from fppo.steps.micro_batching import MicroBatching, partition
from fppo.steps.packed import cutting, multiple, slice_of
from fppo.steps.ranks import blank, rounds
from fppo.steps.sharded import Opened, Whole, cast, opened, whole
from fppo.steps.stages import stage_outputs
from fppo.steps.train_state import Params
from fppo_kernels.collectives import Axis, all_gather, same
from fppo_kernels.record import Kernels
from fppo_kernels.shapes import Float
from fppo_kernels.ulysses import gather_sequence

OUTPUTS = ("log_probs", "entropy", "sum_squared_probs", "values", "outputs")
OF_VALUE_HEADS = ("values", "outputs")


@runtime_checkable
class Rows(Protocol):
    """What a pass reads of a record: a Rollout or any later stage."""

    @property
    def tokens(self) -> Tensor: ...  # [B, S] int64
    @property
    def attention_mask(self) -> Tensor: ...  # [B, S] bool
    @property
    def response_mask(self) -> Tensor: ...  # [B, T] bool


@attrs.frozen
class Forward:
    """What runs a model: its code, the kernels it runs with and the mesh it runs on.

    `remove_padding` packs the rows of a pass; without it the padded rows run as they are. `read` makes values [...] of
    what a value head gives, [..., K]. `received` is what one stage of a pipeline has from the stage before it, in a
    pass of it.
    """

    model: Model
    kernels: Kernels = attrs.field(factory=Kernels.named)
    mesh: Mesh = LOCAL
    remove_padding: bool = True
    read: Callable[[Tensor], Tensor] = first_output
    received: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        layout = self.model.layout
        for axis, placed in (
            ("tensor", 1 if layout is None else layout.ranks),
            ("pipeline", 1 if layout is None else layout.stage_ranks),
        ):
            if (size := self.mesh[axis].size) != placed:
                raise ValueError(
                    f"the mesh has a {axis} axis of {size} ranks, and the model is one for {placed}: give "
                    "models.place(model, mesh) of the whole model"
                )
        for name in ("tensor", "context"):
            if self.mesh[name].size > 1 and not self.remove_padding:
                raise ValueError(
                    f"remove_padding=False runs padded rows as they are, and a {name} axis of {self.mesh[name].size} "
                    f"ranks cuts one packed row: remove padding, or use a mesh without a {name} axis"
                )
        sequence, context = self.mesh["sequence"].size, self.mesh["context"].size
        if sequence > 1 and context > 1:
            raise ValueError(
                f"a sequence axis of {sequence} ranks and a context axis of {context} both cut the packed row: use one "
                f"of them, of {sequence * context} ranks"
            )


class TokenOutputs(NamedTuple):
    """Per-token outputs [B, T], float32 (float64 from float64 parameters), zero outside the response mask; and the K
    numbers of a value head, [B, T, K]."""

    log_probs: Tokens | None = None
    entropy: Tokens | None = None
    sum_squared_probs: Tokens | None = None
    values: Tokens | None = None
    outputs: Outputs | None = None


def forward_micro_batch(
    params: Params | Whole | OnHost,
    rows: Rows,
    *,
    forward: Forward,
    outputs: Sequence[str] = ("log_probs",),
    temperature: float = 1.0,
) -> TokenOutputs:
    """The outputs at every position t of the response, computed from the hidden state of the token before it.

    "log_probs" of the response tokens under logits / `temperature`, "entropy" and "sum_squared_probs" of that
    distribution need a model with a vocabulary head; "outputs" of a value head, or the "values" that are read of them,
    need one with a value head. Only positions in the response mask reach a head.

    On a mesh with a sequence, context or tensor axis all its ranks hold the same rows; each runs its tokens of the
    packed row, and all get all outputs. If all compute the same loss from them, each rank's gradient is its share: the
    sum over the axis is the gradient.
    """
    _check_outputs(forward.model, outputs)
    if goes_on(forward.model):
        raise ValueError("this rank has no head, but stages of a pipeline before it: call compute_outputs on all ranks")
    mask, axis, tensor = rows.response_mask, cutting(forward.mesh), forward.mesh["tensor"]
    ready = opened(params, forward.model, forward.mesh)
    index = mask.flatten().nonzero().flatten()
    hidden, before = _hidden_before_responses(ready, rows, index, forward)
    own = _own(before, len(hidden), axis)
    head = models.output_head(forward.model, ready.root)
    states = hidden[own.places]
    if set(outputs) & set(OF_VALUE_HEADS):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        bias = None if head.bias is None else head.bias.to(dtype)
        numbers = F.linear(states.to(dtype), head.weight.to(dtype), bias)
        made = {"values": forward.read, "outputs": lambda x: x}
        computed = {name: made[name](numbers) for name in outputs}
    else:
        kernel = forward.kernels.log_probs
        result = (kernel if tensor.size == 1 else partial(kernel, axis=tensor))(
            states,
            head.weight,
            rows.tokens[:, -mask.shape[1] :].flatten()[index][own.numbers],
            bias=head.bias,
            temperature=temperature,
            softcap=head.softcap,
            scale=head.scale,
            entropy="entropy" in outputs,
            sum_squared="sum_squared_probs" in outputs,
        )
        computed = {
            "log_probs": result.log_probs,
            "entropy": result.entropy,
            "sum_squared_probs": result.sum_squared,
        }
    names = [name for name, x in computed.items() if x is not None]
    own_columns = [same(x, tensor) for x in computed.values() if x is not None]
    columns = _gathered(own_columns, own, before, len(hidden), axis)
    pad = forward.kernels.pad
    return TokenOutputs(**{name: pad(x, index, mask.shape) for name, x in zip(names, columns, strict=True)})


class _Own(NamedTuple):
    """Which of M tokens of the packed row this rank has."""

    numbers: Tensor | slice  # among the M
    places: Tensor  # among this rank's


def _own(tokens: Tensor, length: int, axis: Axis) -> _Own:
    """Those of `tokens` (places among all ranks' tokens [M], one rank after the other) that this rank has, of `length`
    tokens."""
    if axis.size == 1:
        return _Own(slice(None), tokens)
    places = tokens - axis.rank * length
    numbers = ((places >= 0) & (places < length)).nonzero().flatten()
    return _Own(numbers, places[numbers])


def _gathered(columns: Sequence[Tensor], own: _Own, tokens: Tensor, length: int, axis: Axis) -> Sequence[Tensor]:
    """Numbers of this rank's tokens, [M, ...], as those of all `tokens` [M], on every rank, by one collective."""
    if axis.size == 1:
        return columns
    flat = [x.flatten(1) if x.dim() > 1 else x[:, None] for x in columns]
    stacked = torch.cat(flat, 1)
    slots = stacked.new_zeros(length, stacked.shape[1]).index_copy(0, own.places, stacked)
    whole = gather_sequence(slots, axis)[tokens].split([x.shape[1] for x in flat], 1)
    return [x.view(-1, *column.shape[1:]) for x, column in zip(whole, columns, strict=True)]


def stage_states(params: Params | Whole | OnHost, rows: Rows, *, forward: Forward) -> Tensor:
    """What a stage of a pipeline hands on: the hidden states [N, H] of this rank's slice after its last layer."""
    ready = opened(params, forward.model, forward.mesh)
    return _hidden_before_responses(ready, rows, rows.response_mask.new_zeros(0, dtype=torch.int64), forward)[0]


def goes_on(model: Model) -> bool:
    """Whether a model is a stage of a pipeline that others follow."""
    return bool(model.spans) and not model.spans[-1].ends


def slice_length(rows: Rows, forward: Forward) -> int:
    """How many tokens of the rows a rank's slice has, between blocks."""
    if not forward.remove_padding:
        return rows.tokens.numel()
    whole = multiple(forward.mesh)
    length = -(-sum(row_lengths(rows)) // whole) * whole
    return length // (cutting(forward.mesh).size * forward.mesh["tensor"].size)


def _check_outputs(model: Model, outputs: Sequence[str]) -> None:
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"unknown outputs {unknown}; there are {list(OUTPUTS)}")
    needed = {"value" if name in OF_VALUE_HEADS else "lm" for name in outputs}
    if needed - {model.head}:
        has, lacks = ("value", "vocabulary") if model.head == "value" else ("vocabulary", "value")
        raise ValueError(f"outputs {list(outputs)} need a {lacks} head; this model has a {has} head")


def _hidden_before_responses(params: Opened, rows: Rows, index: Tensor, forward: Forward) -> tuple[Tensor, Tensor]:
    """Hidden states of this rank's tokens [N, H], and for each response token [M], at flat place index[i] of the
    response mask [B, T], the place of the token before it among all ranks' tokens, one rank after the other."""
    width, length = rows.tokens.shape[1], rows.response_mask.shape[1]
    ranks = forward.mesh["sequence"].size
    flat = index + (index // max(length, 1) + 1) * (width - length)
    if forward.remove_padding:
        place = rows.attention_mask.flatten().cumsum(0) - 1
        hidden, places = _packed_hidden(params, rows, forward)
        return hidden, places[place[flat] - 1]
    if ranks > 1:
        raise ValueError(
            f"remove_padding=False runs padded rows as they are, and a sequence axis of {ranks} ranks "
            "cuts one packed row: remove padding, or use a mesh without a sequence axis"
        )
    positions = (rows.attention_mask.cumsum(1) - 1).clamp(min=0)
    attend = models.padded_attention(rows.attention_mask)
    received = None if forward.received is None else forward.received.unflatten(0, rows.tokens.shape)
    hidden = models.hidden_states(
        forward.model,
        params.root,
        rows.tokens,
        positions,
        attend=attend,
        kernels=forward.kernels,
        apply_layer=params.apply_layer,
        received=received,
    )
    return hidden.flatten(0, 1), flat - 1


def _packed_hidden(params: Opened, rows: Rows, forward: Forward) -> tuple[Tensor, Tensor]:
    """Hidden states of this rank's tokens of the packed row [N, H], and where each token of the row is among all ranks'
    tokens, one rank after the other."""
    kernels, mesh = forward.kernels, forward.mesh
    packed = kernels.unpad(rows.tokens, rows.attention_mask, multiple=multiple(mesh))
    own = slice_of(packed, forward.model, kernels, mesh)
    hidden = models.hidden_states(
        forward.model,
        params.root,
        own.tokens,
        own.positions,
        attend=own.attend,
        kernels=kernels,
        apply_layer=params.apply_layer,
        received=forward.received,
    )
    return (hidden if goes_on(forward.model) else all_gather(hidden, mesh["tensor"])), own.places


def _passes(rows: Rows, micro_batching: MicroBatching, mesh: Mesh) -> tuple[Tensor, Iterable[Rows]]:
    """Where each row's result is [B] among those of the micro-batches, and these, with blank ones at the end so that
    all ranks make equally many passes."""
    groups = partition(row_lengths(rows), micro_batching)
    (count,) = rounds([len(groups)], mesh, rows.tokens.device)
    order = batches.inverse([i for group in groups for i in group]).to(rows.tokens.device)
    return order, chain((batches.rows(rows, group) for group in groups), repeat(blank(rows), count - len(groups)))


def _for_passes(params: Params | Whole | OnHost, forward: Forward) -> Params | Whole | OnHost:
    """The parameters as several passes use them: whole where the sharding keeps them so between passes, and cast once
    where nothing is cut."""
    mesh = forward.mesh
    if isinstance(params, dict) and not mesh.sharded:
        return cast(params, forward.model)
    if mesh.sharded and mesh.sharding is not None and mesh.sharding.stage == 1:
        return whole(params, forward.model, mesh)
    return params


def run_passes(
    fn: Callable[..., Tensor],
    params: Params | Whole | OnHost,
    micro_batches: Iterable[Rows],
    *,
    forward: Forward,
    shape: Callable[[Rows], Sequence[int]],
) -> list[Tensor]:
    """`fn(params, rows, forward=forward)` of each micro-batch, of `shape(rows)`; on a pipeline axis on all ranks."""
    if not forward.model.spans:
        return [fn(params, rows, forward=forward) for rows in micro_batches]
    every = list(micro_batches)

    def run(params: Params | Whole | OnHost, rows: Rows, *, forward: Forward) -> Tensor:
        return (stage_states if goes_on(forward.model) else fn)(params, rows, forward=forward)

    lengths, shapes = [slice_length(rows, forward) for rows in every], [shape(rows) for rows in every]
    return stage_outputs(run, params, every, forward=forward, lengths=lengths, shapes=shapes)


def row_lengths(rows: Rows) -> list[int]:
    """The number of real tokens of each row, on the host."""
    return rows.attention_mask.sum(1).tolist()


@torch.no_grad()
def compute_outputs(
    params: Params | Whole | OnHost,
    rows: Rows,
    *,
    forward: Forward,
    micro_batching: MicroBatching,
    outputs: Sequence[str] = ("log_probs",),
    temperature: float = 1.0,
) -> TokenOutputs:
    """`forward_micro_batch` over all rows, of which there may be none, without gradients; rows come back in order."""
    _check_outputs(forward.model, outputs)
    lm = forward.model.head == "lm"
    names = [name for name in TokenOutputs._fields if name in outputs or (lm and name == "log_probs")]
    sizes = [forward.model.outputs if name == "outputs" else 1 for name in names]

    def run(params: Params | Whole | OnHost, rows: Rows, *, forward: Forward) -> Tensor:
        out = forward_micro_batch(params, rows, forward=forward, outputs=outputs, temperature=temperature)
        columns = [getattr(out, name) for name in names]
        return torch.cat([x.movedim(-1, 0) if x.dim() > 2 else x[None] for x in columns])

    order, micro_batches = _passes(rows, micro_batching, forward.mesh)
    ready = _for_passes(params, forward)
    shape = lambda rows: (sum(sizes), *rows.response_mask.shape)  # noqa: E731
    results = torch.cat(run_passes(run, ready, micro_batches, forward=forward, shape=shape), 1)[:, order]
    joined = {
        name: (x.movedim(0, -1) if name == "outputs" else x[0]).contiguous().clone()  # in memory of its own
        for name, x in zip(names, results.split(sizes), strict=True)
    }
    return TokenOutputs(**joined)


def compute_log_probs(
    params: Params | Whole | OnHost,
    rows: Rows,
    *,
    forward: Forward,
    micro_batching: MicroBatching,
    temperature: float = 1.0,
) -> Tokens:
    """Log-probs [B, T] of the response tokens under the policy or the reference; zero outside the response mask."""
    out = compute_outputs(params, rows, forward=forward, micro_batching=micro_batching, temperature=temperature)
    assert out.log_probs is not None
    return out.log_probs


def compute_values(
    params: Params | Whole | OnHost, rows: Rows, *, forward: Forward, micro_batching: MicroBatching
) -> Tokens:
    """The critic's values [B, T] before each response token; zero outside the response mask."""
    out = compute_outputs(params, rows, forward=forward, micro_batching=micro_batching, outputs=("values",))
    assert out.values is not None
    return out.values


@torch.no_grad()
def compute_reward_scores(
    params: Params | Whole | OnHost, rows: Rows, *, forward: Forward, micro_batching: MicroBatching
) -> Float[Tensor, " b"]:
    """A reward model's score [B] of each row: its head at the row's last real token. The model has a value head.

    The rows are always packed.
    """
    _check_outputs(forward.model, ("values",))
    forward = attrs.evolve(forward, remove_padding=True)
    order, micro_batches = _passes(rows, micro_batching, forward.mesh)
    ready = _for_passes(params, forward)
    scores = run_passes(_scores, ready, micro_batches, forward=forward, shape=lambda rows: rows.tokens.shape[:1])
    return torch.cat(scores)[order].float()


def _scores(params: Params | Whole | OnHost, rows: Rows, *, forward: Forward) -> Tensor:
    """The head at the last token of each of some rows [b]."""
    ready = opened(params, forward.model, forward.mesh)
    head = models.output_head(forward.model, ready.root)
    hidden, places = _packed_hidden(ready, rows, forward)
    last = places[rows.attention_mask.sum(1).cumsum(0) - 1]
    own = _own(last, len(hidden), cutting(forward.mesh))
    numbers = F.linear(hidden[own.places].to(head.weight.dtype), head.weight, head.bias)[:, 0].float()
    return _gathered([numbers], own, last, len(hidden), cutting(forward.mesh))[0]
