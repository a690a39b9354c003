"""Prompts with images: opened from paths, bytes or `datasets` images, and encoded by the model's own processor."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import attrs
import torch
from torch import Tensor

from fppo.batch import RowInputs
from fppo.data.chat import PLAIN, ChatOptions

SHOWN = 96  # pixels, the longer side of an image as it is shown beside samples
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")  # of what a processor gives


@attrs.frozen
class ImageReader:
    """What turns messages with images into tokens and inputs.

    processor: transformers' processor of the model, with a chat template.
    token: the id that stands in prompts for each feature of an image (`Vision.token`).
    """

    processor: Any
    token: int
    chat: ChatOptions = PLAIN

    def encode(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any]
    ) -> tuple[list[int], RowInputs | None]:
        """The tokens of the conversation up to where the assistant speaks, and its images.

        The messages' contents are lists of parts, with a part {"type": "image"} for each of the images. Raises
        ValueError for what is no image, and for text that the processor takes for one; processors and chat templates
        raise what they like.
        """
        pictures = [opened(image, number) for number, image in enumerate(images, start=1)]
        self._check_text(messages)
        left = iter(pictures)
        conversation = [
            {**message, "content": [_filled(part, left) for part in message["content"]]} for message in messages
        ]
        out = self.processor.apply_chat_template(
            conversation,
            tools=[dict(tool) for tool in self.chat.tools] or None,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
            **self.chat.arguments,
        )
        tokens: Tensor = out["input_ids"][0]
        places = (tokens == self.token).nonzero()[:, 0]
        if bool(len(places)) != bool(pictures):
            raise ValueError(f"{len(pictures)} images, for which {len(places)} tokens stand (token {self.token})")
        if not pictures:
            return tokens.tolist(), None
        rows = "pixel_attention_mask" in out  # Idefics 3, SmolVLM: a row of images
        tensors = {name: _by_image(name, x, rows) for name, x in out.items() if name not in _TEXT}
        return tokens.tolist(), RowInputs(tensors, places, _shown(pictures))

    def _check_text(self, messages: Sequence[Mapping[str, Any]]) -> None:
        names = ("image_token", "boi_token", "video_token", "image_token_text")
        marks = [mark for name in names if isinstance(mark := getattr(self.processor, name, None), str)]
        marks.append(self.processor.tokenizer.convert_ids_to_tokens(self.token))
        texts = [part["text"] for message in messages for part in message["content"] if part["type"] == "text"]
        if wrong := sorted({mark for mark in marks for text in texts if mark and mark in text}):
            raise ValueError(f"the text holds {wrong}, which would stand for images: leave it out of texts")


class ReadRow(NamedTuple):
    """A prompt's messages and images, and what was read of these if that is kept."""

    messages: Sequence[Mapping[str, Any]]
    images: Sequence[Any]
    inputs: RowInputs | None


class ReadInputs(Sequence["RowInputs | None"]):
    """The inputs of each prompt: kept, or read anew when they are asked for, as pixels of large data sets must be."""

    def __init__(self, reader: ImageReader, rows: Sequence[ReadRow]) -> None:
        self._reader, self._rows = reader, tuple(rows)

    @overload
    def __getitem__(self, index: int) -> RowInputs | None: ...
    @overload
    def __getitem__(self, index: slice) -> ReadInputs: ...
    def __getitem__(self, index: int | slice) -> RowInputs | ReadInputs | None:
        if isinstance(index, slice):
            return ReadInputs(self._reader, self._rows[index])
        row = self._rows[index]
        return self._reader.encode(row.messages, row.images)[1] if row.images and row.inputs is None else row.inputs

    def __len__(self) -> int:
        return len(self._rows)

    def select(self, indices: Sequence[int]) -> ReadInputs:
        """Those at `indices`."""
        return ReadInputs(self._reader, [self._rows[i] for i in indices])


def opened(image: Any, number: int) -> Any:
    """The image in RGB: of a path, of the bytes of a file, of {"bytes": ..., "path": ...}, or an image of PIL's.

    Raises ValueError that names it by its `number` and path.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("images need pillow: pip install 'fppo[images]'") from error
    name = f"image {number}"
    if isinstance(image, Mapping):
        image = image.get("path") if image.get("bytes") is None else image["bytes"]
    try:
        if isinstance(image, (str, os.PathLike)):
            name = f"{name} ({os.fspath(image)})"
            return Image.open(Path(image)).convert("RGB")
        if isinstance(image, (bytes, bytearray)):
            return Image.open(io.BytesIO(image)).convert("RGB")
        if isinstance(image, Image.Image):
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: a broken PNG
        raise ValueError(f"{name}: {error}") from error
    raise ValueError(f"{name}: a {type(image).__name__}, not a path, bytes or an image")


def _filled(part: Mapping[str, Any], pictures: Iterator[Any]) -> dict[str, Any]:
    return {"type": "image", "image": next(pictures)} if part["type"] == "image" else dict(part)


def _by_image(name: str, x: Any, rows: bool) -> Tensor:
    """A tensor of one row whose first dimension runs over images or patches, where that of a processor is of rows."""
    if not isinstance(x, Tensor):
        raise ValueError(f"the processor gives {name} as {type(x).__name__}, not as one tensor")
    return x[0] if rows else x


def _shown(pictures: Sequence[Any]) -> Tensor:
    """The images [K, h, w, 3], small, each in a corner of a frame as large as the largest of them."""
    small = []
    for picture in pictures:
        scale = min(1.0, SHOWN / max(picture.size))
        small.append(picture.resize([max(1, math.floor(size * scale)) for size in picture.size]))
    width, height = (max(picture.size[d] for picture in small) for d in (0, 1))
    frames = torch.full((len(small), height, width, 3), 255, dtype=torch.uint8)
    for frame, picture in zip(frames, small, strict=True):
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        frame[: picture.size[1], : picture.size[0]] = pixels.view(picture.size[1], picture.size[0], 3)
    return frames
