"""How near `actor.entropy_control` holds its target: the shares of steps, and of means of ten, within a tenth of it.

python experiments/entropy.py                   # the quickstart's sums, by its model after the warm-up
python experiments/entropy.py --model smol --target 0.45 --unit nats --prompts 16 --max-tokens 3 --lr 3e-4 --low -0.1
"""

from pathlib import Path
from statistics import mean

import tyro

from fppo import quickstart, rewards, train


def ended(sample: rewards.Sample) -> float:
    """1 for the right digits and the end: else other special tokens there are an entropy that costs nothing."""
    right = (sample.ground_truth, len(sample.ground_truth) + 1, "stop")
    return float((sample.response, len(sample.response_tokens), sample.finish) == right)


def main(
    model: str = "sums",  # or smol, SmolLM2-135M with an adapter of rank 8, on small sums after an example
    target: float = 0.8,
    unit: str = "start",
    steps: int = 200,
    prompts: int = 256,
    max_tokens: int = 4,
    lr: float = 2e-4,
    low: float = 0.0,
    skip: int = 100,
    out: str = "runs/entropy",
):
    settings = {
        "rollout": {"batch_size": 2 * prompts, "n": 2, "max_tokens": max_tokens},
        "actor.entropy_control": {"target": target, "unit": unit, "low": low},
        "actor": {"optimizer.lr": lr, "mini_batch_size": prompts},
    }
    if model == "smol":
        pairs = [(a, b) for a in range(2, 20) for b in range(2, 20)]
        rows = [{"prompt": f"9 + 5 = 14, {a} + {b} = ", "ground_truth": str(a + b)} for a, b in pairs]
        settings |= {"model.lora.rank": 8, "reward.arguments.regular_expression.pattern": r"\A(\d+)(?!\d)"}
        given = {"reward": "regular_expression", "model": "smol"}
    else:
        rows = [{"prompt": x.prompt, "ground_truth": x.answer} for x in quickstart.sums()[0]]
        given = {"reward": ended, "model": Path(out, "task", quickstart.MODEL)}
        if not given["model"].exists():
            quickstart.prepare(Path(out, "task"), 0)
    run = train(**given, prompts=rows, steps=steps, settings=settings, output_dir=Path(out, f"{model}-{target}"))
    entropy, coefs = (run.metrics()[f"actor/{name}"].tolist() for name in ("entropy", "entropy_coef"))
    part = [x / target / (entropy[0] if unit == "start" else 1) for x in entropy]
    for name, seen in (("steps", part), ("means of ten", [mean(part[i : i + 10]) for i in range(len(part) - 9)])):
        off = [abs(x - 1) for x in seen[skip:]]
        print(f"{name}: {mean(x <= 0.1 for x in off):.0%} within a tenth, {mean(off):.1%} off")
    print(f"their mean is {mean(part[skip:]):.3f} of the target")
    print(*(f"{x:.2f}" for x in part[::10]), "with", *(f"{x:.4f}" for x in coefs[::10]))


if __name__ == "__main__":
    tyro.cli(main)
