"""The quickstart's two parts, warm-up and PPO, with the default kernels and with those in C++, in one process.

    python experiments/bench/quickstart.py                # --updates 60 --steps 4 --rounds 3; OMP_NUM_THREADS=2

Seconds of the processor, medians of rounds in which the ways take turns; and these for the whole quickstart, of 600
updates and 60 steps, without its start. Programs that are not built in are compiled before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in fppo's commands

import torch

from fppo import models, quickstart
from fppo.commands.actions import train
from fppo.key import Key
from fppo.settings import files
from fppo.steps import Forward
from fppo_kernels import _cpp, prebuilt
from fppo_kernels.table import Kernels

INSIDE = ("attention", "log_probs", "rms_norm", "add_rms_norm", "rotary", "glu")


def warm_up(cpp: bool, updates: int) -> None:
    tokenizer, (rows, _) = quickstart.character_tokenizer(), quickstart.sums()
    model = quickstart.small_model(len(tokenizer))
    forward = Forward(model, Kernels.named(**dict.fromkeys(INSIDE if cpp else (), "cpp")))
    params = models.init_params(model, Key(0))
    quickstart.warm_up(forward, params, rows, Key(0), tokenizer=tokenizer, steps=updates)


def ppo(cpp: bool, steps: int, place: Path) -> None:
    quickstart.prepare(place, 0, steps=1)
    changes = {"steps": steps, "model.cpp": cpp, "eval.every": 10**6}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train(files.replace(quickstart.settings(place, 0), changes))


def seconds(function: Callable[..., object], *arguments: object) -> float:
    start = time.process_time()
    function(*arguments)
    return time.process_time() - start


def main(updates: int = 60, steps: int = 4, rounds: int = 3) -> None:
    loading = seconds(_cpp.failure)  # without the compiler's, which is a process of its own
    print(
        f"{torch.get_num_threads()} threads, kernels in C++: {prebuilt.here()}; {loading:.2f} s to load all", flush=True
    )
    found: dict[tuple[str, bool], list[float]] = {}
    for _ in range(rounds):
        for cpp in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                found.setdefault(("warm-up", cpp), []).append(seconds(warm_up, cpp, updates) / updates)
                one = seconds(ppo, cpp, 1, Path(folder) / "one")
                more = seconds(ppo, cpp, 1 + steps, Path(folder) / "more")
                found.setdefault(("PPO", cpp), []).append((more - one) / steps)
        for (part, cpp), each in found.items():
            way = "in C++" if cpp else "default"
            print(part, way, f"{statistics.median(each):.4f} s each", [round(x, 4) for x in each], flush=True)
    middle = {key: statistics.median(each) for key, each in found.items()}
    default, built = (600 * middle["warm-up", cpp] + 60 * middle["PPO", cpp] for cpp in (False, True))
    print(f"in all {default:.0f} s and in C++ {built:.0f} s, {built / default:.2f} of it")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    main(**vars(parser.parse_args()))
