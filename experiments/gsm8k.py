"""PPO on GSM8K: a small model imitates its solutions for a while; PPO (gsm8k.toml) then rewards format and answer.

python experiments/gsm8k.py --data DIR        # DIR holds train.jsonl and test.jsonl
"""

import json
from functools import partial
from pathlib import Path

import torch
import tyro

from fppo import models, quickstart
from fppo.commands import actions
from fppo.key import Key
from fppo.settings import files
from fppo.steps import Forward, MicroBatching, adamw, demonstrations, imitate, schedule


def read(path: Path) -> list[dict[str, str]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    pairs = [(f"Question: {row['question']}\nAnswer:\n", row["answer"]) for row in rows]
    return [{"prompt": q, "solution": s, "answer": s.split("####")[1].strip().replace(",", "")} for q, s in pairs]


def imitate_solutions(
    data: Path, output: Path, key: Key, *, steps: int, batch: int, alone: str = "", width: int = 192, layers: int = 4
) -> None:
    output.mkdir(parents=True, exist_ok=True)
    splits = {name: read(data / f"{name}.jsonl") for name in ("train", "test")}
    for name, rows in splits.items():
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = quickstart.bpe_tokenizer([row["prompt"] + row["solution"] for row in splits["train"]], alone=alone)
    every = ((tokenizer.encode(r["prompt"]), [*tokenizer.encode(r["solution"]), 1]) for r in splits["train"])
    pairs = [pair for pair in every if len(pair[0]) <= 96 and len(pair[1]) <= 128]
    draws = (key.fold("warm-up", step).uniform(torch.arange(batch), 1)[:, 0].tolist() for step in range(steps))
    chosen = ([pairs[int(u * len(pairs))] for u in row] for row in draws)
    batches = (demonstrations(*map(list, zip(*rows, strict=True)), pad_token_id=0) for rows in chosen)
    size, dtype, show = len(tokenizer), torch.bfloat16, partial(print, "warm-up")
    model = quickstart.small_model(size, width=width, layers=layers, positions=256, compute_dtype=dtype)
    adam = adamw(schedule("cosine", 2e-3, total_steps=steps, warmup_steps=steps // 5, min_ratio=0.05))
    params, policy, micro = models.init_params(model, key), Forward(model), MicroBatching(size=batch)
    params = imitate(params, batches, forward=policy, optimizer=adam, micro_batching=micro, on_step=show, every=50)
    models.save(model, params, output / "warm", tokenizer=tokenizer)


def ppo(toml: str, output: Path, seed: int, *overrides: str) -> None:
    paths = {"model.path": "warm", "data.path": "train.jsonl", "data.eval-path": "test.jsonl", "output-dir": ""}
    values = [f"--seed={seed}", *(f"--{name}={output / path}" for name, path in paths.items()), *overrides]
    actions.train(files.load(Path(__file__).with_name(toml), values))


def main(data: Path, output_dir: Path = Path("runs/gsm8k"), seed: int = 0, warm_up: int = 150, batch: int = 32) -> None:
    imitate_solutions(data, output_dir, Key(seed), steps=warm_up, batch=batch)
    ppo("gsm8k.toml", output_dir, seed)


if __name__ == "__main__":
    tyro.cli(main)
