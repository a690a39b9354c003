"""Images and videos in a pass: their features in place of tokens, and positions of three axes."""

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
from fppo.models.regions import EmbeddingSeam
from fppo.models.vision import TIMES, VIDEOS, Vision
from fppo_kernels.padding import sent

Deep = Mapping[str, Any]  # a text model's arguments with image features for its first layers
_IMAGE, _VIDEO = 1, 2  # kinds of tokens, as transformers numbers them


class Images(NamedTuple):
    """The images and videos of a pass, shared ones once, and the tokens that their features replace.

    The features of all images are numbered from 0 on, and those of all videos after them.
    """

    tensors: Mapping[str, Tensor]  # the vision tower's arguments, of all images and all videos in turn, on the host
    numbers: Tensor  # [M]: the number of each token's feature
    places: Tensor  # [M]: the tokens' indices in the model's input, ascending
    counts: tuple[int, int]  # the numbers of image features and of video features

    def within(self, start: int, length: int) -> Images:
        """Select the features of `length` tokens from `start` on, with indices relative to `start`."""
        own = ((self.places >= start) & (self.places < start + length)).nonzero().flatten()
        return self._replace(numbers=self.numbers[own], places=self.places[own] - start)


def place_images(
    model: Model, inputs: Sequence[RowInputs | None] | None, tokens: Tensor, positions: Tensor, lengths: Sequence[int]
) -> tuple[Images | None, Tensor]:
    """The images and videos of packed rows, and the positions of their tokens, [N] or [3, N]; tokens and `positions`
    are [N].

    `lengths` and `inputs` have an entry for each row. Raises ValueError for a model without vision, and for tokens at
    the features' indices that are not the placeholder of an image or video.
    """
    seen = [
        (start, size, x) for start, size, x in zip(accumulate([0, *lengths]), lengths, inputs or ()) if x is not None
    ]
    if not seen:
        return None, positions
    if model.vision is None:
        raise ValueError(f"the rows have images, and a model of type {model.config.model_type!r} takes none")
    device, distinct = tokens.device, list({id(x): x for _, _, x in seen}.values())
    placed = _numbered(distinct)
    numbers = sent(torch.cat([placed.numbers[id(x)] for _, _, x in seen]), device)
    places = sent(torch.cat([_places_of(x, size) + start for start, size, x in seen]), device)
    _check_tokens(model.vision, tokens[places], numbers, placed.counts)
    if model.vision.axes > 1:
        positions = positions.expand(model.vision.axes, -1).clone()
        known = {id(x): row_positions(model, x) for x in distinct}
        for start, size, x in seen:
            own, after = known[id(x)]
            head = own.shape[1]
            positions[:, start : start + head] = sent(own, device)
            positions[:, start + head : start + size] += after - head
    return Images(joined([x.tensors for x in distinct], for_device=device), numbers, places, placed.counts), positions


class _Numbered(NamedTuple):
    numbers: dict[int, Tensor]  # of a row's features, in the order of their places, by the id of its inputs
    counts: tuple[int, int]


def _numbered(distinct: Sequence[RowInputs]) -> _Numbered:
    """Number the features of the rows' `distinct` inputs: first those of all images, then those of all videos."""
    images, videos = sum(len(x.places) for x in distinct), sum(len(x.video_places) for x in distinct)
    image, video, numbers = 0, images, dict[int, Tensor]()
    for x in distinct:
        own = torch.cat([torch.arange(len(x.places)) + image, torch.arange(len(x.video_places)) + video])
        numbers[id(x)] = own[torch.cat([x.places, x.video_places]).argsort()]
        image, video = image + len(x.places), video + len(x.video_places)
    return _Numbered(numbers, (images, videos))


def _places_of(inputs: RowInputs, size: int) -> Tensor:
    """The token indices of a row's features, ascending. Raises ValueError for one beyond the row's `size` tokens."""
    places = torch.cat([inputs.places, inputs.video_places]).sort().values
    if len(places) and int(places[-1]) >= size:
        raise ValueError(f"a row of {size} tokens has images or videos beyond its end: it was cut")
    return places


def _check_tokens(vision: Vision, tokens: Tensor, numbers: Tensor, counts: tuple[int, int]) -> None:
    """Raise ValueError unless the tokens [M] at the features' indices are placeholders of images or of videos,
    according to the features' `numbers`: those below `counts[0]`, the number of image features, are of images. Waits
    for the device."""
    kind = vision.config.model_type
    if vision.video is None and counts[1]:
        raise ValueError(f"the rows have videos, and a model of type {kind!r} takes none, or none that fppo can run")
    of_images = numbers < counts[0]
    wrong = tokens != torch.where(of_images, vision.token, -1 if vision.video is None else vision.video)
    if wrong.any():
        what, token = ("images", vision.token) if (wrong & of_images).any() else ("videos", vision.video)
        raise ValueError(
            f"a row's {what} have positions without their placeholder token {token}: the rows were cut, or encoded for "
            "another model"
        )


def row_positions(model: Model, inputs: RowInputs) -> tuple[Tensor, int]:
    """The positions [3, n] of a row's tokens up to the last one of its images and videos, by the model's own rule; and
    the position of the token after them."""
    assert model.vision is not None
    last = int(torch.cat([inputs.places, inputs.video_places]).max())
    kinds = torch.zeros(1, last + 2, dtype=torch.int32)
    kinds[0, inputs.places], kinds[0, inputs.video_places] = _IMAGE, _VIDEO
    tower: Any = cast(Any, model.vision.config).vision_config
    _check_runs(model.vision.config.model_type, kinds[0], inputs.tensors, tower.spatial_merge_size**2)
    ids = (kinds == _IMAGE) * model.vision.token + (kinds == _VIDEO) * (model.vision.video or 0)
    rule: Any = model.skeleton
    names = [name for name in ("image_grid_thw", "video_grid_thw", TIMES) if name in inputs.tensors]
    given = {name: inputs.tensors[name] for name in names}
    try:
        own = rule.get_rope_index(input_ids=ids.long(), mm_token_type_ids=kinds, **given)[0][:, 0]
    except (RuntimeError, StopIteration) as error:  # raised by its loop over pieces and grids
        raise ValueError(
            f"a row's images or videos are split differently than model type {model.vision.config.model_type!r} "
            f"splits them: rows encoded for another model ({type(error).__name__}: {error})"
        ) from error
    return own[:, :-1], int(own[0, -1])


def _check_runs(kind: str, kinds: Tensor, tensors: Mapping[str, Tensor], merged: int) -> None:
    """Raise ValueError, which names the model type `kind`, unless each image, and each video or video frame, has one
    run of tokens of its number of features, one per `merged` patches by the grids in `tensors`; `kinds` [n] says which
    tokens are of images or of videos."""
    runs, counts = torch.unique_consecutive(kinds, return_counts=True)
    for of, number, name in (("images", _IMAGE, "image_grid_thw"), ("videos", _VIDEO, "video_grid_thw")):
        grid = tensors.get(name, torch.zeros(0, 3, dtype=torch.int64))
        pieces = counts[runs == number].tolist()
        whole = (grid.prod(1) // merged).tolist()
        _check_count(of, sum(pieces), sum(whole))
        frames = (grid[:, 1:].prod(1) // merged).repeat_interleave(grid[:, 0]).tolist()
        if pieces != whole and (number == _IMAGE or pieces != frames):
            raise ValueError(
                f"a row's {len(grid)} {of} have {len(pieces)} runs of {pieces} placeholder tokens: model type {kind!r} "
                f"needs text or a special token between two {of}, and each of them whole"
            )


def _check_count(kind: str, tokens: int, features: int) -> None:
    if tokens != features:
        raise ValueError(
            f"{tokens} placeholder tokens for {kind} with {features} features: rows encoded for another model, or an "
            "image that the model drops (an image all of zeros is padding to some)"
        )


def shift_of(model: Model, inputs: RowInputs | None) -> int:
    """The difference between positions and token indices after a row's images and videos."""
    if inputs is None or model.vision is None or model.vision.axes == 1:
        return 0
    own, after = row_positions(model, inputs)
    return after - own.shape[1]


def joined(rows: Sequence[Mapping[str, Tensor]], *, for_device: torch.device) -> dict[str, Tensor]:
    """Concatenate the tensors of several rows by name, trailing sizes padded with zeros. They are in pinned host
    memory, for asynchronous copies, if the device is a GPU."""
    together: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        parts = [row[name] for row in rows if name in row]
        sizes = [max(part.shape[d] for part in parts) for d in range(1, parts[0].dim())]
        fill = [[x for d in reversed(range(len(sizes))) for x in (0, sizes[d] - part.shape[d + 1])] for part in parts]
        filled = [F.pad(part, gaps) for part, gaps in zip(parts, fill, strict=True)]
        shape = sum(map(len, filled)), *filled[0].shape[1:]
        together[name] = torch.empty(shape, dtype=filled[0].dtype, pin_memory=for_device.type == "cuda")
        torch.cat(filled, out=together[name])
    return together


def _on_device(tensors: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """Copy tensors to the device of `like` asynchronously; floating-point ones in its dtype."""
    there = {name: x.to(like.device, non_blocking=True) for name, x in tensors.items()}
    return {name: x.to(like.dtype) if x.is_floating_point() else x for name, x in there.items()}


def see(model: Model, skeleton: PreTrainedModel, tokens: Tensor, images: Images) -> tuple[Tensor, Deep]:
    """The embeddings [B, S, H] of tokens [B, S] with image and video features in place of their tokens; call it inside
    `bind`. On a tensor axis they are of this rank's slice of the tokens."""
    assert model.vision is not None
    ids = tokens.flatten().index_fill(0, images.places, 0).view_as(tokens)  # the id may be beyond the embeddings
    embeddings = skeleton.get_input_embeddings()
    embedded = cast(Tensor, embeddings(ids))
    if isinstance(embeddings, EmbeddingSeam):
        length = embedded.shape[1]
        images = images.within(embeddings.region.axis.rank * length, length)
    flat = embedded.flatten(0, 1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and model.vision.trains):
        pooled, deep = _features(skeleton, _on_device(images.tensors, flat), images.counts)
    flat = flat.index_copy(0, images.places, pooled[images.numbers].to(flat.dtype))
    if not deep:
        return flat.view_as(embedded), {}
    if model.spans and len(deep) >= len(model.spans[0].layers):
        raise ValueError(
            f"the first stage of the pipeline has {len(model.spans[0].layers)} layers, and images are added after "
            f"{len(deep)}: it needs one more, since it passes on the output of its last layer"
        )
    mask = torch.zeros(len(flat), dtype=torch.bool, device=flat.device).index_fill(0, images.places, True)
    layers = [x[images.numbers] for x in deep]
    return flat.view_as(embedded), {
        "visual_pos_masks": mask.view(embedded.shape[:2]),
        "deepstack_visual_embeds": layers,
    }


def _features(
    skeleton: PreTrainedModel, tensors: Mapping[str, Tensor], counts: tuple[int, int]
) -> tuple[Tensor, Sequence[Tensor]]:
    """The features of all images, then of all videos, as from `image_features`. Raises ValueError unless there are as
    many image and video features as `counts` says."""
    of_images = {name: x for name, x in tensors.items() if name not in (*VIDEOS, TIMES)}
    of_videos = {name: tensors[name] for name in VIDEOS if name in tensors}
    parts: list[tuple[Tensor, Sequence[Tensor]]] = []
    kinds = (("images", of_images, image_features), ("videos", of_videos, video_features))
    for (of, own, features), count in zip(kinds, counts, strict=True):
        if own:
            parts.append(features(skeleton, own))
        _check_count(of, count, len(parts[-1][0]) if own else 0)
    pooled, deep = zip(*parts, strict=True)
    return torch.cat(pooled), [torch.cat(layers) for layers in zip(*deep, strict=True)]


def image_features(skeleton: Any, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """The features [M, H] of all images, in order, and those for each of the text model's first layers (DeepStack,
    arXiv:2406.04334), if any."""
    if "pixel_attention_mask" in inspect.signature(skeleton.get_image_features).parameters:
        tensors = {name: x[None] for name, x in tensors.items()}  # Idefics 3, SmolVLM: a row of images
    return _together(skeleton.get_image_features(**tensors, return_dict=True))


def video_features(skeleton: Any, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """The features [N, H] of all videos, and those for each of the text model's first layers, if any."""
    return _together(skeleton.get_video_features(**tensors, return_dict=True))


def _together(out: Any) -> tuple[Tensor, Sequence[Tensor]]:
    deep = getattr(out, "deepstack_features", None) or ()
    return (
        torch.cat([x.flatten(0, -2) for x in out.pooler_output]),
        [x if isinstance(x, Tensor) else torch.cat(list(x)) for x in deep],
    )
