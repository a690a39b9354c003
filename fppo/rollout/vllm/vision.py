"""The images and videos of a row as vLLM takes them, one by one, and its names of vision parameters. No vllm here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from fppo.batch import RowInputs
from fppo.data.problems import Problems
from fppo.data.prompts import PromptSet
from fppo.key import Key
from fppo.models.model import Model
from fppo.models.vision import TIMES, image_token
from fppo.models.vision_pass import row_positions
from fppo.rollout.engine import Ask
from fppo.rollout.sync import Rename, dtensor_weight_loader
from fppo.rollout.vllm.host import Inputs

# model types, by how the images of a row are told apart: each has a row of `image_grid_thw`, or one of `pixel_values`
GRIDS, STACKS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("idefics3", "smolvlm", "llava")
APART = ("qwen3_vl",)  # model types that have text between the frames of a video


class PlacedMedia(NamedTuple):
    """An image or a video of a row: the place of its tokens, and which of these tokens stand for `features` (None:
    all)."""

    kind: str  # "image" or "video"
    start: int
    length: int
    features: tuple[bool, ...] | None = None


def inputs_of(model: Model, prompts: Sequence[Sequence[int]], ask: Ask) -> Inputs:
    """The images and videos of each row of the rollout; None if no prompt has any. Raises ValueError for a model that
    takes none, for videos to which vLLM gives other positions, and where `placed_images` does."""
    inputs = list(ask.prompts.inputs or ())
    if not any(inputs):
        return None
    for prompt, own in zip(prompts, inputs, strict=True):
        check_inputs(model, prompt, own)
    return [own for own in inputs for _ in range(ask.sampling.n)]


def check_inputs(model: Model, prompt: Sequence[int], inputs: RowInputs | None) -> None:
    """Raise ValueError for the images and videos of a row that `inputs_of` would refuse."""
    if inputs is None:
        return
    if model.vision is None:
        raise ValueError(f"the prompts have images, and a model of type {model.config.model_type!r} takes none")
    _check_row(model, prompt, inputs)


def check_videos(model: Model, prompts: PromptSet) -> None:
    """Raise ValueError, which names the prompts, for videos that `inputs_of` would refuse during the run. Reads the
    inputs of all prompts."""
    problems = Problems()
    for name, tokens, own in zip(prompts.ids, prompts.tokens, prompts.inputs or ()):
        try:
            if own is not None:
                _check_row(model, tokens, own)
        except ValueError as error:
            problems.add(str(error), at=name)
    problems.check("prompts")


def _check_row(model: Model, tokens: Sequence[int], inputs: RowInputs) -> None:
    assert model.vision is not None
    _check_positions(model, inputs, placed_images(model.vision.config, tokens, inputs))


def placed_images(config: PreTrainedConfig, tokens: Sequence[int], inputs: RowInputs) -> list[PlacedMedia]:
    """The places of a row's images, and then of its videos. Raises ValueError for places that do not hold the
    placeholder token, and for images and videos whose tokens are not adjacent, or not as many as their features."""
    video = getattr(config, "video_token_id", None)
    placed: list[PlacedMedia] = []
    for kind, token, places in (("image", image_token(config), inputs.places), ("video", video, inputs.video_places)):
        left = places.tolist()
        if any(place >= len(tokens) or tokens[place] != token for place in left):
            raise ValueError(
                f"a row's {kind}s have places that do not hold token {token}, which stands for them: the rows were "
                "cut, or encoded for another model"
            )
        counts = _counts(config, inputs, kind)
        if sum(counts) != len(left):
            raise ValueError(f"{len(left)} tokens stand for {kind}s that have {sum(counts)} features")
        for count in counts:
            own, left = left[:count], left[count:]
            placed.append(_placed(kind, own, separate_frames=kind == "video" and config.model_type in APART))
    return placed


def _placed(kind: str, own: Sequence[int], *, separate_frames: bool) -> PlacedMedia:
    """The place of one image or video with features at the places `own`. For a video with `separate_frames` it
    includes the token before each frame, for which vLLM looks."""
    if separate_frames:
        start = own[0] - 1
        return PlacedMedia(kind, start, own[-1] + 1 - start, tuple(i in {*own} for i in range(start, own[-1] + 1)))
    if list(own) != list(range(own[0], own[0] + len(own))):
        raise ValueError(f"the {len(own)} tokens of one of the {kind}s do not stand together, as vLLM needs them")
    return PlacedMedia(kind, own[0], len(own))


def _counts(config: Any, inputs: RowInputs, kind: str = "image") -> list[int]:
    """How many tokens stand for each image, or each video, of a row."""
    tower = config.vision_config
    if config.model_type in GRIDS:
        grid = inputs.tensors.get(f"{kind}_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        return (grid.prod(1) // tower.spatial_merge_size**2).tolist()
    if kind == "video":
        return []
    count = (tower.image_size // tower.patch_size) ** 2
    if config.model_type == "llava":
        count += config.vision_feature_select_strategy == "full"
    else:
        count //= config.scale_factor**2
    return [count] * len(inputs.tensors["pixel_values"])


def _check_positions(model: Model, inputs: RowInputs, placed: Sequence[PlacedMedia]) -> None:
    """Raise ValueError for a row whose tokens would have other positions in vLLM: the text after a video continues
    from its last time there, and in transformers from its longer side."""
    assert model.vision is not None
    config: Any = model.vision.config
    if config.model_type in APART or not len(inputs.video_places):
        return
    merged, at, theirs = config.vision_config.spatial_merge_size, 0, list[Tensor]()
    for one in sorted(placed, key=lambda one: one.start):
        number = [x.start for x in placed if x.kind == one.kind].index(one.start)
        frames, height, width = inputs.tensors[f"{one.kind}_grid_thw"][number].tolist()
        after = int(theirs[-1].max()) + 1 if theirs else 0
        theirs.append(torch.arange(one.start - at).expand(3, -1) + after)
        grid = torch.stack(
            torch.meshgrid(*(torch.arange(n) for n in (frames, height // merged, width // merged)), indexing="ij")
        )
        if one.kind == "video":
            seconds = float(inputs.tensors[TIMES][number]) if TIMES in inputs.tensors else 1.0
            step = seconds * getattr(config.vision_config, "tokens_per_second", 1.0)
            grid[0] = (grid[0].double() * step).long()
        theirs.append(grid.flatten(1) + one.start - at + after)
        at = one.start + one.length
    own, after = row_positions(model, inputs)
    if not torch.equal(torch.cat(theirs, 1), own) or int(theirs[-1].max()) + 1 != after:
        raise ValueError(
            f"a row has a video that is longer in time than in height and width, and vLLM gives the text after it "
            f"other positions than transformers does with model type {config.model_type!r}: use the embedded engine, "
            "or fewer frames"
        )


def weight_names(model: Model) -> Rename:
    """Make the function from a model's parameters to vLLM's names. LLaVA's vision tower has no names after the layer
    that is read, since vLLM lacks later layers."""
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
    """Words with an image of noise between them, and after it a video if the model takes any, as tokens; None if they
    would be more than `limit`."""
    assert model.vision is not None
    config: Any = model.vision.config
    tower, generator = config.vision_config, Key(0).fold("image").generator()
    half, shown = len(words) // 2, torch.zeros(1, 1, 1, 3, dtype=torch.uint8)
    if config.model_type in GRIDS:
        side, size = tower.spatial_merge_size, tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        pixels = torch.randn(8 * side**2, size, generator=generator)
        grid = torch.tensor([[1, 2 * side, 4 * side]])
        tensors = {"pixel_values": pixels, "image_grid_thw": grid}
        frames = 1 if config.model_type == "qwen2_5_vl" else 2  # with more, `_check_positions` may refuse it
        video = torch.tensor([[frames, 2 * side, 4 * side // frames]])
        tensors |= {"pixel_values_videos": pixels.flip(0), "video_grid_thw": video}
        start, end = config.vision_start_token_id, config.vision_end_token_id
        pieces = frames if config.model_type in APART else 1
        behind = [end, *[start, *[config.video_token_id] * (8 // pieces), end] * pieces]
    else:
        side = tower.image_size
        tensors, behind = {"pixel_values": torch.randn(1, tower.num_channels, side, side, generator=generator)}, []
        if config.model_type != "llava":
            tensors["pixel_attention_mask"] = torch.ones(1, side, side, dtype=torch.bool)
    (count,) = _counts(config, RowInputs(tensors, torch.arange(0), shown))
    row = [*words[:half], *[model.vision.token] * count, *behind, *words[half:]]
    if len(row) > limit:
        return None
    places = torch.arange(half, half + count)
    of_videos = [half + count + i for i, token in enumerate(behind) if token == model.vision.video]
    return row, RowInputs(tensors, places, shown, torch.tensor(of_videos, dtype=torch.int64))
