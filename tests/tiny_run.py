"""A run on disk that is small enough for tests: a tiny model, its tokenizer, prompts, settings."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import Qwen3MoeConfig

from fppo import models
from fppo.key import Key
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.runs import sample_files
from fppo.settings import files, resolve
from fppo.settings.train import TrainSettings

NO_KL = {"algorithm__kl__coef": 0.0, "algorithm__kl__controller": "fixed", "algorithm__kl__horizon": 10000}


def write_task(directory: Path, *, rows: int = 24, layers: int = 1) -> None:
    """A model that knows nothing, and prompts like "3+4="."""
    tokenizer = character_tokenizer(CHARACTERS)
    model = small_model(len(tokenizer), width=16, layers=layers)
    models.save(model, models.init_params(model, Key(0)), directory / "start", tokenizer=tokenizer)
    for name, offset in (("train", 0), ("test", 1)):
        pairs = [(i % 10, (3 * i + offset) % 10) for i in range(rows)]
        lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)}) for a, b in pairs]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def write_mixture(directory: Path) -> None:
    """A policy of experts in the place of the task's."""
    tokenizer = character_tokenizer(CHARACTERS)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,  # type: ignore[call-arg]
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = models.build(config)
    models.save(model, models.init_params(model, Key(0)), directory / "start", tokenizer=tokenizer)


def settings(directory: Path, **changes: object) -> TrainSettings:
    """Four steps of PPO on it, on a CPU; `changes` are settings by path, with __ for dots."""
    values = {
        "output_dir": str(directory / "run"),
        "steps": 4,
        "model": {"path": str(directory / "start")},
        "data": {"path": [str(directory / "train.jsonl")], "eval_path": [str(directory / "test.jsonl")]},
        "rollout": {"batch_size": 8, "max_tokens": 3},
        "reward": {"functions": ["exact_match"]},
        "algorithm": {"kl": {"coef": 0.01, "controller": "adaptive", "horizon": 50}},
        "actor": {"mini_batch_size": 4, "epochs": 2, "optimizer": {"lr": 1e-3, "schedule": "linear"}},
        "critic": {"mini_batch_size": 4, "optimizer": {"lr": 1e-3}},
        "checkpoint": {"every": 1, "keep": 2},
        "log": {"loggers": ["jsonl"], "samples": 2},
    }
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    return resolve.resolved(files.check(files.replace(files.from_dict(values), changed)), resolve.CPU)[0]


UNLIKE = (
    "timing_s/",
    "perf/",
    "training/rollout_equal",
)  # of the clock, the machine, and the mesh's bits


def sample_bytes(run: Path) -> list[bytes]:
    """The files of a run's sampled rows, step by step."""
    return [path.read_bytes() for path in sample_files.files(run / sample_files.SAMPLES).values()]
