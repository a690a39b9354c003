"""Prompts with videos: what they are read from, which frames are picked, where they stand, and what is refused."""

import base64
import importlib.util
import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from fppo import data
from fppo.data.images import FRAMES, ImageReader, opened
from fppo.data.videos import FramePicker, opened_video
from tests.data import rows
from tests.data.processors import processor, video_processor

QWEN2, QWEN3 = (ImageReader(video_processor(name), 3, video=4, fps=4) for name in ("qwen2_5_vl", "qwen3_vl"))
FIELDS, VIDEOS = data.Fields(chat=True, images="images", videos="videos"), data.Fields(chat=True, videos="videos")
ALL = FramePicker(QWEN3.processor.video_processor, fps=4)


def clip(seed: int, frames: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (frames, 16, 8, 3), dtype=np.uint8)


def images(frames: np.ndarray) -> list[Image.Image]:
    return [Image.fromarray(frame) for frame in frames]


def moving(frames: np.ndarray, kind: str) -> bytes:
    file, (first, *others) = io.BytesIO(), images(frames)
    first.save(
        file, kind, save_all=True, append_images=others, duration=250, **({"lossless": True} if kind == "WEBP" else {})
    )
    return file.getvalue()


def encoded(values, reader=QWEN2, fields=FIELDS, **keywords):
    named = data.rows_of([{"answer": "1", **value} for value in values], "mine:rows")
    return data.encode_rows(named, reader.processor.tokenizer, fields=fields, images=reader, **keywords)


def test_frames_arrays_directories_and_moving_images_give_the_same(tmp_path):
    frames = clip(0, 12)
    (tmp_path / "frames").mkdir()
    for number, image in enumerate(images(frames)):
        image.save(tmp_path / "frames" / f"f{number}.png")
    (tmp_path / "x.webp").write_bytes(moving(frames, "WEBP"))
    paths = [str(tmp_path / "frames" / f"f{number}.png") for number in range(12)]
    kinds = [
        frames,
        torch.from_numpy(frames),
        images(frames),
        [*frames],
        paths,
        {"frames": frames, "fps": 4},
        str(tmp_path / "frames"),
        str(tmp_path / "x.webp"),
        {"bytes": moving(frames, "PNG"), "path": None},
        moving(frames, "PNG"),
    ]
    found = [opened_video(kind, 1, ALL, opened) for kind in kinds]
    assert all(np.array_equal(x.frames, frames) for x in found)
    assert {x[1:] for x in found} == {(tuple(range(12)), 12, 4.0)}
    path = rows.write(tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "1", "videos": ["frames", "x.webp"]}])
    of_file = data.load_prompts(path, QWEN3.processor.tokenizer, fields=VIDEOS, images=QWEN3)
    pixels = of_file.inputs[0].tensors["pixel_values_videos"]
    assert torch.equal(*pixels.chunk(2))
    first = pixels[0].view(3, 2, 4, 4)  # of the first two frames, a corner
    assert torch.equal(first, torch.from_numpy(frames[:2, :4, :4]).permute(3, 0, 1, 2).float() / 255 - 0.5)
    for shape in ((2, 8, 8, 1), (2, 8, 8, 4)):
        assert opened_video(np.zeros(shape, np.uint8), 1, ALL, opened).frames.shape == (2, 8, 8, 3)


@pytest.mark.parametrize(
    ("fps", "count", "given", "picked"),
    [
        (None, None, 8, (0, 6, 11)),  # the processor's own two a second, of 12 frames in 1.5 seconds: three
        (4, None, 8, (0, 2, 4, 7, 9, 11)),
        (4, None, None, tuple(range(12))),  # four a second they are already
        (None, 5, 8, (0, 3, 6, 8, 11)),
        (None, 5, None, (0, 3, 6, 8, 11)),
        (None, 20, 8, tuple(range(12))),
    ],
)
def test_the_processor_picks_frames(fps, count, given, picked):
    picker = FramePicker(QWEN3.processor.video_processor, fps, count)
    found = opened_video({"frames": clip(1, 12), "fps": given}, 1, picker, opened)
    assert found.indices == picked
    assert np.array_equal(found.frames, clip(1, 12)[list(picked)])
    assert (found.total, found.fps) == (12, given or fps or 2)


def test_videos_stand_where_the_prompt_has_them_and_count_as_tokens():
    two, one = [clip(1), images(clip(2, 2))], [Image.fromarray(clip(3)[0])]
    parts = [
        {"type": "text", "text": "a"},
        {"type": "video"},
        {"type": "image"},
        {"type": "text", "text": "b"},
        {"type": "video"},
    ]
    values = [
        {"prompt": [{"role": "user", "content": "a<video><image>b<video>"}], "videos": two, "images": one},
        {"prompt": [{"role": "user", "content": parts}], "videos": two, "images": one},
        {"prompt": "ab", "videos": clip(1), "images": one},
        {"prompt": "ab", "videos": [clip(1)]},
        {"prompt": "ab", "images": None, "videos": []},
    ]
    for reader in (QWEN2, QWEN3):
        prompts = encoded(values, reader)
        marked, parted, before, alone, none = prompts.tokens
        assert marked == parted
        assert prompts.inputs[0] == prompts.inputs[1]
        assert prompts.inputs[4] is None
        inputs, ids = prompts.inputs[0], torch.tensor(marked)
        assert ids[inputs.places].tolist() == [3] * 2
        assert ids[inputs.video_places].tolist() == [4] * 6  # 2 by 1 for two frames each: 4 and 2
        assert inputs.tensors["video_grid_thw"].tolist() == [[2, 4, 2], [1, 4, 2]]
        assert int(inputs.video_places[3]) < int(inputs.places[0]) < int(inputs.video_places[4])
        assert inputs.shown_of.tolist() == [*[0] * FRAMES, 1, 2, 2]
        assert torch.equal(inputs.shown[:4, :16, :8], torch.from_numpy(clip(1)))
        assert (
            before.index(3)
            < before.index(4)
            < before.index(*reader.processor.tokenizer.convert_tokens_to_ids(["a"]), 9)
        )
        assert len(alone) == len(before) - 4  # an image of two tokens, and two beside it
        assert len(none) < len(alone)
    alone = values[3:4]
    times = QWEN3.processor.tokenizer.decode(encoded(alone, QWEN3, VIDEOS).tokens[0]).replace(" ", "")
    assert "<0.1seconds>" in times
    assert "<0.6seconds>" in times
    assert encoded(alone, fields=VIDEOS).inputs[0].tensors["second_per_grid_ts"].tolist() == [0.5]
    limit = len(encoded(alone, fields=VIDEOS).tokens[0])
    with pytest.raises(ValueError, match=f"mine:rows:1: the prompt has {limit} tokens"):
        encoded(alone, fields=VIDEOS, max_prompt_tokens=limit - 1)


def test_bad_videos_are_named_with_row_and_field(tmp_path, monkeypatch):
    Image.fromarray(clip(0)[0]).save(tmp_path / "still.png")
    (tmp_path / "x.mp4").write_bytes(b"no video")
    (tmp_path / "none").mkdir()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    frames = [Image.fromarray(clip(0)[0]), Image.new("RGB", (4, 4))]
    values = [
        {"prompt": "x", "videos": clip(0)},
        {"prompt": "x", "videos": str(tmp_path / "still.png")},
        {"prompt": "x", "videos": str(tmp_path / "x.mp4")},
        {"prompt": "x", "videos": [clip(0), str(tmp_path / "missing.mp4")]},
        {"prompt": "x", "videos": str(tmp_path / "none")},
        {"prompt": "x", "videos": [frames]},
        {"prompt": "x", "videos": clip(0).astype(np.float32)},
        {"prompt": "x", "videos": {"frames": clip(0), "fps": 0}},
        {"prompt": "x", "videos": 5},
        {"prompt": "<video> and <video>", "videos": clip(0)},
        {"prompt": [{"role": "user", "content": [{"type": "sound"}]}], "videos": clip(0)},
    ]
    with pytest.raises(ValueError) as caught:
        encoded(values, fields=VIDEOS)
    lines = str(caught.value)
    for text in (
        "mine:rows:2: field 'videos': video 1 (",
        "still.png): one image; give the frames of a video as a list in the list",
        "x.mp4): no library to read video files is installed: pip install 'fppo[videos]'",
        "mine:rows:4: field 'videos': video 2 (",
        "missing.mp4): [Errno 2] No such file",
        "mine:rows:5: field 'videos': video 1 (",
        "mine:rows:6: field 'videos': video 1: frames of several sizes: 8 by 16 and 4 by 4 (frame 2)",
        "mine:rows:7: field 'videos': video 1: an array [4, 16, 8, 3] of float32, not [T, H, W, C] of uint8",
        "mine:rows:8: field 'videos': video 1: fps = 0: give a number above 0",
        "mine:rows:9: field 'videos': video 1: a int, not a path",
        "mine:rows:10: field 'videos': 1 videos, and the prompt has 2 placeholders for them (<video>)",
        "mine:rows:11: field 'prompt': message 0 has a part that is neither video nor text",
    ):
        assert text in lines
    assert "mine:rows:1:" not in lines


def test_videos_of_the_datasets_library_are_read(tmp_path):
    import datasets

    (tmp_path / "x.webp").write_bytes(moving(clip(0), "WEBP"))
    table = datasets.Dataset.from_dict({"prompt": ["ab"], "answer": ["1"], "videos": [str(tmp_path / "x.webp")]})
    table.cast_column("videos", datasets.Video()).save_to_disk(str(tmp_path / "saved"))
    prompts = data.load_prompts(tmp_path / "saved", QWEN2.processor.tokenizer, fields=VIDEOS, images=QWEN2)
    assert prompts.inputs[0] == encoded([{"prompt": "ab", "videos": clip(0)}], fields=VIDEOS).inputs[0]


def test_frames_of_a_decoder_have_their_colours_last():
    """torchcodec's decoders give tensors [T, 3, H, W]."""
    frames, asked = clip(4, 6), []

    def get_frames_at(numbers):
        asked.append(numbers)
        return SimpleNamespace(data=torch.from_numpy(frames[numbers]).permute(0, 3, 1, 2))

    decoder = SimpleNamespace(get_frames_at=get_frames_at, metadata=SimpleNamespace(num_frames=6, average_fps=2.0))
    found = opened_video(decoder, 1, FramePicker(QWEN3.processor.video_processor, None, 3), opened)
    assert (found.total, found.fps, asked) == (6, 2.0, [[*found.indices]])
    assert len(found.indices) == 3
    assert np.array_equal(found.frames, frames[[*found.indices]])


def test_text_that_stands_for_a_video_is_refused():
    with pytest.raises(
        ValueError, match=r"rows:1: .* the text holds \['<\|video_pad\|>'\], placeholders of images or v"
    ):
        encoded([{"prompt": "a literal <|video_pad|>"}, {"prompt": "x", "videos": clip(0)}], fields=VIDEOS)


def test_what_reads_no_videos_is_refused():
    with pytest.raises(ValueError, match="LlavaProcessor reads no videos"):
        encoded(
            [{"prompt": "x", "videos": clip(0)}],
            ImageReader(processor("llava"), 3),
            data.Fields(chat=True, videos="videos"),
        )
    with pytest.raises(ValueError, match="no row has videos in the field 'videos'"):
        encoded([{"prompt": "x", "images": images(clip(0))[0]}])
    with pytest.raises(ValueError, match="frames are picked by one of them"):
        FramePicker(None, 2.0, 4)
    unknown = FramePicker(type("Reader", (), {"do_sample_frames": True})())
    with pytest.raises(ValueError, match="video 1: its frames have no times"):
        opened_video(clip(0), 1, unknown, opened)


def write_mp4(path, frames: np.ndarray) -> None:
    av = pytest.importorskip("av", reason="no library that reads video files is installed here")
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 64, 48, "yuv420p", 4_000_000
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)


def test_a_file_is_decoded_where_a_library_is(tmp_path, monkeypatch):
    grey = np.linspace(20, 220, 16).astype(np.uint8)
    frames = np.broadcast_to(grey[:, None, None, None], (16, 48, 64, 3)).copy()
    write_mp4(tmp_path / "x.mp4", frames)
    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: plain(name) if name == "av" else None)
    for video in (str(tmp_path / "x.mp4"), (tmp_path / "x.mp4").read_bytes()):
        found = opened_video(video, 1, ALL, opened)
        assert (found.total, found.fps) == (16, 8.0)
        assert found.indices == (0, 2, 4, 6, 9, 11, 13, 15)  # four of the eight in each second
        assert np.abs(found.frames.mean((1, 2, 3)) - grey[list(found.indices)]).max() < 6
    (tmp_path / "torn.mp4").write_bytes((tmp_path / "x.mp4").read_bytes()[:200])
    with pytest.raises(ValueError, match=r"video 1 \(.*torn.mp4\): "):
        opened_video(str(tmp_path / "torn.mp4"), 1, ALL, opened)


class Frames:
    """A processor that makes images of frames, as SmolVLM's, of words that are numbers."""

    tokenizer, video_processor = QWEN3.processor.tokenizer, QWEN3.processor.video_processor

    def apply_chat_template(self, conversation, *, tokenize, **others):
        if not tokenize:
            return ""
        kinds = [part["type"] for message in conversation for part in message["content"]]
        videos = [part["video"] for message in conversation for part in message["content"] if "video" in part]
        pixels = torch.stack([torch.from_numpy(x).permute(0, 3, 1, 2) for x in videos])
        assert others["processor_kwargs"]["do_sample_frames"] is False
        ids = torch.tensor([[7, *[3] * pixels[:, :, 0, 0, 0].numel(), *[8] * len(kinds)]])
        return {"input_ids": ids, "pixel_values": pixels, "pixel_attention_mask": torch.ones_like(pixels[:, :, 0])}


def test_a_processor_may_make_images_of_frames():
    reader = ImageReader(Frames(), 3, fps=4)
    parts = [{"type": "video"}, {"type": "video"}]
    tokens, inputs = reader.encode([{"role": "user", "content": parts}], [], [clip(0), clip(1)])
    assert tokens == [7, *[3] * 8, 8, 8]
    assert inputs.places.tolist() == [*range(1, 9)]
    assert not len(inputs.video_places)
    frames = np.concatenate([clip(0), clip(1)])
    assert torch.equal(inputs.tensors["pixel_values"], torch.from_numpy(frames).permute(0, 3, 1, 2))
    with pytest.raises(ValueError, match="a prompt has images, or videos, and not both"):
        reader.encode(
            [{"role": "user", "content": [*parts, {"type": "image"}]}], images(clip(0)[:1]), [clip(0), clip(1)]
        )


def test_a_clip_says_what_it_is_of():
    found = opened_video(
        {"frames": clip(1, 12), "fps": 8}, 1, FramePicker(QWEN3.processor.video_processor, None, 5), opened
    )
    assert found.metadata == {
        "total_num_frames": 12,
        "fps": 8.0,
        "duration": 1.5,
        "frames_indices": [0, 3, 6, 8, 11],
        "height": 16,
        "width": 8,
    }


@pytest.mark.parametrize("fps", [True, "4", 0, -1.0, float("nan"), [4]])
def test_frames_in_a_second_are_a_number_above_0(fps):
    with pytest.raises(ValueError, match=r"video 2: fps = .*: give a number above 0"):
        opened_video({"frames": clip(0, 2), "fps": fps}, 2, ALL, opened)


def test_a_frame_that_cannot_be_opened_is_named_by_its_number():
    frames = [*images(clip(0, 2)), "gone.png"]
    with pytest.raises(ValueError, match=r"video 4: image 3 \(gone\.png\): "):
        opened_video(frames, 4, ALL, opened)
    frames[2] = images(clip(0, 2))[0].resize((4, 4))
    with pytest.raises(ValueError, match=r"video 4: frames of several sizes: 8 by 16 and 4 by 4 \(frame 3\)"):
        opened_video(frames, 4, ALL, opened)


def test_files_of_a_directory_are_frames_by_number_but_for_hidden_ones(tmp_path):
    frames = clip(2, 12)
    for number, image in enumerate(images(frames)):
        image.save(tmp_path / f"frame {number}.png")
    (tmp_path / ".DS_Store").write_bytes(b"hidden")
    found = opened_video(tmp_path, 1, ALL, opened)
    assert np.array_equal(found.frames, frames)


@pytest.mark.parametrize(("durations", "fps"), [([250, 250, 500], 3.0), ([250, 0, 250], 4.0)])
def test_frames_of_a_moving_image_have_times_where_all_have_one(durations, fps):
    """Frames without times count as sampled already, at the rate that is asked for."""
    file, (first, *others) = io.BytesIO(), images(clip(3, 3))
    first.save(file, "PNG", save_all=True, append_images=others, duration=durations)
    found = opened_video(file.getvalue(), 1, FramePicker(QWEN3.processor.video_processor, None, 3), opened)
    if 0 in durations:
        found = opened_video(file.getvalue(), 1, ALL, opened)
    assert (found.total, found.fps, found.indices) == (3, fps, (0, 1, 2))


def test_a_processor_is_told_of_the_whole_video_and_of_what_is_asked_for():
    told = []

    def sample_frames(metadata, **keywords):
        told.append((metadata.total_num_frames, metadata.fps, metadata.duration, keywords))
        return np.array([0, 5])

    reader = SimpleNamespace(sample_frames=sample_frames, do_sample_frames=True, fps=2)
    assert FramePicker(reader, 3.0).pick(12, 8.0) == ((0, 5), 8.0)
    assert FramePicker(reader, None, 7).pick(12, None) == ((0, 5), 2.0)
    assert told == [(12, 8.0, 1.5, {"fps": 3.0, "num_frames": None}), (12, 2.0, 6.0, {"fps": None, "num_frames": 7})]


def test_a_processor_that_samples_no_frames_gets_all_of_them():
    reader = SimpleNamespace(sample_frames=None, do_sample_frames=False, fps=2)
    assert FramePicker(reader).pick(12, 8.0) == (tuple(range(12)), 8.0)


def test_a_video_may_be_text_in_base64_and_what_is_none_is_named_in_short():
    frames = clip(3)
    file = moving(frames, "GIF")
    text = base64.b64encode(file).decode()
    expected = opened_video(file, 1, ALL, opened).frames
    for value in (text, f"data:video/gif;base64,{text}", {"bytes": text}, {"frames": text, "fps": 2}):
        assert np.array_equal(opened_video(value, 1, ALL, opened).frames, expected)
    each = [base64.b64encode(_png(image)).decode() for image in images(frames)]
    assert np.array_equal(opened_video(each, 1, ALL, opened).frames, frames)
    for wrong in (
        text[:60],
        "data:video/mp4," + "x" * 700_000,
        "no path " * 90_000,
        base64.b64encode(b"no" * 10**5).decode(),
    ):
        with pytest.raises(ValueError, match=r"video 2[ :]") as found:
            opened_video(wrong, 2, ALL, opened)
        assert len(str(found.value)) < 900


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
