"""The word problems by tinker's unmodified client, with the settings of word_problems.toml, for docs/reference.md.

    pip install -e ".[tinker]"
    python experiments/reference/tinker_grpo.py --output-dir runs/reference/tinker/seed_0 --seed 0

`fppo serve smol --tinker` is started, and trains all weights (rank 0). The loop is the client's: it draws questions,
scores answers, and sends advantages. Metrics have the names that fppo train gives them.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import tinker  # pyright: ignore[reportMissingImports]
import tyro
import word_rows

KEY = "tml-local"
SETTINGS = tomllib.loads((Path(__file__).parent / "word_problems.toml").read_text())
ROLLOUT, RATE = SETTINGS["rollout"], SETTINGS["actor"]["optimizer"]["lr"]


def answered(
    trainer: tinker.TrainingClient, rows: Sequence[dict[str, Any]], count: int, temperature: float, seed: int
) -> list[list[tuple[list[int], Any, float]]]:
    """For each row and draw: the prompt's tokens, the sampled sequence, and 1 if its last number is the answer."""
    tokenizer, sampler = trainer.get_tokenizer(), trainer.save_weights_and_get_sampling_client().result()
    asked = []
    for number, row in enumerate(rows):
        prompt: Any = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        how = tinker.SamplingParams(max_tokens=ROLLOUT["max_tokens"], temperature=temperature, seed=seed + number)
        asked.append((prompt, row["answer"], sampler.sample(tinker.ModelInput.from_ints(prompt), count, how)))
    found = []
    for prompt, truth, future in asked:
        texts = [
            (each, str(tokenizer.decode(each.tokens, skip_special_tokens=True))) for each in future.result().sequences
        ]
        found.append([(prompt, each, word_rows.is_right(text, truth)) for each, text in texts])
    return found


def update(trainer: tinker.TrainingClient, groups: Sequence[Sequence[tuple[list[int], Any, float]]]) -> None:
    """One update of GRPO. The server adds up the losses of tokens, so the advantages are divided by their number."""
    tokens = sum(len(each.tokens) for group in groups for _, each, _ in group)
    data = []
    for group in groups:
        rewards = [reward for *_, reward in group]
        for prompt, each, reward in group:
            known = [0.0] * (len(prompt) - 1)
            advantage = (reward - fmean(rewards)) / (stdev(rewards) + 1e-6) / tokens
            inputs = {"target_tokens": prompt[1:] + each.tokens, "logprobs": [*known, *each.logprobs]}
            inputs["advantages"] = known + [advantage] * len(each.tokens)
            data.append(tinker.Datum(tinker.ModelInput.from_ints(prompt + each.tokens[:-1]), inputs))
    passed = trainer.forward_backward(data, "ppo")
    adam = tinker.AdamParams(
        learning_rate=RATE, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0
    )
    trainer.optim_step(adam).result()
    passed.result()


def main(output_dir: Path, seed: int = 0, steps: int = SETTINGS["steps"]) -> None:
    output_dir.mkdir(parents=True)
    command = [sys.executable, "-m", "fppo", "serve", SETTINGS["model"]["path"], "--tinker", "--port", "0"]
    command += ["--store", str(output_dir / "store")]
    draws, train, test = random.Random(seed), list(word_rows.train()), list(word_rows.test())
    prompts, mini = (size // ROLLOUT["n"] for size in (ROLLOUT["batch_size"], SETTINGS["actor"]["mini_batch_size"]))
    order = [row for _ in range(1 + steps * prompts // len(train)) for row in draws.sample(train, len(train))]
    with ExitStack() as ends, (output_dir / "metrics.jsonl").open("w", buffering=1) as metrics:
        server = ends.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"FPPO_API_KEY": KEY})
        )
        ends.callback(server.terminate)
        url = re.findall(r"http://[\w.:]+", next(iter(server.stdout or ())))[0]
        client = ends.enter_context(tinker.ServiceClient(base_url=url, api_key=KEY))
        trainer = client.create_lora_training_client(SETTINGS["model"]["path"], rank=0).result()
        for step in range(steps + 1):
            line: dict[str, float] = {"step": step}
            if step:
                began = time.perf_counter()
                rows = order[(step - 1) * prompts : step * prompts]
                groups = answered(trainer, rows, ROLLOUT["n"], 1.0, 1000 * (seed * steps + step))
                for first in range(0, prompts, mini):
                    update(trainer, groups[first : first + mini])
                line["reward/regular_expression"] = fmean(reward for group in groups for *_, reward in group)
                line["timing_s/step"] = time.perf_counter() - began
            if step % SETTINGS["eval"]["every"] == 0:
                line[word_rows.HELD_OUT] = fmean(group[0][2] for group in answered(trainer, test, 1, 0.0, 0))
            print(line, file=sys.stderr)
            metrics.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
