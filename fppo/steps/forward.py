"""A pass of a model over rows: log-probs, entropies and values of each token, aligned with the response."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import chain, count, repeat
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import batch as batches
from fppo import devices, models, tree
from fppo.models.heads import Head
from fppo.models.model import Model
from fppo.runtime.mesh import AXES, all_reduce, device_of
from fppo.runtime.offload import OnHost
from fppo.shapes import Tokens
from fppo.steps import experts, memory
from fppo.steps.distributions import listed_log_probs, top_log_probs
from fppo.steps.experts import RoutedPass
from fppo.steps.images import own_images, packed_images, padded_images
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.outputs import OF_DISTRIBUTIONS, OF_ROUTERS, OF_VALUE_HEADS, Forward, Rows, TokenOutputs, check_outputs
from fppo.steps.packed import (
    Indices,
    MicroBatch,
    blank_masks,
    cut,
    gathered,
    indexed,
    indices_of,
    masks_of,
    multiple,
    padded_indices,
    places_of_rows,
    slice_of,
)
from fppo.steps.ranks import blank, rounds
from fppo.steps.recorded import Recorder, ready, run_one
from fppo.steps.sharded import Gathered, Opened, Whole, opened, rooted, whole
from fppo.steps.stages import stage_outputs
from fppo.steps.train_state import Params
from fppo_kernels.collectives import all_gather, same
from fppo_kernels.padding import sent
from fppo_kernels.shared import read
from fppo_kernels.transforms import active, is_mapped, stacked


def forward_micro_batch(
    params: Params | Gathered | OnHost,
    rows: Rows,
    *,
    forward: Forward,
    outputs: Sequence[str] = ("log_probs",),
    temperature: float = 1.0,
    indices: Indices | None = None,
    received: Tensor | None = None,
) -> TokenOutputs:
    """Compute the outputs at every response position t from the hidden state of the token before it.

    With a vocabulary head: "log_probs" [B, T] of the response tokens under logits / `temperature`; "entropy" and
    "sum_squared_probs" [B, T] of that distribution; and the "hidden" states [B, T, H] before the head. With a value
    head: its "outputs" [B, T, K], or the "values" [B, T] that `forward.read` computes from them. Only positions in the
    response mask reach a head. "routed", "loads" and "router_sums" need a model with routers of experts.

    The rows of a device without float64 are on the host: the pass copies what it reads, and returns its outputs there.
    With the `indices` of the rows' tokens (`packed.indexed`) the pass does not wait for the device. A pipeline stage
    starts from the hidden states [N, H] `received` from the stage before it.

    Transforms of torch.func work on one process. If vmap maps over the rows' masks, the rows run with their padding,
    since the packed rows would differ in length; if it maps over parameters they run packed.

    On a mesh with a sequence, context or tensor axis, all ranks of the axis hold the same rows. Each runs its tokens of
    the packed row, and all get all outputs. If all compute the same loss from them, each rank's gradient is a share:
    the sum over the axis is the gradient.
    """
    check_outputs(forward.model, outputs)
    if has_next_stage(forward.model):
        raise ValueError("this rank has a pipeline stage without the head: call compute_outputs on all ranks")
    check_transforms(forward)
    ready, home = opened(params, forward.model, forward.mesh), rows.tokens.device
    device = device_of(ready.root)
    if device != devices.home_of(device):
        rows, indices = tree.map(lambda x: x if x.dtype == torch.float64 else x.to(device), rows), None
    mask, tensor, padded = rows.response_mask, forward.mesh["tensor"], _maps_over(rows)
    if padded:
        forward, indices = attrs.evolve(forward, remove_padding=False), padded_indices(rows, forward.mesh)
    indices = indices_of(rows, indices, forward)
    hidden, routed = _hidden(ready, rows, indices, forward, outputs, received)
    own, head = indices.own, models.output_head(forward.model, ready.root)
    states = hidden[own.places] if indices.shared is None else read(hidden, indices.shared.reads)
    labels = rows.tokens[:, -mask.shape[1] :].flatten()[indices.responses][own.numbers]
    computed = _of_head(states, head, labels, forward, outputs, temperature)
    if set(outputs) & set(OF_DISTRIBUTIONS):
        listed = None if "listed_log_probs" not in outputs else _listed(rows)[indices.responses][own.numbers]
        computed |= _distributions(states, head, listed, forward, temperature)
    names, pad = [name for name, x in computed.items() if x is not None], forward.kernels.pad
    own_columns = [same(x, tensor) for x in computed.values() if x is not None]
    columns = gathered(own_columns, own, forward.mesh.token_axis)
    tokens = {name: pad(x, indices.responses, mask.shape) for name, x in zip(names, columns, strict=True)}
    if padded:
        tokens = {name: x.where(mask if x.dim() == 2 else mask[..., None], 0.0) for name, x in tokens.items()}
    computed = TokenOutputs(**tokens, **experts.of_routers(routed, outputs, forward.model, forward.mesh, pad))
    return computed if device == devices.home_of(device) else tree.map(lambda x: x.to(home), computed)


def _of_head(
    states: Tensor,
    head: Head,
    labels: Tensor,
    forward: Forward,
    outputs: Sequence[str],
    temperature: float,
) -> dict[str, Tensor | None]:
    """The outputs of a value head or a vocabulary head for states [m, H], by name; None if not requested."""
    if set(outputs) & set(OF_VALUE_HEADS):
        dtype = torch.promote_types(states.dtype, torch.float32)
        numbers = F.linear(states.to(dtype), head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype))
        made = {"values": forward.read, "outputs": lambda x: x}
        return {name: make(numbers) for name, make in made.items() if name in outputs}
    kernel, tensor = forward.kernels.log_probs, forward.mesh["tensor"]
    result = (kernel if tensor.size == 1 else partial(kernel, axis=tensor))(
        states,
        head.weight,
        labels,
        bias=head.bias,
        temperature=temperature,
        softcap=head.softcap,
        scale=head.scale,
        entropy="entropy" in outputs,
        sum_squared="sum_squared_probs" in outputs,
    )
    computed = {"log_probs": result.log_probs, "entropy": result.entropy, "sum_squared_probs": result.sum_squared}
    return computed | {"hidden": states.to(result.log_probs.dtype) if "hidden" in outputs else None}


def _listed(rows: Any) -> Tensor:
    """The tokens [B * T, K] that rows list. Raises ValueError for rows that list none."""
    if getattr(rows, "teacher_top_ids", None) is None:
        raise ValueError("listed_log_probs needs teacher_top_ids in the rows: a teacher's pass with Forward.top")
    return rows.teacher_top_ids.flatten(0, 1)


def _distributions(
    states: Tensor, head: Head, listed: Tensor | None, forward: Forward, temperature: float
) -> dict[str, Tensor | None]:
    """The log-probs of `listed` tokens [m, K] after states [m, H], or without them of the most probable tokens."""
    if forward.mesh["tensor"].size > 1:
        raise ValueError("distributions of tokens need a whole vocabulary on each rank: use a mesh without tensor axis")
    if listed is not None:
        return {"listed_log_probs": listed_log_probs(states, listed, head, temperature=temperature)}
    if forward.top is None:
        raise ValueError("top_ids and top_log_probs need Forward.top, the number of tokens")
    kept, of = forward.top
    ids, values = top_log_probs(states, head, temperature=temperature, count=kept, of=of)
    return {"top_ids": ids.to(values), "top_log_probs": values}


def _maps_over(rows: Rows) -> bool:
    return is_mapped(rows.attention_mask) or is_mapped(rows.response_mask)


def check_transforms(forward: Forward) -> None:
    """Raise ValueError if a transform of torch.func is running that the forward's passes do not support."""
    if not active():
        return
    model, mesh = forward.model, forward.mesh
    if cut := [name for name in AXES if name != "replicate" and mesh[name].size > 1]:
        raise ValueError(
            f"torch.func goes through no collectives: this mesh has {cut}. Use fppo.grad.value_and_grad, or a mesh of "
            "one rank"
        )
    if model.checkpoint_layers:
        raise ValueError(
            "torch.func does not run checkpointed layers: give attrs.evolve(model, checkpoint_layers=False), or use "
            "fppo.grad.value_and_grad"
        )
    if model.compile_layers:
        raise ValueError("torch.func does not run compiled layers: give attrs.evolve(model, compile_layers=False)")
    if model.routers and stacked():
        raise ValueError(
            f"model type {model.config.model_type!r} sends tokens to experts by numbers that are read: of torch.func's "
            "transforms it takes one reverse pass, as grad and vjp"
        )


def stage_states(
    params: Params | Gathered | OnHost,
    micro: MicroBatch,
    *,
    forward: Forward,
    received: Tensor | None,
    outputs: Sequence[str] = (),
) -> tuple[Tensor, TokenOutputs]:
    """Run this rank's pipeline stage on a micro-batch. Returns the hidden states [N, H] of this rank's N tokens after
    the stage's last layer, to be sent to the next stage, and the outputs of the stage's routers.

    `received` are the hidden states [N, H] of the stage before; None on the first stage. Of `outputs` only "routed",
    "loads" and "router_sums" count here, since the others need the head.
    """
    ready, model = opened(params, forward.model, forward.mesh), forward.model
    hidden, routed = _hidden(ready, micro.rows, micro.indices, forward, outputs, received)
    return hidden, TokenOutputs(**experts.of_routers(routed, outputs, model, forward.mesh, forward.kernels.pad))


def has_next_stage(model: Model) -> bool:
    """Whether a model is a pipeline stage with a stage after it."""
    return bool(model.spans) and not model.spans[-1].ends


def hidden_of(params: Opened, rows: Rows, indices: Indices, forward: Forward) -> Tensor:
    """Run rows without a head: the hidden states [N, H] of this rank's tokens, packed or with their padding."""
    return _hidden(params, rows, indices, forward, (), None)[0]


def _hidden(
    params: Opened,
    rows: Rows,
    indices: Indices,
    forward: Forward,
    outputs: Sequence[str],
    received: Tensor | None,
) -> tuple[Tensor, RoutedPass | None]:
    """Hidden states of this rank's tokens [N, H], and the routers' part of the pass if the outputs need it."""
    router_outputs = [name for name in outputs if name in OF_ROUTERS]
    if forward.remove_padding:
        hidden, _, routed = packed_hidden(
            params, rows, indices, forward, router_outputs=router_outputs, received=received
        )
        return hidden, routed
    positions = (rows.attention_mask.cumsum(1) - 1).clamp(min=0)
    attend = models.padded_attention(rows.attention_mask)
    received = None if received is None else received.unflatten(0, rows.tokens.shape)
    columns = experts.columns(rows, router_outputs=router_outputs, replay=forward.replay)
    routed = experts.routed_pass({name: x.flatten(0, 1) for name, x in columns.items()}, rows, router_outputs)
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
    params: Opened,
    rows: Rows,
    indices: Indices,
    forward: Forward,
    *,
    router_outputs: Sequence[str] = (),
    received: Tensor | None = None,
) -> tuple[Tensor, Tensor, RoutedPass | None]:
    """Run the packed rows. Returns the hidden states of this rank's tokens [N, H]; for each token, row by row, its
    index among all ranks' tokens, rank by rank; and the routers' part, if `router_outputs` requests any of it."""
    kernels, mesh, real = forward.kernels, forward.mesh, indices.real
    columns = experts.columns(rows, router_outputs=router_outputs, replay=forward.replay)
    packed = kernels.unpad(rows.tokens, rows.attention_mask, columns=columns, multiple=multiple(mesh), places=real)
    part, shared = slice_of(packed, kernels, mesh, indices), indices.shared
    index, longest, more = packed.index, packed.lengths.max_length, dict[str, Tensor]()
    if shared is not None:
        index, longest = shared.real.index, max(shared.real.sizes)
        if columns:
            more["times"] = experts.times_of(columns["counted"], index, shared.places, len(packed.tokens))
    columns = {name: part.own(x) for name, x in {**packed.columns, **more}.items()}
    places = places_of_rows(part.places, indices)
    routed = experts.routed_pass(columns, rows, router_outputs, index=index, places=places)
    images, positions = packed_images(rows, forward.model, packed.tokens, packed.positions, real.sizes, shared)
    if images is not None:
        images, positions = own_images(images, positions, part, mesh.token_axis)
    hidden = models.hidden_states(
        forward.model,
        params.root,
        part.own(packed.tokens),
        part.own(packed.positions) if images is None else positions,
        attend=part.attend,
        kernels=kernels,
        apply_layer=params.apply_layer,
        received=received if images is None or received is not None else images,
        routes=None if routed is None else routed.routes,
        longest=longest,
    )
    return (hidden if has_next_stage(forward.model) else all_gather(hidden, mesh["tensor"])), places, routed


def ordered_passes(rows: Rows, micro_batching: MicroBatching, forward: Forward) -> tuple[Tensor, Iterable[MicroBatch]]:
    """Cut rows into micro-batches. Returns each row's index [B] among the micro-batches' results, and the
    micro-batches, with blank ones at the end so that all ranks make equally many passes."""
    masks, device = masks_of(rows, forward), rows.tokens.device
    groups = cut(masks, micro_batching)
    (passes,) = rounds([len(groups)], forward.mesh, device)
    order = sent(batches.inverse([i for group in groups for i in group]), device)
    own = (indexed(*batches.rows((rows, masks), group), forward) for group in groups)
    return order, chain(own, repeat(indexed(blank(rows), blank_masks(masks), forward), passes - len(groups)))


def for_passes(
    params: Params | Whole | OnHost, forward: Forward, record: Recorder | None = None
) -> Params | Gathered | OnHost:
    """Prepare parameters for several passes. If the sharding keeps whole parameters between passes, gather all of them,
    else only those outside the layers. Parameters that are not cut are cast once, into buffers if passes are
    recorded."""
    mesh = forward.mesh
    if isinstance(params, dict) and not mesh.sharded:
        return ready(params, forward, record)
    if mesh.sharded and mesh.sharding is not None and mesh.sharding.stage == 1:
        return whole(params, forward.model, mesh)
    return rooted(params, forward.model, mesh) if isinstance(params, dict) else params


def run_passes(
    fn: Callable[..., Tensor],
    params: Params | Gathered | OnHost,
    micro_batches: Iterable[MicroBatch],
    *,
    forward: Forward,
    shape: Callable[[Rows], Sequence[int]],
    outputs: Sequence[str] = (),
    on_routers: Callable[[int, TokenOutputs], None] = lambda number, told: None,
    record: Recorder | None = None,
    identity: Hashable | None = None,
    halve: str | None = None,
) -> list[Any]:
    """Run `fn(params, micro_batch, forward=forward, received=...)` on each micro-batch; results have `shape(rows)`.

    On a pipeline axis all ranks get the results, and `on_routers` is called with a micro-batch's number and the outputs
    that routers of stages before the last report. With `record` passes may be recorded; `identity` stands for
    everything besides its arguments that `fn` depends on. If a stage's name is given to `halve`, a micro-batch that
    does not fit into memory becomes several, with a result each.
    """
    if not forward.model.spans:
        apply = partial(fn, received=None)
        if record is not None and identity is not None:
            apply = partial(run_one, fn, identity, record=record)
        if halve is not None:
            run_it = lambda one, forward: apply(params, one, forward=forward)  # noqa: E731
            return memory.in_rounds(run_it, micro_batches, forward=forward, name=halve)
        return [apply(params, one, forward=forward) for one in micro_batches]
    every = list(micro_batches)

    def run(
        params: Params | Gathered | OnHost,
        numbered: tuple[int, MicroBatch],
        *,
        forward: Forward,
        received: Tensor | None,
    ) -> Tensor:
        number, one = numbered
        if not has_next_stage(forward.model):
            return fn(params, one, forward=forward, received=received)
        states, told = stage_states(params, one, forward=forward, received=received, outputs=outputs)
        on_routers(number, told)
        return states

    lengths, shapes = [one.indices.length for one in every], [shape(one.rows) for one in every]
    return stage_outputs(run, params, list(enumerate(every)), forward=forward, lengths=lengths, shapes=shapes)


def row_lengths(rows: Rows) -> list[int]:
    """The number of real tokens of each row, as numbers on the host."""
    return rows.attention_mask.sum(1).tolist()


def _wide_outputs(forward: Forward, names: Sequence[str]) -> dict[str, int]:
    """The numbers for each token of the outputs that have more than one."""
    wide = {"outputs": forward.model.outputs}
    wide |= {"hidden": models.hidden_width(forward.model)} if "hidden" in names else {}
    return wide | ({} if forward.top is None else dict.fromkeys(OF_DISTRIBUTIONS[:2], min(forward.top)))


@torch.no_grad()
def compute_outputs(
    params: Params | Whole | OnHost,
    rows: Rows,
    *,
    forward: Forward,
    micro_batching: MicroBatching,
    outputs: Sequence[str] = ("log_probs",),
    temperature: float = 1.0,
    record: Recorder | None = None,
) -> TokenOutputs:
    """Run `forward_micro_batch` over all rows, possibly none, without gradients; results are in the rows' order.

    Of routers' outputs only "routed" is supported. `record` replays passes of few tokens on a GPU by one launch each.
    """
    check_outputs(forward.model, outputs)
    lm, numbers = forward.model.head == "lm", count()
    routed: dict[int, Tensor] = {}
    names = [x for x in TokenOutputs._fields if (x in outputs or (lm and x == "log_probs")) and x not in OF_ROUTERS]
    wide = _wide_outputs(forward, names)
    sizes = [wide.get(name, 1) for name in names]
    asked = [name for name in outputs if name in OF_ROUTERS]

    def tell(number: int, told: TokenOutputs) -> None:  # the outputs that other pipeline stages lack
        if told.routed is not None:
            routed[number] = routed[number] + told.routed if number in routed else told.routed

    def run(params: Params | Gathered | OnHost, micro: MicroBatch, *, forward: Forward, received: Tensor | None) -> Any:
        given = {"outputs": outputs, "temperature": temperature, "indices": micro.indices, "received": received}
        out = forward_micro_batch(params, micro.rows, forward=forward, **given)
        columns = [getattr(out, name) for name in names]
        columns = torch.cat([x.movedim(-1, 0) if x.dim() > 2 else x[None] for x in columns])
        if not forward.model.spans:
            return (columns, out.routed) if asked else columns
        tell(next(numbers), out)
        return columns

    order, micro_batches = ordered_passes(rows, micro_batching, forward)
    passed = for_passes(params, forward, record)
    shape = lambda rows: (sum(sizes), *rows.response_mask.shape)  # noqa: E731
    recorded: dict[str, Any] = {}
    if not (forward.model.spans or asked):
        recorded = {"record": record, "identity": ("outputs", *outputs, temperature)}
    if micro_batching.halve_on_oom:
        recorded["halve"] = f"a pass for {', '.join(outputs)}"
    results = run_passes(
        run, passed, micro_batches, forward=forward, shape=shape, outputs=asked, on_routers=tell, **recorded
    )
    if asked and not forward.model.spans:
        results, told = zip(*results, strict=True)
        routed = dict(enumerate(told))
    results = torch.cat(results, 1)[:, order]
    joined = {
        name: (x.movedim(0, -1) if name in wide else x[0]).contiguous().clone()  # in new memory
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
    record: Recorder | None = None,
) -> Tokens:
    """Log-probs [B, T] of the response tokens under the policy or the reference, float32 (float64 for float64
    parameters); 0 outside the response mask."""
    out = compute_outputs(
        params, rows, forward=forward, micro_batching=micro_batching, temperature=temperature, record=record
    )
    assert out.log_probs is not None
    return out.log_probs


def compute_values(
    params: Params | Whole | OnHost,
    rows: Rows,
    *,
    forward: Forward,
    micro_batching: MicroBatching,
    record: Recorder | None = None,
) -> Tokens:
    """The critic's values [B, T] before each response token; 0 outside the response mask."""
    out = compute_outputs(
        params, rows, forward=forward, micro_batching=micro_batching, outputs=("values",), record=record
    )
    assert out.values is not None
    return out.values
