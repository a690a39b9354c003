"""PPO on GSM8K: a small model imitates its solutions for a while; PPO (gsm8k.toml) then rewards format and answer.

python experiments/gsm8k.py --data DIR        # DIR holds train.jsonl and test.jsonl
"""

import json
from pathlib import Path

import torch
import tyro

from fppo import models, quickstart
from fppo.commands import actions
from fppo.key import Key
from fppo.settings import files
from fppo.steps import supervised
from fppo.steps.forward import Forward
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule


def read(path: Path) -> list[dict[str, str]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    pairs = [(f"Question: {row['question']}\nAnswer:\n", row["answer"]) for row in rows]
    return [{"prompt": q, "solution": s, "answer": s.split("####")[1].strip().replace(",", "")} for q, s in pairs]


def run(toml: str, data: Path, output_dir: Path, seed: int, warm_up: int, batch: int, *more: str, alone: str = "",
        width: int = 192, layers: int = 4) -> None:  # fmt: skip
    key, splits = Key(seed), {name: read(data / f"{name}.jsonl") for name in ("train", "test")}
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        (output_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = quickstart.bpe_tokenizer([row["prompt"] + row["solution"] for row in splits["train"]], alone=alone)
    every = ((tokenizer.encode(r["prompt"]), [*tokenizer.encode(r["solution"]), 1]) for r in splits["train"])
    pairs = [pair for pair in every if len(pair[0]) <= 96 and len(pair[1]) <= 128]
    draws = (key.fold("warm-up", step).uniform(torch.arange(batch), 1)[:, 0].tolist() for step in range(warm_up))
    chosen = ([pairs[int(u * len(pairs))] for u in row] for row in draws)
    batches = (supervised.demonstrations(*map(list, zip(*rows, strict=True)), pad_token_id=0) for rows in chosen)
    size, compute = len(tokenizer), torch.bfloat16
    model = quickstart.small_model(size, width=width, layers=layers, positions=256, compute_dtype=compute)
    rate = schedule("cosine", 2e-3, total_steps=warm_up, warmup_steps=warm_up // 5, min_ratio=0.05)
    params = supervised.imitate(models.init_params(model, key), batches, forward=Forward(model), every=50,
                                on_step=lambda step, loss: print(f"warm-up {step}: {loss:.3f}"),
                                optimizer=adamw(rate), micro_batching=MicroBatching(size=batch))  # fmt: skip
    models.save(model, params, output_dir / "warm", tokenizer=tokenizer)
    actions.train(files.load(Path(__file__).with_name(toml), [f"--output-dir={output_dir}", f"--seed={seed}",
                   f"--model.path={output_dir / 'warm'}", f"--data.path={output_dir / 'train.jsonl'}",
                   f"--data.eval-path={output_dir / 'test.jsonl'}", *more]))  # fmt: skip


def main(data: Path, output_dir: Path = Path("runs/gsm8k"), seed: int = 0, warm_up: int = 150, batch: int = 32) -> None:
    run("gsm8k.toml", data, output_dir, seed, warm_up, batch)


if __name__ == "__main__":
    tyro.cli(main)
