"""The word problems by TRL's GRPO, with the settings of word_problems.toml, for the curves in docs/reference.md.

    pip install trl==1.16.0
    python experiments/reference/trl_grpo.py --output-dir runs/reference/trl/seed_0 --seed 0

Metrics have the names that fppo train gives them. The weights are those that fppo reads from the package, so that the
two start from the same numbers.
"""

import json
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import tyro
import word_rows
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from fppo.models.load import find_directory

SETTINGS = tomllib.loads((Path(__file__).parent / "word_problems.toml").read_text())
TOKENS = SETTINGS["rollout"]["max_tokens"]


def scores(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """TRL's form of a reward function."""
    return [word_rows.is_right(each[-1]["content"], truth) for each, truth in zip(completions, answer, strict=True)]


@torch.no_grad()
def held_out(model: Any, tokenizer: Any) -> float:
    """The share of held-out questions that greedy decoding answers rightly."""
    rows = list(word_rows.test())
    chats = [row["prompt"] for row in rows]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    model.eval()
    found = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    model.train()
    texts = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(map(word_rows.is_right, texts, (row["answer"] for row in rows))) / len(rows)


class Metrics(TrainerCallback):
    """Writes a line for each step, which has several updates; every few steps with the share of `held_out`."""

    def __init__(self, file: Path, updates: int, held_out: Callable[[], float]) -> None:
        self.file, self.updates, self.held_out = file, updates, held_out
        self.rewards: list[float] = []
        self.began = time.perf_counter()

    def write(self, step: int, **line: float) -> None:
        if step % SETTINGS["eval"]["every"] == 0:
            line[word_rows.HELD_OUT] = self.held_out()
        with self.file.open("a") as opened:
            opened.write(json.dumps({"step": step, **line}) + "\n")
        self.began = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.write(0)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])
        if logs and "loss" in logs and state.global_step % self.updates == 0:
            took = time.perf_counter() - self.began
            line = {"reward/regular_expression": fmean(self.rewards), "timing_s/step": took}
            self.write(state.global_step // self.updates, **line)
            self.rewards.clear()


def main(output_dir: Path, seed: int = 0, steps: int = SETTINGS["steps"]) -> None:
    """Train once, into `output_dir`."""
    where = find_directory(SETTINGS["model"]["path"])
    tokenizer = AutoTokenizer.from_pretrained(where, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(where)
    output_dir.mkdir(parents=True)
    rollout, actor = SETTINGS["rollout"], SETTINGS["actor"]
    updates = rollout["batch_size"] // actor["mini_batch_size"]
    metrics = Metrics(output_dir / "metrics.jsonl", updates, lambda: held_out(model, tokenizer))
    config = GRPOConfig(
        output_dir=str(output_dir / "trl"),
        seed=seed,
        max_steps=steps * updates,
        learning_rate=actor["optimizer"]["lr"],
        weight_decay=0.01,  # these two are fppo's defaults
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        per_device_train_batch_size=actor["mini_batch_size"],
        steps_per_generation=updates,
        num_generations=rollout["n"],
        max_completion_length=rollout["max_tokens"],
        loss_type="dapo",  # the mean over the tokens of a batch, as token-mean
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=scores,
        args=config,
        train_dataset=Dataset.from_list(list(word_rows.train())),
        callbacks=[metrics],
    )
    trainer.train()


if __name__ == "__main__":
    tyro.cli(main)
