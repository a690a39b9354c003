"""Images and videos for vLLM, processed by the trainer's processor: vLLM gets token ids and pixels, and processes
neither.

Imports vllm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from transformers import PreTrainedConfig
from vllm.inputs import mm_input  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.registry import ModelRegistry  # pyright: ignore[reportMissingImports]
from vllm.multimodal import MULTIMODAL_REGISTRY  # pyright: ignore[reportMissingImports]
from vllm.multimodal.inputs import (  # pyright: ignore[reportMissingImports]
    MultiModalFieldConfig,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.processing import (  # pyright: ignore[reportMissingImports]
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
)

from fppo.batch import RowInputs
from fppo.models.vision import TIMES, VIDEOS
from fppo.rollout.vllm.vision import GRIDS, PlacedMedia, placed_images

KEYWORDS: Mapping[str, Any] = {"skip_mm_profiling": True, "mm_processor_cache_gb": 0}


def take_processed(config: PreTrainedConfig) -> None:
    """Make vLLM accept processed images for this kind of model from now on, without creating a processor of its own,
    which might differ from the trainer's, and needs files and packages besides the model's config."""
    name = (config.architectures or [type(config).__name__])[0]
    model_class = ModelRegistry.models[name].load_model_cls()
    MULTIMODAL_REGISTRY.register_processor(_NoProcessor, info=_Info, dummy_inputs=_NoDummies)(model_class)


def with_images(config: PreTrainedConfig, dtype: torch.dtype, prompt: Sequence[int], inputs: RowInputs) -> Any:
    """vLLM's input: the prompt's token ids, which it uses unchanged, and its images and videos, each identified by the
    digest of the row's pixels and its index."""
    placed = placed_images(config, prompt, inputs)
    kinds = {kind: [one for one in placed if one.kind == kind] for kind in ("image", "video")}
    kinds = {kind: own for kind, own in kinds.items() if own}
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.tensors.items()}
    one_each = torch.ones(len(placed), dtype=torch.int64)
    if config.model_type in GRIDS:
        sizes = {kind: tensors[f"{kind}_grid_thw"].prod(1) for kind in kinds}
    else:
        sizes = {"image": one_each}
        if config.model_type != "llava":
            tensors["num_patches"] = one_each
    fields = {name: _field(name, sizes, batched=config.model_type == "llava") for name in tensors}
    return mm_input(
        list(prompt),
        MultiModalKwargsItems.from_hf_inputs(tensors, fields),
        {kind: [f"{inputs.digest()}-{kind}-{number}" for number in range(len(own))] for kind, own in kinds.items()},
        {kind: [_range(one) for one in own] for kind, own in kinds.items()},
    )


def _range(one: PlacedMedia) -> PlaceholderRange:
    features = None if one.features is None else torch.tensor(one.features)
    return PlaceholderRange(offset=one.start, length=one.length, is_embed=features)


def _field(name: str, sizes: Mapping[str, torch.Tensor], *, batched: bool) -> Any:
    """vLLM's description of how the tensor `name` is split by image or video. Each has one row if `batched`, else the
    number of rows in `sizes`, by kind."""
    kind = "video" if name in (*VIDEOS, TIMES) else "image"
    if name in ("image_grid_thw", "video_grid_thw", TIMES, "num_patches"):
        return MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
    if batched:
        return MultiModalFieldConfig.batched(kind)
    return MultiModalFieldConfig.flat_from_sizes(kind, sizes[kind])


class _Info(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None, **({"video": None} if self.ctx.model_config.hf_config.model_type in GRIDS else {})}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return dict.fromkeys(self.get_supported_mm_limits(), seq_len)  # a row may be an image


class _NoDummies(BaseDummyInputsBuilder[_Info]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> NoReturn:
        raise _unprocessed()

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> NoReturn:
        raise _unprocessed()


class _NoProcessor(BaseMultiModalProcessor[_Info]):
    requires_tokenizer = False

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> NoReturn:
        raise _unprocessed()

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> NoReturn:
        raise _unprocessed()


def _unprocessed() -> NotImplementedError:
    return NotImplementedError("fppo gives vLLM images that its own processor made; leave skip_mm_profiling as it is")
