"""The vision part of a model: a vision tower and a projector next to the text model, whose layers have the seams."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, cast

import attrs
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

VIDEOS = ("pixel_values_videos", "video_grid_thw")  # a vision tower's arguments for videos
TIMES = "second_per_grid_ts"  # a further argument of the positions (Qwen2.5-VL)


@attrs.frozen(eq=False, kw_only=True)
class Vision:
    """A model's handling of images. `trains`: whether its vision tower and projector are updated."""

    config: PreTrainedConfig  # of the whole model; `Model.config` is the text model's
    text: str  # the text model's path in the skeleton
    token: int  # the placeholder id of an image feature in prompts
    axes: int  # of rotary positions: 3 (time, height, width) or 1
    video: int | None = None  # the placeholder id of a video feature; None: videos have none
    deep: int = 0  # the number of first layers after which image features are added (DeepStack, arXiv:2406.04334)
    trains: bool = True


def takes_images(config: PreTrainedConfig) -> bool:
    """Whether a config is of a model of images and text."""
    return hasattr(config, "vision_config") and type(config) in AutoModelForImageTextToText._model_mapping


def vision_of(config: PreTrainedConfig, base: PreTrainedModel) -> Vision:
    """Describe the vision part of `base`. Raises ValueError for a model that fppo cannot run with images."""
    kind = f"fppo cannot run model type {config.model_type!r} with images: {type(base).__name__} has no"
    if not hasattr(base, "get_image_features"):
        raise ValueError(f"{kind} get_image_features")
    decoder = base.get_decoder()
    text = next((path for path, module in base.named_modules() if module is decoder), "")
    if not text:
        raise ValueError(f"{kind} text model of its own inside")
    if "token_type_ids" in inspect.signature(type(base).forward).parameters:
        raise ValueError(f"{kind} causal text layers: the tokens of an image see one another (token_type_ids)")
    token = image_token(config)
    if token is None:
        raise ValueError(f"{kind} image_token_id in its config")
    axes = 3 if hasattr(base, "get_rope_index") else 1
    deep = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    return Vision(config=config, text=text, token=token, axes=axes, video=_video_token(config, base), deep=deep)


def image_token(config: PreTrainedConfig) -> int | None:
    """The token id that stands for an image feature in prompts; None if the config does not name it."""
    token = getattr(config, "image_token_id", None)
    return getattr(config, "image_token_index", None) if token is None else token


def _video_token(config: PreTrainedConfig, base: PreTrainedModel) -> int | None:
    """The placeholder id of a video feature, for a model that takes videos like Qwen2-VL: as patches with a grid of
    time, height and width for each, without further merging over time; None for others."""
    features, rule = (getattr(base, name, None) for name in ("get_video_features", "get_rope_index"))
    if features is None or rule is None or "video_grid_thw" not in inspect.signature(rule).parameters:
        return None
    needed = {name for name, x in inspect.signature(features).parameters.items() if x.kind is not x.VAR_KEYWORD}
    merged = getattr(cast(Any, config).vision_config, "temporal_merge_size", 1) > 1  # ERNIE 4.5 VL
    return getattr(config, "video_token_id", None) if needed == {*VIDEOS} and not merged else None


def parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A config and, recursively, the configs of its parts."""
    yield config
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            yield from parts_of(part)


def put_attention(base: PreTrainedModel, vision: Vision, name: str) -> None:
    """Set the attention function `name` in the text model's layers, and torch's own in the vision tower's."""
    for module in base.modules():  # the setter descends into the configs of parts: all of them before the text model's
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = "sdpa"
    base.get_submodule(vision.text).config._attn_implementation = name  # type: ignore[union-attr]
