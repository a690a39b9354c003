"""The probe of a model with vision: a small vision tower before a small language model, with an image and a video."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fppo.batch import RowInputs
from fppo.key import Key
from fppo.models.vision import TIMES, Vision
from fppo.models.vision_pass import image_features

WORDS, _IDS = 48, 64  # ids below the first are words, from it on placeholders of images
_SIDE = 4  # patches
_FRAMES, _SECONDS = 2, 1.25  # of a video: frames, each made of several in a file, and seconds per frame
_HEADS, _INNER = 2, 64


def with_text(vision: Vision, text: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model of images and text, with `text` as the text model's config, a small vision tower, and
    placeholder ids below 64."""
    config = copy.deepcopy(vision.config)
    before = config.get_text_config()
    name = next(name for name in config.sub_configs if getattr(config, name, None) is before)
    text.vocab_size = _IDS
    setattr(config, name, text)
    tower: Any = config.vision_config
    _shorten(tower)
    _narrow(tower, before.hidden_size, text.hidden_size)
    marks = [name for name, x in vars(config).items() if name.endswith(("token_id", "token_index")) and type(x) is int]
    ids = sorted({getattr(config, name) for name in marks})
    for name in marks:
        setattr(config, name, WORDS + ids.index(getattr(config, name)))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)
    return config


def _shorten(tower: Any) -> None:
    """Reduce a vision tower's number of layers to the length of its longest list of layer indices, or to 2 if that is
    more, and renumber these lists from 0."""
    lists = [name for name, x in vars(tower).items() if name.endswith("indexes") and isinstance(x, (list, tuple))]
    depth = max([2, *(len(getattr(tower, name)) for name in lists)])
    for name in lists:
        setattr(tower, name, list(range(len(getattr(tower, name)))))
    for name in ("depth", "num_hidden_layers"):
        if name in vars(tower):
            setattr(tower, name, min(getattr(tower, name), depth))


def _narrow(tower: Any, before: int, hidden: int) -> None:
    """Reduce the tower to two heads, a narrow block and an image of few patches; its other widths that equal the text
    model's, `before`, become `hidden`."""
    own = vars(tower)
    width = "embed_dim" if "embed_dim" in own else "hidden_size"
    heads = next((name for name in ("num_heads", "num_attention_heads") if name in own), None)
    wide = own[width]
    narrow = wide if heads is None or own[heads] <= _HEADS else _HEADS * (wide // own[heads])
    for name, x in list(own.items()):
        if name == heads:
            setattr(tower, name, min(x, _HEADS))
        elif name == "intermediate_size":
            setattr(tower, name, min(x, _INNER))
        elif type(x) is int and name != width and x == before and name.endswith(("hidden_size", "projection_dim")):
            setattr(tower, name, hidden)
        elif type(x) is int and (name == width or name == "embed_dim"):
            setattr(tower, name, narrow)
    patch = own.get("patch_size")
    if "image_size" in own and patch is not None:
        many = isinstance(own["image_size"], (list, tuple))
        tower.image_size = [_SIDE * x for x in patch] if many else _SIDE * patch


def probe_inputs(vision: Vision, base: PreTrainedModel, before: Sequence[int]) -> tuple[RowInputs, list[int]]:
    """The inputs of a row with an image after the words `before`, then a video if the model takes any, and the row's
    tokens up to the end of these. `base` runs the vision tower."""
    tensors, generator = _image(base), Key(0).fold("video").generator()
    with torch.no_grad():
        count = len(image_features(base, tensors)[0])
    places = torch.arange(len(before), len(before) + count)
    tokens, shown = [*before, *([vision.token] * count)], torch.zeros(1, 1, 1, 3, dtype=torch.uint8)
    if vision.video is None:
        return RowInputs(tensors, places, shown), tokens
    tower: Any = base.config.vision_config
    grid = torch.tensor([[_FRAMES, _SIDE, _SIDE]])
    pixels = _noise(int(grid.prod()), tensors["pixel_values"].shape[1], generator=generator)
    tensors |= {"pixel_values_videos": pixels, "video_grid_thw": grid}
    rule: Any = base
    if TIMES in inspect.signature(rule.get_rope_index).parameters:
        tensors[TIMES] = torch.tensor([_SECONDS])
    frame = [vision.video] * (_SIDE**2 // tower.spatial_merge_size**2)
    pieces = [frame] * _FRAMES if _frames_apart(rule, grid, vision.video) else [frame * _FRAMES]
    for piece in pieces:
        tokens += [before[-1], *piece]
    video_places = torch.tensor([place for place, token in enumerate(tokens) if token == vision.video])
    return RowInputs(tensors, places, torch.cat([shown] * 2), video_places), tokens


def _frames_apart(base: Any, grid: Tensor, token: int) -> bool:
    """Whether the model computes positions only if the frames of a video are apart, with words between (Qwen3-VL)."""
    count = int(grid.prod()) // base.config.vision_config.spatial_merge_size**2
    kinds = torch.full((1, count), 2, dtype=torch.int32)
    try:
        base.get_rope_index(
            input_ids=torch.full_like(kinds, token).long(), mm_token_type_ids=kinds, video_grid_thw=grid
        )
    except (RuntimeError, StopIteration):
        return True
    return False


def _image(base: PreTrainedModel) -> dict[str, Tensor]:
    """The vision tower's arguments for an image of noise."""
    tower: Any = base.config.vision_config
    takes = inspect.signature(base.get_image_features).parameters  # type: ignore[arg-type]
    generator, patch = Key(0).fold("image").generator(), tower.patch_size
    channels = getattr(tower, "in_channels", None) or getattr(tower, "num_channels", 3)
    if "image_grid_thw" in takes:
        size = channels * getattr(tower, "temporal_patch_size", 1) * patch**2
        grid = torch.tensor([[1, _SIDE, 2 * _SIDE]])
        return {"pixel_values": _noise(2 * _SIDE**2, size, generator=generator), "image_grid_thw": grid}
    side = getattr(tower, "image_size", None) or _SIDE * patch
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    tensors = {"pixel_values": _noise(1, channels, height, width, generator=generator)}
    if "pixel_attention_mask" in takes:
        tensors["pixel_attention_mask"] = torch.ones(1, height, width, dtype=torch.bool)
    if "image_sizes" in takes and tower.model_type == "pixtral":
        tensors["image_sizes"] = torch.tensor([[height, width]])
    return tensors


def _noise(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def composite_inputs(plain: PreTrainedModel, row: Tensor, inputs: RowInputs) -> dict[str, Tensor]:
    """The arguments of transformers' own forward besides the tokens of a row [S]."""
    takes = inspect.signature(type(plain).forward).parameters
    rows = "pixel_attention_mask" in takes
    kinds = torch.zeros(1, len(row), dtype=torch.int32)
    kinds[0, inputs.places], kinds[0, inputs.video_places] = 1, 2
    beside = {name: x[None] if rows else x for name, x in inputs.tensors.items()}
    return beside | ({"mm_token_type_ids": kinds} if "mm_token_type_ids" in takes else {})
