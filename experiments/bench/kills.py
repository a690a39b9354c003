"""Runs of which a random rank or node is killed at a random moment: each has to end as if it had not been.

    python experiments/bench/kills.py --runs 100
    python experiments/bench/kills.py --runs 20 --ranks 2
    python experiments/bench/kills.py --runs 20 --nodes 3        # of a Ray cluster: pip install -e ".[ray]"

With nodes about every second kill removes one of them, and another joins. Prints what was killed and in what it was at
work, how many of the runs ended with the digests of one that was left alone, and the seconds from the kill until a step
began anew.
"""

# pyright: reportMissingImports=false
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import tyro

from fppo import models, quickstart
from fppo.commands import actions
from fppo.key import Key
from fppo.report import timeline
from fppo.runs import jsonl
from fppo.settings import files, resolve
from fppo.settings.train import TrainSettings

LOST = re.compile(r"group '(\w+)[ \d]*'.* lost in ([\w ]+):|group '(\w+)' did not start")


class Place(Protocol):
    """Where ranks run."""

    @property
    def cluster(self) -> str: ...

    def up(self, ranks: int) -> bool:
        """Whether so many ranks may be there."""
        ...

    def strike(self, draw: random.Random) -> str:
        """Kills something; what kind of thing it was."""
        ...


class Machine:
    """This machine, whose ranks are children of this process."""

    cluster = "processes"

    def up(self, ranks: int) -> bool:
        return len(multiprocessing.active_children()) >= ranks

    def strike(self, draw: random.Random) -> str:
        child = draw.choice(sorted(multiprocessing.active_children(), key=lambda each: each.pid or 0))
        os.kill(child.pid or 0, signal.SIGKILL)
        return "rank"


class Nodes:
    """Nodes of a Ray cluster on this machine, with so many cores each, beside one that has no ranks."""

    def __init__(self, cluster: Any, count: int, cores: int) -> None:
        self._cluster, self._cores = cluster, cores
        self._nodes = [cluster.add_node(num_cpus=cores) for _ in range(count)]

    @property
    def cluster(self) -> str:
        return self._cluster.address

    def up(self, ranks: int) -> bool:
        return True  # what is struck while ranks start is a kill as well

    def strike(self, draw: random.Random) -> str:
        import ray

        own = ray.get_runtime_context().get_node_id() if ray.is_initialized() else None  # the controller's stays
        node, ranks = draw.choice([each for each in self._nodes if each.node_id != own]), self._ranks()
        if ranks and draw.random() < 0.5:
            os.kill(draw.choice(ranks), signal.SIGKILL)
            return "rank"
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes[self._nodes.index(node)] = self._cluster.add_node(num_cpus=self._cores)
        return "node"

    def _ranks(self) -> list[int]:
        """The processes of actors."""
        raylets = {each.process.pid for node in self._nodes for each in node.all_processes["raylet"]}
        return sorted(pid for pid, parent, name in processes() if parent in raylets and name.startswith("ray::_Actor"))


def processes() -> Iterator[tuple[int, int, str]]:
    """Of each process of this machine its number, its parent's and its command."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
            yield int(entry), int(parent), Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()


class Kill(NamedTuple):
    """What a kill hit, whether the run ended as undisturbed, and the seconds until a step began anew."""

    hit: str
    equal: bool
    seconds: float


def settings_of(task: Path, directory: Path, cluster: str, ranks: int, steps: int) -> TrainSettings:
    """A tiny run with two engines, and other roles in pools of so many ranks."""
    roles = {"actor": "policy", "critic": "value", "reference": "fixed", "reward": "judge", "rollout": "engines"}
    pools = {name: {"ranks": 2 if name == "engines" else ranks, "threads": 1} for name in roles.values()}
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
        "placement": {
            "cluster": cluster,
            "pools": pools,
            "roles": roles,
            "patience": 120.0,
            "engines": {"rows": 4},
        },
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


def killed(place: Place, settings: TrainSettings, seed: int, step_seconds: float) -> Kill:
    """Trains, and strikes at some time within a step that takes so many seconds."""
    draw, done, said = random.Random(seed), threading.Event(), io.StringIO()
    ranks, step = sum(pool["ranks"] for pool in settings.placement.pools.values()), draw.randrange(settings.steps)

    def there() -> bool:
        return place.up(ranks) and len(jsonl.read(Path(settings.output_dir) / "digests.jsonl")) >= step

    def strike() -> tuple[float, str] | None:
        while not there() and not done.is_set():
            time.sleep(0.02)
        if done.wait(draw.uniform(0, step_seconds)):
            return None
        return time.time(), place.strike(draw)

    with ThreadPoolExecutor(1) as pool:
        struck = pool.submit(strike)
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                status = actions.train(settings)
        finally:
            done.set()
    found = LOST.search(said.getvalue())
    directory = Path(settings.output_dir)
    if (blow := struck.result()) is None:
        return Kill("nothing: the run was over", status == 0, float("nan"))
    at, kind = blow
    began = [bar.start for bar in timeline.read(directory) if bar.name == "step" and bar.start > at]
    hit = "that nobody missed" if found is None else f"of {found[1]} in {found[2]}" if found[1] else "at the start"
    return Kill(f"{kind} {hit}", status == 0, began[0] - at if found and began else float("nan"))


@contextlib.contextmanager
def place_of(nodes: int, ranks: int) -> Iterator[Place]:
    """This machine, or a Ray cluster of so many nodes on it, any but one of which has room for all."""
    if not nodes:
        yield Machine()
        return
    from ray.cluster_utils import Cluster

    # nodes join from a thread, where Ray cannot set the handlers of signals that it sets for an end by itself
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0}, shutdown_at_exit=False)
    try:
        yield Nodes(cluster, nodes, -(-ranks // max(nodes - 1, 1)))
    finally:
        cluster.shutdown()


def main(runs: int = 100, ranks: int = 1, steps: int = 6, seed: int = 0, nodes: int = 0) -> None:
    """So many runs, each with a seed of its own from the first on; pools have so many ranks each, in processes of this
    machine, or with `nodes` on so many nodes of a Ray cluster."""
    kinds: dict[str, list[Kill]] = defaultdict(list)
    with TemporaryDirectory() as directory, place_of(nodes, 4 * ranks + 2) as place:
        task = Path(directory)
        write_task(task)
        settings = settings_of(task, task / "undisturbed", place.cluster, ranks, steps)
        with contextlib.redirect_stdout(io.StringIO()):
            actions.train(settings)
        expected = list(jsonl.read(task / "undisturbed" / "digests.jsonl"))
        took = statistics.median(bar.seconds for bar in timeline.read(task / "undisturbed") if bar.name == "step")
        for number in range(seed, seed + runs):
            settings = settings_of(task, task / f"run_{number}", place.cluster, ranks, steps)
            kill = killed(place, settings, number, took)
            equal = kill.equal and list(jsonl.read(task / f"run_{number}" / "digests.jsonl")) == expected
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
