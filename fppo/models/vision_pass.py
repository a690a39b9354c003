"""Images in a pass: their features in the places of tokens, and positions of three axes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from fppo.batch import RowInputs
from fppo.models.model import Model

Deep = Mapping[str, Any]  # what a text model takes of the images for its first layers


class Images(NamedTuple):
    """The images of a pass, those that rows share once, and where their features go."""

    tensors: Mapping[str, Tensor]  # what the vision tower takes, of all images one after the other
    numbers: Tensor  # [M]: the number of each token's feature
    places: Tensor  # [M]: the token's place among all tokens of the pass, in order


def place_images(
    model: Model, inputs: Sequence[RowInputs | None] | None, tokens: Tensor, positions: Tensor, lengths: Sequence[int]
) -> tuple[Images | None, Tensor]:
    """The images of packed rows, and the positions of their tokens, [N] or [3, N]; tokens and `positions` are [N].

    `lengths` are those of all rows [B], of which `inputs` has one each. Raises ValueError for a model that takes no
    images, and for places that hold no image's token.
    """
    seen = [
        (start, size, x) for start, size, x in zip(accumulate([0, *lengths]), lengths, inputs or ()) if x is not None
    ]
    if not seen:
        return None, positions
    if model.vision is None:
        raise ValueError(f"the rows have images, and a model of type {model.config.model_type!r} takes none")
    device, first, end = tokens.device, dict[int, int](), 0
    distinct: list[RowInputs] = []
    for _, _, x in seen:
        if id(x) not in first:
            first[id(x)], end = end, end + len(x.places)
            distinct.append(x)
    numbers = torch.cat([torch.arange(len(x.places)) + first[id(x)] for _, _, x in seen]).to(device)
    places = torch.cat([x.places + start for start, _, x in seen]).to(device)
    if (tokens[places] != model.vision.token).any():
        raise ValueError(
            f"a row's images have places that do not hold token {model.vision.token}, which stands for them: the rows "
            "were cut, or encoded for another model"
        )
    if model.vision.axes > 1:
        positions = positions.expand(model.vision.axes, -1).clone()
        known = {id(x): row_positions(model, x) for x in distinct}
        for start, size, x in seen:
            own = known[id(x)].to(device)
            head = own.shape[1]
            positions[:, start : start + head] = own
            positions[:, start + head : start + size] += own.max() + 1 - head
    return Images(joined([x.tensors for x in distinct]), numbers, places), positions


def row_positions(model: Model, inputs: RowInputs) -> Tensor:
    """The positions [3, n] of a row's tokens up to its last image's, by the model's own rule."""
    assert model.vision is not None
    kinds = torch.zeros(1, int(inputs.places[-1]) + 1, dtype=torch.int32)
    kinds[0, inputs.places] = 1
    grid, tower = inputs.tensors["image_grid_thw"], cast(Any, model.vision.config).vision_config
    _check_count(len(inputs.places), int(grid.prod(1).sum()) // tower.spatial_merge_size**2)
    runs = int((F.pad(kinds, (1, 0)).diff() == 1).sum())
    if runs != len(grid):
        raise ValueError(
            f"a row's {len(grid)} images stand in {runs} pieces: model type {model.config.model_type!r} needs text or "
            "a token of its own between two images"
        )
    rule: Any = model.skeleton
    ids = (kinds * model.vision.token).long()
    return rule.get_rope_index(input_ids=ids, mm_token_type_ids=kinds, image_grid_thw=grid)[0][:, 0]


def _check_count(tokens: int, features: int) -> None:
    if tokens != features:
        raise ValueError(
            f"{tokens} tokens stand for images that have {features} features: rows encoded for another model, or an "
            "image that the model drops (an image all of zeros is padding to some)"
        )


def shift_of(model: Model, inputs: RowInputs | None) -> int:
    """How far the positions after a row's images are from the numbers of its tokens."""
    if inputs is None or model.vision is None or model.vision.axes == 1:
        return 0
    own = row_positions(model, inputs)
    return int(own.max()) + 1 - own.shape[1]


def joined(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of several rows, by name, one after the other; trailing sizes that differ are filled with zeros."""
    together: dict[str, Tensor] = {}
    for name in rows[0]:
        parts = [row[name] for row in rows]
        sizes = [max(part.shape[d] for part in parts) for d in range(1, parts[0].dim())]
        fill = [[x for d in reversed(range(len(sizes))) for x in (0, sizes[d] - part.shape[d + 1])] for part in parts]
        together[name] = torch.cat([F.pad(part, gaps) for part, gaps in zip(parts, fill, strict=True)])
    return together


def see(model: Model, skeleton: PreTrainedModel, tokens: Tensor, images: Images) -> tuple[Tensor, Deep]:
    """The embeddings [B, S, H] of tokens [B, S] with the features of images in their places, from inside `bind`."""
    assert model.vision is not None
    ids = tokens.flatten().index_fill(0, images.places, 0)  # the id may be beyond the embeddings
    flat = cast(Tensor, skeleton.get_input_embeddings()(ids))
    like = {name: x.to(flat if x.is_floating_point() else flat.device) for name, x in images.tensors.items()}
    with torch.set_grad_enabled(torch.is_grad_enabled() and model.vision.trains):
        pooled, deep = image_features(skeleton, like)
    _check_count(int(images.numbers.max()) + 1, len(pooled))
    flat = flat.index_copy(0, images.places, pooled[images.numbers].to(flat.dtype))
    if not deep:
        return flat.view(*tokens.shape, -1), {}
    mask = torch.zeros_like(ids, dtype=torch.bool).index_fill(0, images.places, True).view_as(tokens)
    layers = [x[images.numbers] for x in deep]
    return flat.view(*tokens.shape, -1), {"visual_pos_masks": mask, "deepstack_visual_embeds": layers}


def image_features(skeleton: Any, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """The features [M, H] of all images, in order, and those for the first layers of the text model, if it takes any
    (DeepStack, arXiv:2406.04334)."""
    if "pixel_attention_mask" in inspect.signature(skeleton.get_image_features).parameters:
        tensors = {name: x[None] for name, x in tensors.items()}  # Idefics 3, SmolVLM: a row of images
    out = skeleton.get_image_features(**tensors, return_dict=True)
    deep = getattr(out, "deepstack_features", None) or ()
    return (
        torch.cat([x.flatten(0, -2) for x in out.pooler_output]),
        [x if isinstance(x, Tensor) else torch.cat(list(x)) for x in deep],
    )
