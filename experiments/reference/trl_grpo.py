"""The word problems by TRL's GRPO, with the settings of word_problems.toml, for the curves in docs/reference.md.

    pip install trl==1.16.0
    python experiments/reference/trl_grpo.py --out runs/trl --seed 0

It writes the metrics of the same names as fppo does: the reward of each step, its seconds, and the share of held-out
questions whose greedy answer ends with the right number, before and after. The weights are those that fppo reads from
the package, so that the two start from the same numbers.
"""

import json
import re
import time
import tomllib
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
LAST_NUMBER = re.compile(SETTINGS["reward"]["arguments"]["regular_expression"]["pattern"])
TOKENS = SETTINGS["rollout"]["max_tokens"]
HELD_OUT = "val-aux/word problems/regular_expression/mean@1"


def is_right(response: str, answer: str) -> float:
    found = LAST_NUMBER.search(response)
    return float(found is not None and found[1] == answer)


def scores(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """TRL's form of a reward function."""
    return [is_right(each[-1]["content"], truth) for each, truth in zip(completions, answer, strict=True)]


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
    return sum(map(is_right, texts, (row["answer"] for row in rows))) / len(rows)


class Kept(TrainerCallback):
    """Appends a line to the metrics at each step, which has several updates."""

    def __init__(self, file: Path, updates: int) -> None:
        self.file, self.updates, self.began = file, updates, time.perf_counter()
        self.rewards: list[float] = []

    def write(self, step: int, **line: float) -> None:
        with self.file.open("a") as opened:
            opened.write(json.dumps({"step": step, **line}) + "\n")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])
        if logs and "loss" in logs and state.global_step % self.updates == 0:
            took, self.began = time.perf_counter() - self.began, time.perf_counter()
            line = {"reward/regular_expression": fmean(self.rewards), "timing_s/step": took}
            self.write(state.global_step // self.updates, **line)
            self.rewards.clear()


def main(out: Path, seed: int = 0, steps: int = SETTINGS["steps"]) -> None:
    """Train once, into `out`/seed_N."""
    where = find_directory(SETTINGS["model"]["path"])
    tokenizer = AutoTokenizer.from_pretrained(where, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(where)
    place = out / f"seed_{seed}"
    place.mkdir(parents=True)
    rollout, actor = SETTINGS["rollout"], SETTINGS["actor"]
    updates = rollout["batch_size"] // actor["mini_batch_size"]
    kept = Kept(place / "metrics.jsonl", updates)
    kept.write(0, **{HELD_OUT: held_out(model, tokenizer)})
    config = GRPOConfig(
        output_dir=str(place / "trl"),
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
        callbacks=[kept],
    )
    kept.began = time.perf_counter()
    trainer.train()
    kept.write(steps, **{HELD_OUT: held_out(model, tokenizer)})


if __name__ == "__main__":
    tyro.cli(main)
