"""Models that run on vLLM, by their configs. vLLM is not imported: unsupported models are refused before any work."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from fppo.models.vision import takes_images
from fppo.rollout.vllm.vision import GRIDS, STACKS

# layers with recurrent states, in vLLM 0.32
_NOWHERE = {
    "bamba": "it has no code for them any more",
    "granitemoehybrid": "it names their weights otherwise (mamba.A, block_sparse_moe.gate)",
}
_NOT_ON_CPU = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), "has no selective scan"),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        "computes gated delta rules in bfloat16 alone, and gives other log-probs than transformers",
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "gives other log-probs than transformers"),
    "nemotron_h": "has no experts without gates",
    "olmo_hybrid": "has no gated delta rule outside of Triton",
}


def check_family(config: PreTrainedConfig, *, tensor_parallel: int = 1, alone: bool = False) -> None:
    """Raise ValueError for a model that fppo does not run on vLLM over `tensor_parallel` workers; `alone`: with an
    adapter that is sent alone."""
    kind = config.model_type
    if takes_images(config):
        _check_seeing(config, tensor_parallel, alone)
    if kind in _NOWHERE and not _attends(config):
        raise ValueError(f"vLLM does not run models of type {kind!r} here: {_NOWHERE[kind]}; use the embedded engine")
    if kind in _NOT_ON_CPU and not torch.cuda.is_available():
        raise ValueError(
            f"vLLM does not run models of type {kind!r} on a CPU, where it {_NOT_ON_CPU[kind]}: use the embedded engine"
        )


def _attends(config: Any) -> bool:
    """Whether all layers are attention and dense MLPs."""
    kinds = set(getattr(config, "layer_types", None) or ["unknown"])
    return kinds <= {"attention", "full_attention"} and not getattr(config, "num_local_experts", 0)


def _check_seeing(config: Any, tensor_parallel: int, alone: bool) -> None:
    kind = config.model_type
    if kind not in GRIDS + STACKS:
        raise ValueError(
            f"fppo does not run vLLM on models of type {kind!r}, which take images: it knows how vLLM takes those of "
            f"{', '.join(GRIDS + STACKS)}; use the embedded engine"
        )
    if kind == "llava":
        tower, layer = config.vision_config.model_type, config.vision_feature_layer
        if tower != "clip_vision_model" or not isinstance(layer, int):
            raise ValueError(
                f"fppo does not run vLLM on a llava that reads layer {layer} of a vision tower of type {tower!r}, but "
                "on one that reads one layer of a 'clip_vision_model': use the embedded engine"
            )
    if tensor_parallel > 1:
        raise ValueError(f"tensor_parallel = {tensor_parallel}: not with a model that takes images ({kind!r}); give 1")
    if alone:
        raise ValueError(
            f"an adapter cannot go to vLLM alone with a model that takes images ({kind!r}): send it merged"
        )
