"""The images of a row as vLLM takes them, one by one, and the parameters of what sees them. No vllm here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from fppo.batch import RowInputs
from fppo.key import Key
from fppo.models.model import Model
from fppo.models.vision import image_token
from fppo.rollout.engine import Ask
from fppo.rollout.sync import Rename, dtensor_weight_loader
from fppo.rollout.vllm.host import Inputs

# by what tells images of a row apart: a row of `image_grid_thw` each, or one of `pixel_values`
GRIDS, STACKS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("idefics3", "smolvlm", "llava")


class Placed(NamedTuple):
    """An image of a row: the place of its first token, and how many stand for it, one after the other."""

    start: int
    length: int


def inputs_of(model: Model, prompts: Sequence[Sequence[int]], ask: Ask) -> Inputs:
    """The images of each row of the rollout; None if no prompt has any. Raises ValueError for a model that takes none,
    and as `placed_images`."""
    inputs = list(ask.prompts.inputs or ())
    if not any(inputs):
        return None
    if model.vision is None:
        raise ValueError(f"the prompts have images, and a model of type {model.config.model_type!r} takes none")
    for prompt, own in zip(prompts, inputs, strict=True):
        if own is not None:
            placed_images(model.vision.config, prompt, own)
    return [own for own in inputs for _ in range(ask.sampling.n)]


def placed_images(config: PreTrainedConfig, tokens: Sequence[int], inputs: RowInputs) -> list[Placed]:
    """Where a row's images stand. Raises ValueError for places that do not hold what stands for images, and for images
    whose tokens are not as many as their features, or do not stand together."""
    token = image_token(config)
    places = inputs.places.tolist()
    if any(place >= len(tokens) or tokens[place] != token for place in places):
        raise ValueError(
            f"a row's images have places that do not hold token {token}, which stands for them: the rows were cut, or "
            "encoded for another model"
        )
    counts = _counts(config, inputs)
    if sum(counts) != len(places):
        raise ValueError(f"{len(places)} tokens stand for images that have {sum(counts)} features")
    placed: list[Placed] = []
    for count in counts:
        own, places = places[:count], places[count:]
        if own != list(range(own[0], own[0] + count)):
            raise ValueError(f"the {count} tokens of an image do not stand together, as vLLM needs them")
        placed.append(Placed(own[0], count))
    return placed


def _counts(config: Any, inputs: RowInputs) -> list[int]:
    """How many tokens stand for each image of a row."""
    tower = config.vision_config
    if config.model_type in GRIDS:
        return (inputs.tensors["image_grid_thw"].prod(1) // tower.spatial_merge_size**2).tolist()
    count = (tower.image_size // tower.patch_size) ** 2
    if config.model_type == "llava":
        count += config.vision_feature_select_strategy == "full"
    else:
        count //= config.scale_factor**2
    return [count] * len(inputs.tensors["pixel_values"])


def weight_names(model: Model) -> Rename:
    """How vLLM names a model's parameters: none for those of LLaVA's vision tower behind the layer that is read, which
    vLLM does not have."""
    config: Any = model.whole_config
    if model.vision is None or config.model_type != "llava":
        return dtensor_weight_loader(model.config.model_type)
    count, read = config.vision_config.num_hidden_layers, config.vision_feature_layer
    start, kept = "model.vision_tower.", read + count + 1 if read < 0 else read
    unread = tuple(f"{start}encoder.layers.{layer}." for layer in range(kept, count))

    def rename(name: str, x: Tensor) -> Iterable[tuple[str, Tensor]]:
        if name.startswith((*unread, f"{start}post_layernorm.")):
            return ()
        new = f"{start}vision_model.{name.removeprefix(start)}" if name.startswith(start) else name
        return ((new, x),)

    return rename


def probe_row(model: Model, words: Sequence[int], limit: int) -> tuple[list[int], RowInputs] | None:
    """Tokens with an image of noise between the words; None where they would be more than `limit`."""
    assert model.vision is not None
    config: Any = model.vision.config
    tower, generator = config.vision_config, Key(0).fold("image").generator()
    if config.model_type in GRIDS:
        side, size = tower.spatial_merge_size, tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        pixels = torch.randn(8 * side**2, size, generator=generator)
        tensors = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2 * side, 4 * side]])}
    else:
        side = tower.image_size
        tensors = {"pixel_values": torch.randn(1, tower.num_channels, side, side, generator=generator)}
        if config.model_type != "llava":
            tensors["pixel_attention_mask"] = torch.ones(1, side, side, dtype=torch.bool)
    half, shown = len(words) // 2, torch.zeros(1, 1, 1, 3, dtype=torch.uint8)
    (count,) = _counts(config, RowInputs(tensors, torch.arange(0), shown))
    if count + len(words) > limit:
        return None
    row = [*words[:half], *[model.vision.token] * count, *words[half:]]
    return row, RowInputs(tensors, torch.arange(half, half + count), shown)
