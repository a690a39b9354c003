"""A run on prompts with images, from settings to the report; and what such a run is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPVisionConfig,
    Idefics3Config,
    LlamaConfig,
    LlavaConfig,
)

import fppo
from fppo import models
from fppo.assembly import texts
from fppo.assembly.checks import TRAIN
from fppo.assembly.inputs import Inputs
from fppo.commands import cli
from fppo.key import Key
from fppo.settings import checks, files
from fppo.settings.train import TrainSettings
from tests import tiny_run
from tests.data.processors import processor
from tests.models.vision import TEXT, TOWER


def write_task(directory: Path, name: str) -> None:
    """A model that knows nothing, and prompts with 0, 1 or 2 images."""
    own = processor(name)
    size = {**TEXT, "vocab_size": len(own.tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "eos_token_id": 1}
    ids = {"image_token_id": 3, "tie_word_embeddings": False}
    text = LlamaConfig(**{**size, "bos_token_id": None})
    if name == "llava":
        tower = CLIPVisionConfig(**TOWER)
        config = LlavaConfig(text_config=text, vision_config=tower, image_token_index=3, **ids)
    else:
        config = Idefics3Config(text_config=text.to_dict(), vision_config=TOWER, scale_factor=2, **ids)
    model = models.build(config)
    models.save(model, models.init_params(model, Key(0)), directory / "start", tokenizer=own)
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        rows = []
        for number in range(8):
            names = [f"{split}{number}_{i}.png" for i in range(number % 3)]
            for image in names:
                Image.fromarray(rng.integers(0, 255, (12, 20, 3), dtype=np.uint8)).save(directory / image)
            rows.append({"prompt": "<image>".join("ab c"[: len(names) + 1]), "answer": "1", "images": names})
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(directory: Path, *more: str) -> list[str]:
    return [
        "train",
        f"--output-dir={directory / 'run'}",
        "--steps=2",
        f"--model.path={directory / 'start'}",
        f"--data.path={directory / 'train.jsonl'}",
        f"--data.eval-path={directory / 'test.jsonl'}",
        "--data.chat",
        "--data.images=images",
        "--rollout.batch-size=8",
        "--rollout.n=2",
        "--rollout.max-tokens=3",
        "--reward.functions=exact_match",
        "--algorithm.kl.coef=0.01",
        "--actor.mini-batch-size=4",
        "--critic.mini-batch-size=4",
        "--log.loggers=jsonl",
        "--device=cpu",
        *more,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "idefics3"])
def test_a_run_trains_on_images_from_the_console(name, tmp_path, capsys):
    """Of LLaVA an adapter, which leaves the vision tower as it is; of Idefics 3 all weights."""
    write_task(tmp_path, name)
    adapted = ["--model.freeze-vision", "--model.lora.rank=2"] if name == "llava" else []
    cli.main(arguments(tmp_path, "--rollout.save", *adapted))
    run = tmp_path / "run"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 2
    shown = [images for images in fppo.open(run).arrow().column("images").to_pylist() if images is not None]
    assert any(len(images) == 2 for images in shown)
    assert all(frame.startswith(b"\x89PNG") for images in shown for frames in images for frame in frames)
    if adapted:
        assert cli.main(["export", str(run), str(tmp_path / "merged"), "--merge"]) == 0
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged" if adapted else run / "model")
    started = AutoModelForImageTextToText.from_pretrained(tmp_path / "start")
    moved = {path for (path, x), y in zip(exported.named_parameters(), started.parameters()) if not torch.equal(x, y)}
    assert any(("q_proj" if adapted else "lm_head") in path for path in moved)
    assert any("vision" in path for path in moved) == (name != "llava")
    assert type(AutoProcessor.from_pretrained(run / "model")) is type(processor(name))


REFUSED = {
    "data.chat": False,
    "data.over_long": "truncate",
    "critic.privileged": 4,
    "rollout.turns.respond": "mine:respond",
    "reward.model.path": "rm",
    "reward.judge.path": "judge",
}


def test_a_model_of_images_without_a_processor_of_them_is_refused(tmp_path, monkeypatch):
    """Where the files of one are missing, and where transformers gives the tokenizer in its place, as of types for
    which it knows no processor."""
    write_task(tmp_path, "llava")
    settings = tiny_run.settings(tmp_path, data__images="images", data__chat=True)
    assert texts.open_processor(settings.model, settings.data)[0].image_processor is not None
    (tmp_path / "start" / "processor_config.json").unlink()
    with pytest.raises(ValueError, match=r"data\.images = 'images': no processor of images came from .*start: OSError"):
        texts.open_processor(settings.model, settings.data)
    monkeypatch.setattr(AutoProcessor, "from_pretrained", AutoTokenizer.from_pretrained)
    with pytest.raises(ValueError, match=r"data\.images = 'images': .*start has no processor of images \(processor_c"):
        texts.open_processor(settings.model, settings.data)


@pytest.mark.slow
def test_what_images_do_not_go_with_is_refused_by_name(tmp_path):
    values = {"data.images": "images", "data.chat": True} | REFUSED
    problems = [*map(str, checks.problems(files.replace(TrainSettings(), values)))]
    for name in REFUSED:
        path = "data.images" if name == "data.chat" else name
        assert any(line.startswith(f"{path} = ") and "images" in line for line in problems), name
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path, data__images="images", data__chat=True, model__freeze_vision=True)
    with pytest.raises(files.SettingsError) as caught:
        Inputs(settings=settings).need(*TRAIN)
    assert "data.images = 'images': a model of type 'qwen2' takes no images" in str(caught.value)
    with pytest.raises(files.SettingsError, match="freeze_vision = True: a model of type 'qwen2' takes no images"):
        Inputs(settings=tiny_run.settings(tmp_path, model__freeze_vision=True)).need(*TRAIN)
    (tmp_path / "sees").mkdir()
    write_task(tmp_path / "sees", "idefics3")
    values = {"rollout__engine": "vllm", "rollout__vllm__host": "process", "rollout__vllm__tensor_parallel": 2}
    settings = tiny_run.settings(tmp_path / "sees", data__images="images", data__chat=True, **values)
    with pytest.raises(files.SettingsError, match=r"tensor_parallel = 2: not with .* images \('idefics3'\)"):
        Inputs(settings=settings).need(*TRAIN)
