"""All weights against adapters of rank 1, 8 and 32 on GSM8K: gsm8k.toml from one warm model, several seeds of each.

python experiments/gsm8k_lora.py --data DIR        # DIR holds train.jsonl and test.jsonl

Settings alone differ (`fppo compare`): adapters have ten times the learning rates. Started again, it goes on.
"""

import sys
from pathlib import Path

import tyro
from gsm8k import imitate_solutions

from fppo.commands import cli
from fppo.key import Key

RANKS = (1, 8, 32)


def variants(rate: float, critic_rate: float) -> str:
    """The values of model.lora.rank that are compared, with what goes with each."""
    rates = f"actor.optimizer.lr={rate}+critic.optimizer.lr={critic_rate}"
    return "model.lora.rank=" + ",".join(["0", *(f"{rank}+{rates}+model.lora.alpha=32.0" for rank in RANKS)])


def main(
    data: Path,
    output_dir: Path = Path("runs/gsm8k"),
    seeds: int = 5,
    warm_up: int = 150,
    batch: int = 32,
    rate: float = 2e-3,
    critic_rate: float = 5e-3,
) -> int:
    if not (output_dir / "warm").exists():
        imitate_solutions(data, output_dir, Key(0), steps=warm_up, batch=batch)
    paths = {"model.path": "warm", "data.path": "train.jsonl", "data.eval-path": "test.jsonl", "output-dir": "lora"}
    own = [f"--{name}={output_dir / path}" for name, path in paths.items()]
    asked = [f"--vary={variants(rate, critic_rate)}", f"--seeds={seeds}", f"--out={output_dir / 'lora'}"]
    return cli.main(["compare", str(Path(__file__).with_name("gsm8k.toml")), *asked, *own])


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
