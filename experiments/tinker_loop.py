"""Tinker's client trains on this machine: GRPO on the quickstart's sums, with `fppo serve --tinker` as its service.

It takes pip install -e ".[tinker]". The warm-up leaves a reward of 0.61; 60 steps, a second each on two busy cores,
lead to 0.78. Start it with OMP_WAIT_POLICY=PASSIVE, or the warm-up takes minutes beside other programs.
"""

import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import tinker  # pyright: ignore[reportMissingImports]
import tyro

from fppo import quickstart

KEY, TOKENIZER, GROUP = "tml-local", quickstart.character_tokenizer(), 8


def grpo(trainer: tinker.TrainingClient, tasks: Sequence[quickstart.Addition]) -> float:
    sampler = trainer.save_weights_and_get_sampling_client().result()
    sampling = tinker.SamplingParams(max_tokens=4, stop=[1])
    prompts = [TOKENIZER.encode(task.prompt) for task in tasks]
    asked = [sampler.sample(tinker.ModelInput.from_ints(prompt), GROUP, sampling) for prompt in prompts]
    data, rewards = [], []
    for task, prompt, future in zip(tasks, prompts, asked, strict=True):
        answers = future.result().sequences
        right = [TOKENIZER.decode(each.tokens, skip_special_tokens=True) == task.answer for each in answers]
        rewards += right
        for each, score in zip(answers, right, strict=True):
            known = [0.0] * (len(prompt) - 1)
            inputs = {"target_tokens": prompt[1:] + each.tokens, "logprobs": [*known, *(each.logprobs or ())]}
            inputs["advantages"] = known + [score - sum(right) / GROUP] * len(each.tokens)
            data.append(tinker.Datum(tinker.ModelInput.from_ints(prompt + each.tokens[:-1]), inputs))
    gradients = trainer.forward_backward(data, "importance_sampling")
    trainer.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    gradients.result()
    return sum(rewards) / len(rewards)


def main(place: Path = Path("runs/tinker"), steps: int = 60, prompts: int = 64, warm_up: int = 300) -> None:
    quickstart.prepare(place, 0, steps=warm_up)
    command = [sys.executable, "-m", "fppo", "serve", str(place / quickstart.MODEL), "--tinker"]
    command += ["--store", str(place / "store"), "--port", "0"]
    environment, draws, (train, _) = os.environ | {"FPPO_API_KEY": KEY}, random.Random(0), quickstart.sums()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server, ExitStack() as ends:
        ends.callback(server.terminate)
        url = re.findall(r"http://[\w.:]+", next(iter(server.stdout or ())))[0]
        client = tinker.ServiceClient(base_url=url, api_key=KEY)
        trainer = client.create_lora_training_client(str(place / quickstart.MODEL), rank=8).result()
        for step in range(steps):
            print(step, f"reward {grpo(trainer, draws.sample(train, prompts)):.3f}", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
