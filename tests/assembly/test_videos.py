"""A run on prompts with videos, from settings to the report; and what such a run is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor, Qwen3VLConfig

import fppo
from fppo import models
from fppo.assembly.checks import TRAIN
from fppo.assembly.inputs import Inputs
from fppo.commands import cli
from fppo.key import Key
from fppo.settings import checks, files
from fppo.settings.train import TrainSettings
from tests import tiny_run
from tests.assembly.test_images import arguments
from tests.assembly.test_images import write_task as write_images
from tests.data.processors import processor, video_processor
from tests.models.vision import CONFIGS


def write_task(directory: Path) -> None:
    """A model that knows nothing, and prompts with a video, an image, both or neither."""
    own = video_processor("qwen3_vl")
    own.tokenizer.chat_template = own.chat_template
    config = CONFIGS["qwen3_vl"].to_dict()
    config["text_config"] |= {"vocab_size": len(own.tokenizer), "num_hidden_layers": 2, "eos_token_id": 1}
    ids = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    model = models.build(Qwen3VLConfig.from_dict(config | ids))
    models.save(model, models.init_params(model, Key(0)), directory / "start", tokenizer=own.tokenizer)
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        rows = []
        for number in range(8):
            frames = [Image.fromarray(x) for x in rng.integers(0, 255, (6, 8, 16, 3), dtype=np.uint8)]
            frames[0].save(directory / f"{split}{number}.png")
            name = f"{split}{number}.webp"
            frames[0].save(directory / name, save_all=True, append_images=frames[1:], duration=250, lossless=True)
            row = {"prompt": "a<video>b", "answer": "1", "videos": name, "images": None}
            if number % 4 == 1:
                row |= {"prompt": "a<image>b<video>", "images": f"{split}{number}.png"}
            elif number % 4 == 2:
                row |= {"prompt": "c", "videos": []}
            rows.append(row)
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_a_run_trains_on_videos_from_the_console(tmp_path, monkeypatch):
    write_task(tmp_path)
    own = video_processor("qwen3_vl")
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *_, **__: own)
    monkeypatch.setattr(type(own), "save_pretrained", lambda self, to, **_: self.tokenizer.save_pretrained(to))
    cli.main(arguments(tmp_path, "--data.videos=videos", "--data.video-fps=2", "--steps=1", "--rollout.save"))
    run = tmp_path / "run"
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1
    shown = [x for x in fppo.open(run).arrow().column("images").to_pylist() if x is not None]
    assert {tuple(len(frames) for frames in images) for images in shown} >= {(3,), (1, 3)}
    assert all(frame.startswith(b"\x89PNG") for images in shown for frames in images for frame in frames)


def test_settings_of_videos_that_do_not_fit_are_refused_by_name(tmp_path, monkeypatch):
    def problems(**values):
        settings = files.replace(TrainSettings(), {f"data.{name}": x for name, x in values.items()})
        return map(str, checks.problems(settings))

    for values, text in (
        ({"videos": "v"}, "data.videos = 'v': videos stand in chat messages: give data.chat = true"),
        ({"video_fps": 2.0}, "data.video_fps = 2.0: nothing reads it here: it is for data.videos"),
        ({"videos": "v", "chat": True, "video_fps": 2.0, "video_frames": 4}, "data.video_frames = 4: data.video_fps"),
        ({"videos": "v", "chat": True, "over_long": "truncate"}, "data.over_long = 'truncate': would cut videos apart"),
    ):
        assert any(line.startswith(text) for line in problems(**values)), text
    both = files.replace(
        TrainSettings(), {"data.videos": "v", "data.images": "i", "data.chat": True, "critic.privileged": 4}
    )
    text = "prompts with images and videos (data.images, data.videos) do not"
    assert any(text in problem.text for problem in checks.problems(both))
    write_images(tmp_path, "idefics3")
    settings = tiny_run.settings(tmp_path, data__videos="videos", data__chat=True)
    with pytest.raises(files.SettingsError, match="= 'videos': Idefics3Processor reads no videos"):
        Inputs(settings=settings).need(*TRAIN)
    own = processor("idefics3")
    own.video_processor = video_processor("qwen3_vl").video_processor
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *_, **__: own)
    with pytest.raises(files.SettingsError, match="fppo does not run a model of type 'idefics3' with videos"):
        Inputs(settings=settings).need(*TRAIN)
