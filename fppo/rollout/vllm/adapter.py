"""An adapter that vLLM holds beside the weights it adapts: these are sent once, and each version's factors alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo.models import lora_files
from fppo.models.heads import VOCABULARY_HEADS, embedding_name
from fppo.models.lora import base_weights, frozen_of, merged
from fppo.models.model import Model
from fppo.rollout.sync import SyncError
from fppo.rollout.vllm.host import EngineFailure, Host
from fppo.rollout.vllm.options import VllmOptions
from fppo.runtime.mesh import Mesh

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the largest that vLLM makes room for


def with_room(model: Model, options: VllmOptions) -> VllmOptions:
    """The options, of a vLLM with room for the model's adapter if that goes alone.

    Raises ValueError for a rank beyond vLLM's, and for adapters of what vLLM's do not know: embeddings, vocabulary
    heads, and stacks of experts.
    """
    if model.frozen is None or options.adapter == "merged":
        return options
    rank, others = frozen_of(model).lora.rank, {embedding_name(model), *VOCABULARY_HEADS}
    wrong = [name for name in frozen_of(model).places if name in others or len(model.whole_shapes[name]) > 2]
    if wrong or rank > RANKS[-1]:
        what = f"adapters of {wrong[:5]}" if wrong else f"rank {rank}, beyond {RANKS[-1]},"
        raise ValueError(f"{what} cannot go to vLLM alone: send merged weights, or leave them out of the adapter")
    room = {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(x for x in RANKS if x >= rank)}
    return attrs.evolve(options, extra={**room, **options.extra})


def weights_of(model: Model, params: Mapping[str, Tensor], mesh: Mesh, *, alone: bool = False) -> Mapping[str, Tensor]:
    """The weights to send for parameters: with an adapter the merged ones, or for one that goes `alone` its base, which
    is dequantised if it was quantised."""
    if model.frozen is None:
        return params
    return base_weights(model, mesh=mesh) if alone else merged(model, params, mesh=mesh)


def changes_something(factors: Mapping[str, Tensor]) -> bool:
    """Whether any B is not 0, so that a lost adapter would be noticed."""
    return any(bool(x.any()) for name, x in factors.items() if ".lora_B." in name)


def deliver(host: Host, number: int, model: Model, factors: Mapping[str, Tensor]) -> dict[str, str]:
    """Send vLLM an adapter under a new number. Returns the digest of each factor as it came to all workers, or theirs
    joined if they differ. Raises SyncError for what vLLM does not take."""
    spec = frozen_of(model).lora
    config = {"r": spec.rank, "lora_alpha": spec.scale * spec.rank, "target_modules": []}
    try:
        every = host.call("fppo_take_adapter", number, config, factors)
    except (EngineFailure, SyncError):
        raise
    except Exception as error:
        raise SyncError(f"vLLM could not take the adapter: {type(error).__name__}: {error}") from error
    return {name: "|".join(dict.fromkeys(got[name] for got in every)) for name in every[0]}


def factors_of(model: Model, adapter: Mapping[str, Tensor], mesh: Mesh, dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole factors by PEFT's names, in a dtype, on the host. Every rank of a mesh that cuts them must call."""
    return {name: x.to("cpu", dtype) for name, x in lora_files.stored(model, adapter, mesh).items()}


def lost_modules(
    modules: Mapping[str, Any],
    packed: Mapping[str, Sequence[str]],
    came: Mapping[str, tuple[Tensor, Tensor]],
    slot: int,
) -> list[str]:
    """The modules of a worker of vLLM that do not have the scaled factors that came, or have some where none came. Of
    several workers each has the parts that the modules cut for it; `packed` names what a module fuses."""
    lost: list[str] = []
    for name, module in modules.items():
        parts = packed.get(name, [name])
        for factor in (0, 1):
            stacks = (module.lora_a_stacked, module.lora_b_stacked)[factor]
            if not isinstance(stacks, tuple):  # of an embedding or a head, to which no factors go
                continue
            sent = [came[part][factor] if part in came else None for part in parts]
            whole = sent[0]
            if len(stacks) > len(parts) == 1 and whole is not None:  # one weight whose rows are several layers'
                rows = list(module.base_layer.output_sizes)
                sent = [*whole.split(rows)] if factor else [whole] * len(stacks)
            if module.tp_size > 1:
                cut = (module.slice_lora_a, module.slice_lora_b)[factor]
                sent = cut(sent) if len(stacks) > 1 else [None if whole is None else cut(whole)]
            pairs = zip(stacks, sent if any(x is not None for x in sent) else [None] * len(stacks), strict=True)
            lost += [name] * any(not _holds(stack[slot, 0], x) for stack, x in pairs)
    return sorted({*lost})


def _holds(room: Tensor, x: Tensor | None) -> bool:
    """Whether the corner of a room is a factor, and the rest of it is empty."""
    expected = torch.zeros_like(room)
    if x is not None:
        expected[: x.shape[0], : x.shape[1]] = x
    return torch.equal(room, expected)
