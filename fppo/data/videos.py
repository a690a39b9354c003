"""Videos of prompts: opened from files, directories, frames or arrays; the model's processor picks the frames."""

from __future__ import annotations

import importlib.util
import io
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
from torch import Tensor

from fppo._errors import printable, shown
from fppo.data.plain import file_of, irregular, named_file

DECODERS = {"pyav": "av", "torchcodec": "torchcodec", "opencv": "cv2", "decord": "decord"}  # as transformers names them
_CHANNELS = (1, 3, 4)


class Clip(NamedTuple):
    """The frames of a video for a model, with their indices."""

    frames: np.ndarray  # [T, H, W, 3] uint8
    indices: tuple[int, ...]  # of the T frames, among all
    total: int  # frames of the video
    fps: float  # frames of the video in a second

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the frames for transformers' processors."""
        height, width = self.frames.shape[1:3]
        return {
            "total_num_frames": self.total,
            "fps": self.fps,
            "duration": self.total / self.fps,
            "frames_indices": list(self.indices),
            "height": height,
            "width": width,
        }


class _OpenVideo(NamedTuple):
    """An opened video of `total` frames. `fps` is None without times of frames."""

    total: int
    fps: float | None
    read: Callable[[Sequence[int]], np.ndarray]  # the frames of these numbers


@attrs.frozen
class FramePicker:
    """Sample a video's frames for a model, by its processor.

    processor: transformers' video processor of the model.
    fps: frames per second of the video; frames without times (lists, arrays, directories) count as sampled at this
        rate already. None: the processor's own rate.
    frames: frames of the whole video, or all if it has fewer; None: as `fps` gives.

    Raises ValueError if both are given.
    """

    processor: Any
    fps: float | None = None
    frames: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.fps is not None and self.frames is not None:
            raise ValueError(f"fps = {self.fps} and frames = {self.frames}: frames are picked by one of them")

    def clip(self, source: _OpenVideo) -> Clip:
        """Read the picked frames of a video."""
        indices, fps = self.pick(source.total, source.fps)
        return Clip(source.read(indices), indices, source.total, fps)

    def pick(self, total: int, fps: float | None) -> tuple[tuple[int, ...], float]:
        """The indices of the picked frames of `total`, and the video's frames per second: `fps` if known. Raises
        ValueError if nothing gives one."""
        every = fps or self.fps or getattr(self.processor, "fps", None)
        if every is None:
            raise ValueError("its frames have no times, and the processor no fps: give fps (data.video_fps)")
        by_time = fps is not None and (self.fps is not None or self.processor.do_sample_frames)
        if total <= (self.frames or 1) or not (by_time or self.frames is not None):
            return tuple(range(total)), float(every)
        from transformers.video_utils import VideoMetadata

        metadata = VideoMetadata(total_num_frames=total, fps=float(every), duration=total / every)
        picked = self.processor.sample_frames(metadata=metadata, fps=self.fps, num_frames=self.frames)
        return tuple(int(i) for i in picked), float(every)


def opened_video(video: Any, number: int, picker: FramePicker, frame: Callable[[Any, int], Any]) -> Clip:
    """Open a video and pick its frames: from a file's path, bytes, base64 or data: URL, {"bytes": ..., "path": ...}, a
    directory of images, a list of images, an array [T, H, W, C] in uint8, {"frames": list or array, "fps": ...}, or a
    decoder of the datasets library. `frame(image, number)` opens an image in RGB.

    Raises ValueError that names the video by its `number` and path.
    """
    name = f"video {number}"
    try:
        file = video if isinstance(video, Mapping) and "frames" in video else file_of(video)
        name += named_file(video, file)
        return picker.clip(_source(file, picker, frame))
    except Exception as error:  # decoders and processors raise any exception
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{name}: {printable(text, 500)}") from error


def _source(video: Any, picker: FramePicker, frame: Callable[[Any, int], Any]) -> _OpenVideo:
    if isinstance(video, Mapping):
        fps = video.get("fps")
        if fps is not None and (isinstance(fps, bool) or not isinstance(fps, (int, float)) or not fps > 0):
            raise ValueError(f"fps = {shown(fps)}: give a number above 0")
        return _source(file_of(video["frames"]), picker, frame)._replace(fps=None if fps is None else float(fps))
    if isinstance(video, Path):
        if (wrong := irregular(video)) is not None:
            raise ValueError(wrong)
        if video.is_dir():
            return _images(sorted((x for x in video.iterdir() if not x.name.startswith(".")), key=_by_number), frame)
        return _animation(video) or _decoded(video, picker)
    if isinstance(video, bytes):
        return _animation(io.BytesIO(video)) or _decoded(video, picker)
    if isinstance(video, (list, tuple)):
        return _images(video, frame)
    if hasattr(video, "get_frames_at"):  # a torchcodec decoder, as datasets' Video gives
        total, fps = video.metadata.num_frames, video.metadata.average_fps
        return _OpenVideo(total, fps, lambda picked: _plain(video.get_frames_at(list(picked)).data))
    if getattr(video, "ndim", None) == 4:
        frames = _array(video)
        return _OpenVideo(len(frames), None, lambda picked: frames[list(picked)])
    raise ValueError(f"a {type(video).__name__}, not a path, bytes, images or an array of four dimensions")


def _by_number(path: Path) -> list[tuple[int, str]]:
    """A sort key with numbers in file names by value: frame 2 before frame 10."""
    return [(int(x), "") if x.isdigit() else (0, x) for x in re.split(r"(\d+)", path.name)]


def _array(video: Any) -> np.ndarray:
    frames = np.asarray(video)
    if frames.dtype != np.uint8 or frames.shape[3] not in _CHANNELS or not len(frames):
        raise ValueError(
            f"an array {list(frames.shape)} of {frames.dtype}, not [T, H, W, C] of uint8 with a C of {_CHANNELS}"
        )
    return np.repeat(frames, 3, 3) if frames.shape[3] == 1 else frames[..., :3]


def _images(frames: Sequence[Any], frame: Callable[[Any, int], Any]) -> _OpenVideo:
    """A video of images as frames, all of the first's size."""
    if not frames:
        raise ValueError("no frames")

    def one(number: int) -> Any:
        if getattr(frames[number], "ndim", None) == 3:
            return _array(np.asarray(frames[number])[None])[0]
        return np.asarray(frame(frames[number], number + 1))

    def read(picked: Sequence[int]) -> np.ndarray:
        opened = [one(number) for number in picked]
        for number, image in zip(picked, opened, strict=True):
            if image.shape != opened[0].shape:
                sizes = " and ".join(f"{x.shape[1]} by {x.shape[0]}" for x in (opened[0], image))
                raise ValueError(f"frames of several sizes: {sizes} (frame {number + 1})")
        return np.stack(opened)

    return _OpenVideo(len(frames), None, read)


def _animation(file: Path | io.BytesIO) -> _OpenVideo | None:
    """The frames of an animated GIF, PNG or WebP; None for formats unknown to PIL. Raises ValueError for a still."""
    from PIL import Image, ImageSequence, UnidentifiedImageError

    try:
        image = Image.open(file)
    except UnidentifiedImageError:
        return None
    if image.format == "MPEG":  # PIL identifies MPEG, but cannot read it
        return None
    with image:
        frames, times = [], []
        for one in ImageSequence.Iterator(image):
            frames.append(np.asarray(one.convert("RGB")))
            times.append(one.info.get("duration") or 0)  # milliseconds
    if len(frames) == 1:
        raise ValueError("one image; give the frames of a video as a list in the list of videos, or their directory")
    known = all(time > 0 for time in times)
    fps = 1000 * len(frames) / sum(times) if known else None
    return _OpenVideo(len(frames), fps, lambda picked: np.stack([frames[i] for i in picked]))


def _decoded(video: Path | bytes, picker: FramePicker) -> _OpenVideo:
    """A video file read by a decoder library: its picked frames at once, since decoders sample while they read."""
    if isinstance(video, Path) and not video.is_file():
        raise FileNotFoundError(f"[Errno 2] No such file or directory: '{video}'")
    backend = next((name for name, module in DECODERS.items() if importlib.util.find_spec(module) is not None), None)
    if backend is None:
        raise ValueError(
            "no library to read video files is installed: pip install 'fppo[videos]' (PyAV), or torchcodec, "
            "opencv-python-headless or decord"
        )
    from transformers.video_utils import VIDEO_DECODERS

    kept: list[tuple[int, float | None]] = []

    def sample(metadata: Any, **_: Any) -> np.ndarray:
        kept.append((metadata.total_num_frames or 0, float(metadata.fps) if metadata.fps else None))
        if not kept[0][0]:
            raise ValueError("the file does not say how many frames it has, as webm and mkv may not: make it mp4")
        return np.array(picker.pick(*kept[0])[0])

    with tempfile.NamedTemporaryFile(suffix=".video") as file:
        if isinstance(video, bytes):
            file.write(video)
            file.flush()
        frames, _ = VIDEO_DECODERS[backend](str(video) if isinstance(video, Path) else file.name, sample)
    (total, fps), plain = kept[0], _plain(frames)
    return _OpenVideo(total, fps, lambda picked: _whole(plain, picked))


def _whole(frames: np.ndarray, picked: Sequence[int]) -> np.ndarray:
    if len(frames) != len(picked):
        raise ValueError(f"{len(picked)} frames were picked, but {len(frames)} read: the file ends early")
    return frames


def _plain(frames: Any) -> np.ndarray:
    """Frames [T, H, W, 3] from a decoder's output: an array, or a tensor [T, 3, H, W]."""
    return frames.permute(0, 2, 3, 1).numpy() if isinstance(frames, Tensor) else np.asarray(frames)
