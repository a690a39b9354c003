"""Prompts with images and videos: opened from paths, bytes or `datasets` images, encoded by the model's processor."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import attrs
import torch
from torch import Tensor

from fppo._errors import printable
from fppo.batch import RowInputs
from fppo.data.chat import PLAIN, ChatOptions, ending, shown_chat
from fppo.data.plain import file_of, irregular, named_file
from fppo.data.videos import Clip, FramePicker, opened_video

SHOWN = 96  # pixels, the longer side of a thumbnail next to samples
FRAMES = 4  # thumbnails of a video
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")  # a processor's outputs for tokens


@attrs.frozen
class ImageReader:
    """Encode messages with images and videos into tokens and model inputs.

    processor: transformers' processor of the model, with a chat template.
    token: the placeholder id of each image feature in prompts (`Vision.token`).
    video: the placeholder id of each video feature (`Vision.video`); None: the processor turns frames into images.
    fps, frames: the selection of a video's frames, as in `FramePicker`.
    """

    processor: Any
    token: int
    chat: ChatOptions = PLAIN
    video: int | None = None
    fps: float | None = None
    frames: int | None = None

    def encode(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any], videos: Sequence[Any] = ()
    ) -> tuple[list[int], RowInputs | None]:
        """The tokens of the conversation up to the assistant's turn, and the inputs of its images and videos.

        The messages' contents are lists of parts, with a part {"type": "image"} for each of the images and
        {"type": "video"} for each of the videos. Raises ValueError for values that are no image or video, and for
        text with the processor's placeholders; processors and chat templates raise any exception.
        """
        pictures = [opened(image, number) for number, image in enumerate(images, start=1)]
        clips = self._clips(videos)
        self._check_text(messages)
        left: dict[str, Iterator[Any]] = {"image": iter(pictures), "video": iter(clips)}
        items: list[Any] = []  # pictures and clips in the order of the prompt
        shown = shown_chat(self.processor, messages, generation=True, options=self.chat).messages
        conversation = [
            {**message, "content": [_filled(part, left, items) for part in message["content"]]} for message in shown
        ]
        beside = {"video_metadata": [[clip.metadata for clip in clips]], "do_sample_frames": False} if clips else {}
        with ending():
            out = self.processor.apply_chat_template(
                conversation,
                tools=[dict(tool) for tool in self.chat.tools] or None,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                add_generation_prompt=True,
                processor_kwargs=beside,
                **self.chat.arguments,
            )
        tokens: Tensor = out["input_ids"][0]
        places, video_places = self._places(tokens, len(pictures), len(clips))
        if not items:
            return tokens.tolist(), None
        if pictures and clips and "pixel_values_videos" not in out:
            raise ValueError("the processor makes images of videos: a prompt has images, or videos, and not both")
        rows = "pixel_attention_mask" in out  # Idefics 3, SmolVLM: rows of images
        tensors = {name: _by_image(name, x, rows) for name, x in out.items() if name not in _TEXT}
        shown, shown_of = _shown(items)
        return tokens.tolist(), RowInputs(tensors, places, shown, video_places, shown_of)

    def joined(self, parts: Sequence[Sequence[int] | bytes]) -> tuple[list[int], RowInputs | None]:
        """Concatenate parts, each token ids or the bytes of an image file; return the tokens and the images' inputs.

        An image adds the tokens from its first to its last placeholder; tokens around these must be given as ids.
        Raises ValueError for bytes that are no image, for placeholders among ids, and for a processor that reads images
        together otherwise than one by one; processors raise any exception.
        """
        pictures = [opened(each, n) for n, each in enumerate((x for x in parts if isinstance(x, bytes)), start=1)]
        if any(self.token in part or self.video in part for part in parts if not isinstance(part, bytes)):
            raise ValueError(f"the tokens hold {self.token}, a placeholder of images: give the image in its place")
        if not pictures:
            return [token for part in parts for token in part], None
        each = [self._processed([picture])[0] for picture in pictures]
        _, out = self._processed(pictures)
        left, tokens = iter(each), list[int]()
        for part in parts:
            tokens += next(left) if isinstance(part, bytes) else part
        places = (torch.tensor(tokens) == self.token).nonzero()[:, 0]
        whole = int((out["input_ids"] == self.token).sum())
        if whole != len(places):
            raise ValueError(f"{whole} placeholders of all images, and {len(places)} of each alone")
        rows = "pixel_attention_mask" in out
        tensors = {name: _by_image(name, x, rows) for name, x in out.items() if name not in _TEXT}
        shown, shown_of = _shown(pictures)
        return tokens, RowInputs(tensors, places, shown, shown_of=shown_of)

    def _processed(self, pictures: Sequence[Any]) -> tuple[list[int], Mapping[str, Any]]:
        """The tokens from the first to the last placeholder of some images, and the processor's outputs for them."""
        out = self.processor(text=[self.processor.image_token * len(pictures)], images=[*pictures], return_tensors="pt")
        tokens: list[int] = out["input_ids"][0].tolist()
        places = [place for place, token in enumerate(tokens) if token == self.token]
        if not places:
            raise ValueError(f"the processor gives {len(pictures)} images no placeholder (token {self.token})")
        return tokens[places[0] : places[-1] + 1], out

    def _clips(self, videos: Sequence[Any]) -> list[Clip]:
        if not videos:
            return []
        reader = getattr(self.processor, "video_processor", None)
        if reader is None:
            raise ValueError(f"{type(self.processor).__name__} reads no videos")
        picker = FramePicker(reader, self.fps, self.frames)
        return [opened_video(video, number, picker, opened) for number, video in enumerate(videos, start=1)]

    def _places(self, tokens: Tensor, pictures: int, clips: int) -> tuple[Tensor, Tensor]:
        """The indices of the features of so many images, and of so many videos, among tokens [S]; int64 each."""
        apart = self.video is not None
        expected = {self.token: pictures + (0 if apart else clips)} | ({self.video: clips} if apart else {})
        kinds = dict(zip(expected, ("images", "videos")))
        found = {token: (tokens == token).nonzero()[:, 0] for token in expected}
        for token, count in expected.items():
            if bool(len(found[token])) != bool(count):
                raise ValueError(f"{count} {kinds[token]}, but {len(found[token])} placeholder tokens (token {token})")
        return found[self.token], found.get(self.video, torch.zeros(0, dtype=torch.int64))  # type: ignore[arg-type]

    def _check_text(self, messages: Sequence[Mapping[str, Any]]) -> None:
        names = ("image_token", "boi_token", "video_token", "image_token_text")
        marks = [mark for name in names if isinstance(mark := getattr(self.processor, name, None), str)]
        ids = [token for token in (self.token, self.video) if token is not None]
        marks += self.processor.tokenizer.convert_ids_to_tokens(ids)
        texts = [part["text"] for message in messages for part in message["content"] if part["type"] == "text"]
        if wrong := sorted({mark for mark in marks for text in texts if mark and mark in text}):
            raise ValueError(f"the text holds {wrong}, placeholders of images or videos: leave them out of texts")


class ReadRow(NamedTuple):
    """A prompt's messages, images and videos, and their processed inputs if these are kept."""

    messages: Sequence[Mapping[str, Any]]
    images: Sequence[Any]
    videos: Sequence[Any]
    inputs: RowInputs | None


class ReadInputs(Sequence["RowInputs | None"]):
    """The inputs of each prompt, kept or read again at each access: the pixels of large data sets exceed memory."""

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
        if row.inputs is not None or not (row.images or row.videos):
            return row.inputs
        return self._reader.encode(row.messages, row.images, row.videos)[1]

    def __len__(self) -> int:
        return len(self._rows)

    def select(self, indices: Sequence[int]) -> ReadInputs:
        """The inputs of the prompts at `indices`, in that order."""
        return ReadInputs(self._reader, [self._rows[i] for i in indices])


def opened(image: Any, number: int) -> Any:
    """Open an image in RGB from a path, a file's bytes, these as base64 or a data: URL, {"bytes": ..., "path": ...}, or
    a PIL image, and turn it as its EXIF orientation says.

    Raises ValueError that names the image by its `number` and path.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ValueError("images need pillow: pip install 'fppo[images]'") from error
    name = f"image {number}"
    try:
        given, image = image, file_of(image)
        name += named_file(given, image)
        if isinstance(image, Path) and (wrong := irregular(image)) is not None:
            raise ValueError(wrong)
        file = io.BytesIO(image) if isinstance(image, bytes) else image
        found = Image.open(file) if isinstance(file, Path | io.BytesIO) else file
        if isinstance(found, Image.Image):
            return ImageOps.exif_transpose(found).convert("RGB")
    except Exception as error:  # readers of broken files raise any exception
        text = str(error).partition(" <_io.")[0] or type(error).__name__  # without the address of bytes
        raise ValueError(f"{name}: {printable(text, 500)}") from error
    raise ValueError(f"{name}: a {type(image).__name__}, not a path, bytes or an image")


def _filled(part: Mapping[str, Any], remaining: Mapping[str, Iterator[Any]], items: list[Any]) -> dict[str, Any]:
    """A message part in the processor's form, filled with the next image or video in `remaining`, also added to
    `items`."""
    kind = part["type"]
    if kind not in remaining:
        return dict(part)
    items.append(next(remaining[kind]))
    return {"type": kind, kind: items[-1].frames if isinstance(items[-1], Clip) else items[-1]}


def _by_image(name: str, x: Any, rows: bool) -> Tensor:
    """Check that a processor's output `x` is a tensor, and return it with images or patches as the first dimension.
    With `rows` the output has a dimension of rows, or of videos, before that one, and the two are joined."""
    if not isinstance(x, Tensor):
        raise ValueError(f"the processor gives {name} as {type(x).__name__}, not as one tensor")
    return x.flatten(0, 1) if rows else x


def _shown(items: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Thumbnails of the images and of `FRAMES` frames of each video, uint8 [K, h, w, 3], padded to the largest; and
    the number of each thumbnail's item, int64 [K]."""
    from PIL import Image

    small, numbers = [], []
    for number, item in enumerate(items):
        few = [Image.fromarray(item.frames[i]) for i in _spread(len(item.frames))] if isinstance(item, Clip) else [item]
        for picture in few:
            scale = min(1.0, SHOWN / max(picture.size))
            small.append(picture.resize([max(1, math.floor(size * scale)) for size in picture.size]))
            numbers.append(number)
    width, height = (max(picture.size[d] for picture in small) for d in (0, 1))
    frames = torch.full((len(small), height, width, 3), 255, dtype=torch.uint8)
    for frame, picture in zip(frames, small, strict=True):
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        frame[: picture.size[1], : picture.size[0]] = pixels.view(picture.size[1], picture.size[0], 3)
    return frames, torch.tensor(numbers)


def _spread(total: int) -> list[int]:
    """`FRAMES` evenly spaced numbers below `total`, first and last included; all if there are fewer."""
    count = min(FRAMES, total)
    return [i * (total - 1) // max(1, count - 1) for i in range(count)]
