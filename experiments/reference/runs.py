"""Train one of the reference runs of docs/reference.md.

    python experiments/reference/runs.py grpo --seed 0 --out runs/reference

It prints the command, which works without this script too, and passes it on. The run is then in OUT/NAME/seed_N.
"""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import attrs
import tyro
from tyro.conf import Positional

HERE = Path(__file__).parent


@attrs.frozen
class Run:
    """A reference run: its name in tables, its settings or script, more arguments, and fppo's command for settings."""

    label: str
    start: str
    arguments: tuple[str, ...] = ()
    verb: str = "train"

    def command(self, name: str, seed: int, out: Path) -> list[str]:
        """The command line that trains one seed into a directory of `out`."""
        script = HERE / self.start
        place, how = out / name / f"seed_{seed}", [each.format(out=out, seed=seed) for each in self.arguments]
        if script.suffix == ".py":
            return [sys.executable, str(script), "--output-dir", str(place), "--seed", str(seed), *how]
        return ["fppo", self.verb, str(script), "--output-dir", str(place), "--seed", str(seed), *how]


WORDS, GAE = "word_problems.toml", ("--algorithm.advantage.name", "gae", "--algorithm.advantage.lam", "1.0")
SHORT = ("--steps", "20")
RUNS = {
    "grpo": Run("GRPO", WORDS),
    "any_expression": Run("GRPO, any expression", WORDS, ("--reward.weights", "[0, 1]")),
    "rloo": Run("RLOO", WORDS, (*SHORT, "--algorithm.advantage.name", "rloo")),
    "ppo_tokens": Run("PPO, a model as critic", WORDS, (*SHORT, *GAE, "--critic.optimizer.lr", "2e-5")),
    "ppo_hidden": Run(
        "PPO, a critic of hidden states",
        WORDS,
        (*SHORT, *GAE, "--critic.reads", "hidden", "--critic.optimizer.lr", "1e-3"),
    ),
    "distilled": Run(
        "distilled from GRPO's",
        WORDS,
        (*SHORT, "--algorithm.advantage.name", "distill", "--model.teacher-path", "{out}/grpo/seed_{seed}/model"),
    ),
    "tinker": Run("tinker's client", "tinker_grpo.py", SHORT),
    "second_chance": Run("two turns", "second_chance.toml"),
    "gsm8k_imitated": Run("imitation of solutions", "gsm8k.toml", ("--steps", "60"), verb="sft"),
    "gsm8k": Run("GRPO after it", "gsm8k.toml", ("--model.path", "{out}/gsm8k_imitated/seed_{seed}/model")),
    "trl": Run("TRL 1.16", "trl_grpo.py", ("--steps", "10")),
}


def main(name: Positional[Literal[tuple(RUNS)]], out: Path = Path("runs/reference"), seed: int = 0) -> None:  # pyright: ignore
    command = RUNS[name].command(name, seed, out)
    print(" ".join(command))
    subprocess.run(command, check=True)


if __name__ == "__main__":
    tyro.cli(main)
