"""How near `actor.entropy_control` holds its target: the share of steps within a tenth of it, and the mean deviation.

python experiments/entropy.py                                     # the quickstart's sums
python experiments/entropy.py --model smol --prompts 4 --n 4      # SmolLM2-135M on the word problems
"""

from pathlib import Path
from statistics import mean

import tyro

from fppo import models, quickstart, train
from fppo.key import Key
from fppo.quickstart import word_problems


def main(
    model: str = "sums",
    target: float = 0.8,  # of the first step's entropy
    rate: float = 0.01,
    damping: float = 5.0,
    high: float = 0.1,
    steps: int = 200,
    prompts: int = 16,
    n: int = 8,
    max_tokens: int = 4,
    lr: float = 3e-4,
    skip: int = 50,
    seed: int = 0,
    out: str = "runs/entropy",
):
    given = {"reward": "exact_match", "model": Path(out, "warm")}
    rows = [{"prompt": x.prompt, "ground_truth": x.answer} for x in quickstart.sums()[0]]
    if model == "smol":
        given = {"reward": "regular_expression", "model": "smol"}
        rows = [word_problems.row(x) for x in word_problems.split()[0]]
    elif not given["model"].exists():
        tokenizer, net, params = quickstart.warmed_up(Key(seed), steps=600)
        models.save(net, params, given["model"], tokenizer=tokenizer)
    control = {"target": target, "unit": "start", "rate": rate, "damping": damping, "high": high}
    settings = {
        "seed": seed,
        "rollout": {"batch_size": prompts * n, "n": n, "max_tokens": max_tokens},
        "actor": {"optimizer.lr": lr, "entropy_control": control, "mini_batch_size": prompts * n // 2},
        "checkpoint.every": 0,
    }
    if model == "smol":
        settings["reward.arguments.regular_expression.pattern"] = word_problems.LAST_NUMBER
    where = Path(out, f"{model}-{target}-{rate}-{high}-{seed}")
    run = train(**given, prompts=rows, steps=steps, settings=settings, output_dir=where)
    entropy, coefs = (run.metrics()[f"actor/{name}"].tolist() for name in ("entropy", "entropy_coef"))
    goal = target * entropy[0]
    off = [abs(x / goal - 1) for x in entropy[skip:]]
    print(f"{mean(x <= 0.1 for x in off):.0%} within a tenth of {goal:.3f}, {mean(off):.1%} off, from step {skip + 1}")
    print("entropy", *(f"{x / goal:.2f}" for x in entropy[::10]))
    print("factor ", *(f"{x:.4f}" for x in coefs[::10]))


if __name__ == "__main__":
    tyro.cli(main)
