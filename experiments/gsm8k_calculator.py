"""PPO on GSM8K with a calculator: the policy writes <<48/2=, the calculator 24>>, and the policy goes on behind it.

    python experiments/gsm8k_calculator.py --data DIR        # DIR holds train.jsonl and test.jsonl

GSM8K's solutions hold such annotations (Cobbe et al., 2021, arXiv:2110.14168), so a model that imitates them calls the
calculator. A turn ends at every "=", a token of its own here; what the calculator writes is not trained on. Elsewhere
"=" ends a turn too, and the policy goes on by itself. All else is as in gsm8k.py.
"""

from pathlib import Path

import gsm8k
import tyro

from fppo.key import Key


def main(
    data: Path,
    output_dir: Path = Path("runs/gsm8k_calculator"),
    seed: int = 0,
    warm_up: int = 150,
    batch: int = 32,
    width: int = 192,
    layers: int = 4,
    more: tuple[str, ...] = (),
) -> None:
    gsm8k.imitate_solutions(
        data, output_dir, Key(seed), steps=warm_up, batch=batch, alone="=", width=width, layers=layers
    )
    overrides = [f"--{each}" for each in more]  # further settings, as --more steps=20 eval.every=0
    gsm8k.ppo("gsm8k_calculator.toml", output_dir, seed, *overrides)


if __name__ == "__main__":
    tyro.cli(main)
