"""Which models run on vLLM, as their configs say. No vllm here: what does not run is refused before any work."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from fppo.models.vision import takes_images
from fppo.rollout.vllm.vision import GRIDS, STACKS


def check_family(config: PreTrainedConfig, *, tensor_parallel: int = 1, alone: bool = False) -> None:
    """Raises ValueError for a model that fppo does not run on vLLM, over so many workers; `alone`: with an adapter that
    goes alone."""
    if takes_images(config):
        _check_seeing(config, tensor_parallel, alone)


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
