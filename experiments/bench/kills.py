"""Runs of which a random rank is killed at a random moment: each has to end as if it had not been.

    python experiments/bench/kills.py --runs 100
    python experiments/bench/kills.py --runs 20 --ranks 2

Prints what was killed and in what it was at work, how many of the runs ended with the digests of one that was left
alone, and the seconds from the kill until a step began anew.
"""

import contextlib
import io
import multiprocessing
import os
import random
import re
import signal
import statistics
import threading
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import tyro

from fppo import models, quickstart
from fppo.commands import actions
from fppo.key import Key
from fppo.report import timeline
from fppo.runs import jsonl
from fppo.settings import files, resolve
from fppo.settings.train import TrainSettings

LOST = re.compile(r"group '(\w+)[ \d]*'.* lost in ([\w ]+):|group '(\w+)' did not start")


class Kill(NamedTuple):
    """What a kill hit, whether the run ended as undisturbed, and the seconds until a step began anew."""

    hit: str
    equal: bool
    seconds: float


def settings_of(task: Path, directory: Path, ranks: int, steps: int) -> TrainSettings:
    """A tiny run with two engines, and other roles in pools of so many ranks."""
    roles = {"actor": "policy", "critic": "value", "reference": "fixed", "reward": "judge", "rollout": "engines"}
    pools = {name: {"ranks": 2 if name == "engines" else ranks} for name in roles.values()}
    values = {
        "output_dir": str(directory),
        "steps": steps,
        "model": {"path": str(task / "start")},
        "data": {"path": [str(task / "train.jsonl")]},
        "rollout": {"batch_size": 16, "max_tokens": 3},
        "reward": {"functions": ["exact_match"], "model": {"path": str(task / "judge")}},
        "algorithm": {"kl": {"coef": 0.01}},
        "checkpoint": {"every": 1, "keep": 2},
        "log": {"loggers": ["jsonl"]},
        "placement": {"pools": pools, "roles": roles, "patience": 120.0, "engines": {"rows": 4}},
    }
    return resolve.resolved(files.check(files.from_dict(values)), resolve.CPU)[0]


def write_task(task: Path) -> None:
    """A policy and a reward model that know nothing, and sums."""
    tokenizer = quickstart.character_tokenizer(quickstart.CHARACTERS)
    policy = quickstart.small_model(len(tokenizer), width=16, layers=1)
    models.save(policy, models.init_params(policy, Key(0)), task / "start", tokenizer=tokenizer)
    judge = models.build(policy.config, "value")
    models.save(judge, models.init_params(judge, Key(1)), task / "judge")
    rows = [f'{{"prompt": "{i % 10}+{i % 7}=", "answer": "{i % 10 + i % 7}"}}' for i in range(70)]
    (task / "train.jsonl").write_text("\n".join(rows) + "\n")


def killed(settings: TrainSettings, seed: int, step_seconds: float) -> Kill:
    """Trains, and kills one of the ranks at some time within a step that takes so many seconds."""
    draw, done, struck, said = random.Random(seed), threading.Event(), list[float](), io.StringIO()
    ranks, step = sum(pool["ranks"] for pool in settings.placement.pools.values()), draw.randrange(settings.steps)

    def there() -> bool:
        enough = len(multiprocessing.active_children()) >= ranks
        return enough and len(jsonl.read(Path(settings.output_dir) / "digests.jsonl")) >= step

    def strike() -> None:
        while not there() and not done.is_set():
            time.sleep(0.02)
        if not done.wait(draw.uniform(0, step_seconds)):
            child = draw.choice(sorted(multiprocessing.active_children(), key=lambda each: each.pid or 0))
            os.kill(child.pid or 0, signal.SIGKILL)
            struck.append(time.time())

    thread = threading.Thread(target=strike)
    thread.start()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        status = actions.train(settings)
    done.set()
    thread.join()
    found = LOST.search(said.getvalue())
    directory = Path(settings.output_dir)
    began = [bar.start for bar in timeline.read(directory) if struck and bar.name == "step" and bar.start > struck[0]]
    unseen = "one that nobody missed" if struck else "nothing: the run was over"
    hit = unseen if found is None else f"{found[1]} in {found[2]}" if found[1] else "the start"
    return Kill(hit, status == 0, began[0] - struck[0] if found and began else float("nan"))


def main(runs: int = 100, ranks: int = 1, steps: int = 6, seed: int = 0) -> None:
    """So many runs, each with a seed of its own from the first on; pools have so many ranks each."""
    kinds: dict[str, list[Kill]] = defaultdict(list)
    with TemporaryDirectory() as place:
        task = Path(place)
        write_task(task)
        settings = settings_of(task, task / "undisturbed", ranks, steps)
        with contextlib.redirect_stdout(io.StringIO()):
            actions.train(settings)
        expected = list(jsonl.read(task / "undisturbed" / "digests.jsonl"))
        bars = timeline.read(task / "undisturbed")
        took = max(bar.start + bar.seconds for bar in bars) - min(bar.start for bar in bars)
        for number in range(seed, seed + runs):
            directory = task / f"run_{number}"
            kill = killed(settings_of(task, directory, ranks, steps), number, took / steps)
            equal = kill.equal and list(jsonl.read(directory / "digests.jsonl")) == expected
            print(f"seed {number}: {kill.hit}: {'equal' if equal else 'DIFFERS'}, {kill.seconds:.1f} s", flush=True)
            kinds[kill.hit].append(kill._replace(equal=equal))
    print(f"\n{'killed':<44}{'runs':>6}{'equal':>7}{'median s':>10}{'most s':>8}")
    for hit, kills in sorted(kinds.items()):
        seconds = [kill.seconds for kill in kills if kill.seconds == kill.seconds] or [float("nan")]
        equal = sum(kill.equal for kill in kills)
        print(f"{hit:<44}{len(kills):>6}{equal:>7}{statistics.median(seconds):>10.1f}{max(seconds):>8.1f}")
    if any(not kill.equal for kills in kinds.values() for kill in kills):
        raise SystemExit(1)


if __name__ == "__main__":
    tyro.cli(main)
