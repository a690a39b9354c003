"""An adapter in vLLM beside its base weights, which are sent once; later versions send only factors."""

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

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the largest ranks for which vLLM can make room


def with_room(model: Model, options: VllmOptions) -> VllmOptions:
    """The options of vLLM, with room for the model's adapter if adapters are sent alone.

    Raises ValueError for a rank beyond vLLM's maximum, and for adapters of weights that vLLM cannot adapt: embeddings,
    vocabulary heads, and stacks of experts.
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
    """The weights to send to vLLM: the parameters of a model without an adapter, else the merged weights or, for an
    adapter that is sent `alone`, the dequantised base."""
    if model.frozen is None:
        return params
    return base_weights(model, mesh=mesh) if alone else merged(model, params, mesh=mesh)


def changes_something(factors: Mapping[str, Tensor]) -> bool:
    """Whether any B is not 0, so that a lost adapter would be detected."""
    return any(bool(x.any()) for name, x in factors.items() if ".lora_B." in name)


def deliver(host: Host, number: int, model: Model, factors: Mapping[str, Tensor]) -> dict[str, str]:
    """Send vLLM an adapter under a new number. Returns the digest of each factor as all workers received it, or their
    joined digests if these differ. Raises SyncError if vLLM rejects the adapter."""
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
    """Whole factors by PEFT's names, in `dtype`, on the host. Every rank of a mesh that cuts them must call."""
    return {name: x.to("cpu", dtype) for name, x in lora_files.stored(model, adapter, mesh).items()}


def lost_modules(
    modules: Mapping[str, Any],
    packed: Mapping[str, Sequence[str]],
    came: Mapping[str, tuple[Tensor, Tensor]],
    slot: int,
) -> list[str]:
    """Name the modules of a vLLM worker whose `slot` lacks adapter factors that were sent, or holds factors that were
    not; sorted.

    `modules` has vLLM's modules by name, and `packed` the names of the weights that a fused module joins. `came` has
    the scaled factors A and B that were sent, by the name of the weight. With several workers, each is compared with
    the part of the factors that it holds.
    """
    lost: list[str] = []
    for name, module in modules.items():
        parts = packed.get(name, [name])
        for factor in (0, 1):
            stacks = (module.lora_a_stacked, module.lora_b_stacked)[factor]
            if not isinstance(stacks, tuple):  # an embedding or a head, for which no factors are sent
                continue
            sent = [came[part][factor] if part in came else None for part in parts]
            whole = sent[0]
            if len(stacks) > len(parts) == 1 and whole is not None:  # one weight with the rows of several layers
                rows = list(module.base_layer.output_sizes)
                sent = [*whole.split(rows)] if factor else [whole] * len(stacks)
            if module.tp_size > 1:
                cut = (module.slice_lora_a, module.slice_lora_b)[factor]
                sent = cut(sent) if len(stacks) > 1 else [None if whole is None else cut(whole)]
            pairs = zip(stacks, sent if any(x is not None for x in sent) else [None] * len(stacks), strict=True)
            lost += [name] * any(not _holds(stack[slot, 0], x) for stack, x in pairs)
    return sorted({*lost})


def _holds(room: Tensor, x: Tensor | None) -> bool:
    """Whether the buffer `room` holds the factor `x` (None: none) in its corner, and zeros elsewhere."""
    expected = torch.zeros_like(room)
    if x is not None:
        expected[: x.shape[0], : x.shape[1]] = x
    return torch.equal(room, expected)
