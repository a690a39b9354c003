"""Three tasks of reasoning-gym with a second chance for half the reward, on a model of the quickstart's size.

It takes pip install -e ".[reasoning]". Examples teach the form of an answer, and are mostly one too high; PPO, which
compares turns with turns, does the rest.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import reasoning_gym  # pyright: ignore[reportMissingImports]
import tyro

from fppo import models, quickstart
from fppo.commands.cli import main as fppo
from fppo.key import Key
from fppo.steps import Forward, MicroBatching, adamw, schedule
from fppo.steps.supervised import Demonstrations, demonstrations, imitate

DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS = {
    "chain_sum": DIGIT,
    "products": DIGIT,
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 12},
}


def warm_up(directory: Path, key: Key, steps: int) -> None:
    """A model that has imitated answers of which a third are right."""
    sets = [reasoning_gym.create_dataset(name, seed=1, size=1 << 20, **how) for name, how in TASKS.items()]
    texts = [items[number]["question"] + " -7 No, again:" for items in sets for number in range(200)]
    tokenizer = quickstart.bpe_tokenizer(texts, size=480)
    model = quickstart.small_model(len(tokenizer), positions=128)

    def batches() -> Iterator[Demonstrations]:
        for step in range(steps):
            draw, prompts, answers = random.Random(key.fold(step).seed), [], []
            for _ in range(256):
                item = draw.choice(sets)[draw.randrange(1 << 20)]
                answer = int(item["answer"]) + (draw.random() > 0.35)
                prompts.append(tokenizer.encode(item["question"]))
                answers.append([*tokenizer.encode(f" {answer}"), tokenizer.eos_token_id])
            yield demonstrations(prompts, answers, pad_token_id=0)

    rate = schedule("linear", 2e-3, total_steps=steps, warmup_steps=30)
    optimizer = adamw(rate, betas=(0.9, 0.99), weight_decay=0.0)
    how = {"forward": Forward(model), "optimizer": optimizer, "micro_batching": MicroBatching(size=256)}
    models.save(model, imitate(models.init_params(model, key), batches(), **how), directory, tokenizer=tokenizer)


def main(output_dir: Path = Path("runs/reasoning"), seed: int = 0, examples: int = 250, more: tuple[str, ...] = ()):
    if not (output_dir / "warm").exists():
        warm_up(output_dir / "warm", Key(seed), examples)
    given = [f"--output-dir={output_dir}", f"--model.path={output_dir / 'warm'}", f"--seed={seed}"]
    return fppo(["train", str(Path(__file__).with_suffix(".toml")), *given, *(f"--{each}" for each in more)])


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main))
