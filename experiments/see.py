"""A small model of images and text learns to answer: a warm-up teaches it to describe images, and to guess when it is
asked about one; PPO (see.toml) then rewards right answers on the colour, the digit or the number of squares.

python experiments/see.py        # --device cuda
"""

from functools import partial
from pathlib import Path

import gsm8k
import numpy as np
import tyro
from sight import task

from fppo import data, models
from fppo.key import Key
from fppo.steps import Forward, MicroBatching, adamw, demonstrations, imitate, schedule


def imitate_answers(output: Path, rng: np.random.Generator, key: Key, *, steps: int, batch: int = 64) -> None:
    model, processor = task.small_model()
    reader = data.ImageReader(processor, processor.image_token_id)
    fields, encode = data.Fields(chat=True, images="image"), processor.tokenizer.encode
    rows = data.load_prompts(output / "task" / "shown.jsonl", processor.tokenizer, fields=fields, images=reader)
    parts = (data.select(rows, rng.integers(len(rows), size=batch).tolist()) for _ in range(steps))
    said = ((x, [[*encode(answer), 1] for answer in x.ground_truths]) for x in parts)
    batches = (demonstrations([*map(list, x.tokens)], y, pad_token_id=0, inputs=x.inputs) for x, y in said)
    adam = adamw(schedule("linear", 3e-3, total_steps=steps, warmup_steps=steps // 10), weight_decay=0.0)
    micro, show, params = MicroBatching(size=batch), partial(print, "warm-up"), models.init_params(model, key)
    params = imitate(params, batches, forward=Forward(model), optimizer=adam, micro_batching=micro, on_step=show)
    models.save(model, params, output / "warm", tokenizer=processor)


def main(
    output_dir: Path = Path("runs/see"),
    device: str = "auto",
    seed: int = 0,
    warm_up: int = 300,
    rows: int = 3000,
    more: tuple[str, ...] = (),
) -> None:
    rng = np.random.default_rng(seed)
    task.write(output_dir / "task", "shown", rows, rng, described=0.75)
    task.write(output_dir / "task", "train", rows, rng)
    task.write(output_dir / "task", "test", 1 + rows // 12, rng)
    imitate_answers(output_dir, rng, Key(seed), steps=warm_up)
    paths = [
        f"--data.{name}={output_dir / 'task' / file}"
        for name, file in (("path", "train.jsonl"), ("eval-path", "test.jsonl"))
    ]
    overrides = [
        *paths,
        f"--device={device}",
        *(f"--{each}" for each in more),
    ]  # settings, as --more steps=20 eval.every=0
    gsm8k.ppo("see.toml", output_dir, seed, *overrides)


if __name__ == "__main__":
    tyro.cli(main)
