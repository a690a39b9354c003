"""One pass of a model over rows: per-token log-probs, entropies and values, aligned with the response."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import chain, count, repeat
from typing import Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import batch as batches
from fppo import models
from fppo.losses.value import first_output
from fppo.models.model import Model
from fppo.runtime.mesh import LOCAL, Mesh, all_reduce
from fppo.runtime.offload import OnHost
from fppo.shapes import Tokens
from fppo.steps import experts
from fppo.steps.experts import RoutedPass
from fppo.steps.images import own_images, packed_images, padded_images
from fppo.steps.micro_batching import MicroBatching, partition
from fppo.steps.outputs import OF_ROUTERS, OF_VALUE_HEADS, TokenOutputs, check_outputs
from fppo.steps.packed import (
    Indexed,
    Indices,
    blank_masks,
    cutting,
    gathered,
    indexed,
    indices_of,
    masks_of,
    multiple,
    slice_of,
)
from fppo.steps.ranks import blank, rounds
from fppo.steps.recorded import Recorder, ready, run_one
from fppo.steps.sharded import Gathered, Opened, Whole, opened, rooted, whole
from fppo.steps.stages import stage_outputs
from fppo.steps.train_state import Params
from fppo_kernels.collectives import all_gather, same
from fppo_kernels.padding import sent
from fppo_kernels.table import Kernels


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
    pass of it. With `replay` the routers of experts choose what the rows' `routed` [B, S, L, k] says. With the
    `indices` of a pass's rows it waits for no device. `record` runs passes of few tokens on a GPU by one launch each.
    """

    model: Model
    kernels: Kernels = attrs.field(factory=Kernels.named)
    mesh: Mesh = LOCAL
    remove_padding: bool = True
    read: Callable[[Tensor], Tensor] = first_output
    received: Tensor | None = None
    replay: bool = False
    indices: Indices | None = None
    record: Recorder | None = None

    def __attrs_post_init__(self) -> None:
        if self.replay:
            experts.check_routers(self.model, "leave out replay (in settings algorithm.router_replay)")
        sizes = {name: axis.size for name, axis in self.mesh.axes.items()}
        models.check_rows_whole(self.model.whole_config, sizes)
        layout = self.model.layout
        for axis, placed in (
            ("tensor", 1 if layout is None else layout.ranks),
            ("expert", 1 if layout is None else layout.expert[1]),
            ("pipeline", 1 if layout is None else layout.stage_ranks),
        ):
            if (size := self.mesh[axis].size) != placed:
                raise ValueError(
                    f"the mesh has a {axis} axis of {size} ranks, and the model is one for {placed}: give "
                    "models.place(model, mesh) of the whole model"
                )
        for name in ("sequence", "context", "tensor"):
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


def forward_micro_batch(
    params: Params | Gathered | OnHost,
    rows: Rows,
    *,
    forward: Forward,
    outputs: Sequence[str] = ("log_probs",),
    temperature: float = 1.0,
) -> TokenOutputs:
    """The outputs at every position t of the response, computed from the hidden state of the token before it.

    "log_probs" of the response tokens under logits / `temperature`, "entropy" and "sum_squared_probs" of that
    distribution, and the "hidden" states that they come from, need a model with a vocabulary head; "outputs" of a value
    head, or the "values" that are read of them, need one with a value head. Only positions in the response mask reach a
    head. "routed", "loads" and "router_sums" need a model with routers of experts.

    On a mesh with a sequence, context or tensor axis all its ranks hold the same rows; each runs its tokens of the
    packed row, and all get all outputs. If all compute the same loss from them, each rank's gradient is its share: the
    sum over the axis is the gradient.
    """
    check_outputs(forward.model, outputs)
    if goes_on(forward.model):
        raise ValueError("this rank has no head, but stages of a pipeline before it: call compute_outputs on all ranks")
    mask, axis, tensor = rows.response_mask, cutting(forward.mesh), forward.mesh["tensor"]
    indices = indices_of(rows, forward)
    ready = opened(params, forward.model, forward.mesh)
    tells = [name for name in outputs if name in OF_ROUTERS]
    hidden, routed = _hidden(ready, rows, indices, forward, tells=tells)
    own, head = indices.own, models.output_head(forward.model, ready.root)
    states = hidden[own.places]
    if set(outputs) & set(OF_VALUE_HEADS):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        numbers = F.linear(states.to(dtype), head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype))
        made = {"values": forward.read, "outputs": lambda x: x}
        computed = {name: make(numbers) for name, make in made.items() if name in outputs}
    else:
        kernel = forward.kernels.log_probs
        result = (kernel if tensor.size == 1 else partial(kernel, axis=tensor))(
            states,
            head.weight,
            rows.tokens[:, -mask.shape[1] :].flatten()[indices.responses][own.numbers],
            bias=head.bias,
            temperature=temperature,
            softcap=head.softcap,
            scale=head.scale,
            entropy="entropy" in outputs,
            sum_squared="sum_squared_probs" in outputs,
        )
        computed = {"log_probs": result.log_probs, "entropy": result.entropy, "sum_squared_probs": result.sum_squared}
        computed["hidden"] = states.to(result.log_probs.dtype) if "hidden" in outputs else None
    names = [name for name, x in computed.items() if x is not None]
    own_columns = [same(x, tensor) for x in computed.values() if x is not None]
    columns = gathered(own_columns, own, indices.before, len(hidden), axis)
    pad = forward.kernels.pad
    tokens = {name: pad(x, indices.responses, mask.shape) for name, x in zip(names, columns, strict=True)}
    return TokenOutputs()._replace(
        **tokens, **experts.of_routers(routed, outputs, forward.model, forward.mesh, forward.kernels.pad)
    )


def stage_states(
    params: Params | Gathered | OnHost, rows: Rows, *, forward: Forward, outputs: Sequence[str] = ()
) -> tuple[Tensor, TokenOutputs]:
    """What a stage of a pipeline hands on: the hidden states [N, H] of this rank's slice after its last layer; and
    those of the outputs that its routers tell."""
    ready, model = opened(params, forward.model, forward.mesh), forward.model
    tells = [name for name in outputs if name in OF_ROUTERS]
    hidden, routed = _hidden(ready, rows, indices_of(rows, forward), forward, tells=tells)
    return hidden, TokenOutputs(**experts.of_routers(routed, outputs, model, forward.mesh, forward.kernels.pad))


def goes_on(model: Model) -> bool:
    """Whether a model is a stage of a pipeline that others follow."""
    return bool(model.spans) and not model.spans[-1].ends


def slice_length(rows: Rows, forward: Forward) -> int:
    """How many tokens of the rows a rank's slice has, between blocks."""
    return indices_of(rows, forward).length


def _hidden(
    params: Opened, rows: Rows, indices: Indices, forward: Forward, *, tells: Sequence[str] = ()
) -> tuple[Tensor, RoutedPass | None]:
    """Hidden states of this rank's tokens [N, H], and what routers tell if they are to."""
    if forward.remove_padding:
        hidden, _, routed = packed_hidden(params, rows, indices, forward, tells=tells)
        return hidden, routed
    positions = (rows.attention_mask.cumsum(1) - 1).clamp(min=0)
    attend = models.padded_attention(rows.attention_mask)
    received = None if forward.received is None else forward.received.unflatten(0, rows.tokens.shape)
    columns = experts.columns(rows, tells=tells, replay=forward.replay)
    routed = experts.routed_pass({name: x.flatten(0, 1) for name, x in columns.items()}, rows, tells)
    images, positions = padded_images(rows, forward.model, positions, indices.real)
    hidden = models.hidden_states(
        forward.model,
        params.root,
        rows.tokens,
        positions,
        attend=attend,
        kernels=forward.kernels,
        apply_layer=params.apply_layer,
        received=received if images is None else images,
        routes=None if routed is None else routed.routes,
        longest=max(indices.real.sizes, default=0),
    )
    return hidden.flatten(0, 1), routed


def packed_hidden(
    params: Opened, rows: Rows, indices: Indices, forward: Forward, *, tells: Sequence[str] = ()
) -> tuple[Tensor, Tensor, RoutedPass | None]:
    """Hidden states of this rank's tokens of the packed row [N, H], and where each token of the row is among all ranks'
    tokens, one rank after the other; and what routers tell if they are to."""
    kernels, mesh, real = forward.kernels, forward.mesh, indices.real
    columns = experts.columns(rows, tells=tells, replay=forward.replay)
    packed = kernels.unpad(rows.tokens, rows.attention_mask, columns=columns, multiple=multiple(mesh), places=real)
    part = slice_of(packed, kernels, mesh, indices.dealt)
    columns = {name: part.own(x) for name, x in packed.columns.items()}
    routed = experts.routed_pass(columns, rows, tells, index=packed.index, places=part.places)
    images, positions = packed_images(rows, forward.model, packed.tokens, packed.positions, real.sizes)
    if images is not None:
        images, positions = own_images(images, positions, part, cutting(mesh))
    hidden = models.hidden_states(
        forward.model,
        params.root,
        part.own(packed.tokens),
        part.own(packed.positions) if images is None else positions,
        attend=part.attend,
        kernels=kernels,
        apply_layer=params.apply_layer,
        received=forward.received if images is None or forward.received is not None else images,
        routes=None if routed is None else routed.routes,
        longest=packed.lengths.max_length,
    )
    return (hidden if goes_on(forward.model) else all_gather(hidden, mesh["tensor"])), part.places, routed


def ordered_passes(rows: Rows, micro_batching: MicroBatching, forward: Forward) -> tuple[Tensor, Iterable[Indexed]]:
    """Where each row's result is [B] among those of the micro-batches, and these, with blank ones at the end so that
    all ranks make equally many passes."""
    masks, device = masks_of(rows), rows.tokens.device
    groups = partition(masks.lengths, micro_batching)
    (passes,) = rounds([len(groups)], forward.mesh, device)
    order = sent(batches.inverse([i for group in groups for i in group]), device)
    own = (indexed(*batches.rows((rows, masks), group), forward) for group in groups)
    return order, chain(own, repeat(indexed(blank(rows), blank_masks(masks), forward), passes - len(groups)))


def for_passes(params: Params | Whole | OnHost, forward: Forward) -> Params | Gathered | OnHost:
    """The parameters as several passes use them: whole where the sharding keeps them so between passes, else what is
    outside the layers, and cast once where nothing is cut."""
    mesh = forward.mesh
    if isinstance(params, dict) and not mesh.sharded:
        return ready(params, forward)
    if mesh.sharded and mesh.sharding is not None and mesh.sharding.stage == 1:
        return whole(params, forward.model, mesh)
    return rooted(params, forward.model, mesh) if isinstance(params, dict) else params


def run_passes(
    fn: Callable[..., Tensor],
    params: Params | Gathered | OnHost,
    micro_batches: Iterable[Indexed],
    *,
    forward: Forward,
    shape: Callable[[Rows], Sequence[int]],
    outputs: Sequence[str] = (),
    tell: Callable[[int, TokenOutputs], None] = lambda number, told: None,
    what: Hashable | None = None,
) -> list[Tensor]:
    """`fn(params, rows, forward=forward)` of each micro-batch, of `shape(rows)`; on a pipeline axis on all ranks, where
    `tell` gets the number of a micro-batch and those of the outputs that the routers of a stage before the last tell.
    With `what`, that `fn` depends on alone, passes may be recorded.
    """
    if what is not None:
        return [run_one(fn, what, params, one, forward=forward) for one in micro_batches]
    if not forward.model.spans:
        return [fn(params, one.rows, forward=one.on(forward)) for one in micro_batches]
    every = list(micro_batches)

    def run(params: Params | Gathered | OnHost, numbered: tuple[int, Indexed], *, forward: Forward) -> Tensor:
        number, one = numbered
        if not goes_on(forward.model):
            return fn(params, one.rows, forward=one.on(forward))
        states, told = stage_states(params, one.rows, forward=one.on(forward), outputs=outputs)
        tell(number, told)
        return states

    lengths, shapes = [slice_length(one.rows, one.on(forward)) for one in every], [shape(one.rows) for one in every]
    return stage_outputs(run, params, list(enumerate(every)), forward=forward, lengths=lengths, shapes=shapes)


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
    """`forward_micro_batch` over all rows, of which there may be none, without gradients; rows come back in order.

    Of what routers tell it gives "routed" alone.
    """
    check_outputs(forward.model, outputs)
    lm, numbers = forward.model.head == "lm", count()
    routed: dict[int, Tensor] = {}
    names = [x for x in TokenOutputs._fields if (x in outputs or (lm and x == "log_probs")) and x not in OF_ROUTERS]
    wide = {"outputs": forward.model.outputs}
    wide |= {"hidden": models.hidden_width(forward.model)} if "hidden" in names else {}
    sizes = [wide.get(name, 1) for name in names]

    def tell(number: int, told: TokenOutputs) -> None:  # of a stage, what other stages lack
        if told.routed is not None:
            routed[number] = routed[number] + told.routed if number in routed else told.routed

    def run(params: Params | Gathered | OnHost, rows: Rows, *, forward: Forward) -> Tensor:
        out = forward_micro_batch(params, rows, forward=forward, outputs=outputs, temperature=temperature)
        tell(next(numbers), out)
        columns = [getattr(out, name) for name in names]
        return torch.cat([x.movedim(-1, 0) if x.dim() > 2 else x[None] for x in columns])

    order, micro_batches = ordered_passes(rows, micro_batching, forward)
    passed = for_passes(params, forward)
    shape = lambda rows: (sum(sizes), *rows.response_mask.shape)  # noqa: E731
    asked = [name for name in outputs if name in OF_ROUTERS]
    what = None if forward.model.spans else ("outputs", *outputs, temperature)
    results = run_passes(run, passed, micro_batches, forward=forward, shape=shape, outputs=asked, tell=tell, what=what)
    results = torch.cat(results, 1)[:, order]
    joined = {
        name: (x.movedim(0, -1) if name in wide else x[0]).contiguous().clone()  # in memory of its own
        for name, x in zip(names, results.split(sizes), strict=True)
    }
    if routed:
        every = torch.cat([routed[number] for number in sorted(routed)])[order]
        joined["routed"] = all_reduce(every, forward.mesh["pipeline"])
    return TokenOutputs()._replace(**joined)


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
