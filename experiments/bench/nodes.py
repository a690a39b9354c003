"""The quickstart with actor, critic and engine on three Ray nodes of this machine, each of which is removed on the way.

    python experiments/bench/nodes.py
    python experiments/bench/nodes.py --steps 12 --removed 1     # a shorter run, of which one node is removed

Another node joins in the place of each. Prints what is lost, how the run ends beside that of one process and that of
three nodes which stay, and whether all that it wrote of batches and states is the same. Needs Ray: pip install -e
".[ray]".
"""

# pyright: reportMissingImports=false
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tyro

from fppo import quickstart
from fppo.assembly import machine
from fppo.report.write import held_out_change
from fppo.runs import jsonl
from fppo.settings import files
from fppo.settings.train import TrainSettings

SLOW = {"worker_register_timeout_seconds": 600}  # of a machine that others are at work on
POOLS = {"actor": "policy", "critic": "value", "rollout": "engines"}


def settings_of(task: Path, name: str, steps: int | None, address: str | None = None) -> TrainSettings:
    """The quickstart's, of all its steps or so many, in one process, or on the cluster at an address."""
    plain = quickstart.settings(task, 0)
    changes: dict[str, Any] = {"output_dir": str(task / name), "device": "cpu", "digest.every": 1}
    steps = steps or plain.steps
    changes |= {"steps": steps, "checkpoint.every": max(1, steps // 3)}  # as the quickstart's, of its steps
    if address is not None:
        changes |= {
            "placement.cluster": address,
            "placement.pools": {pool: {"ranks": 1, "threads": 1} for pool in POOLS.values()},
            **{f"placement.roles.{role}": pool for role, pool in POOLS.items()},
            "placement.engines.rows": plain.rollout.batch_size,  # a request is what one process answers at once
        }
    return machine.resolved(files.check(files.replace(plain, changes)))[0]


def trained(settings: TrainSettings, meanwhile: Callable[[int], None] = lambda steps: None) -> Path:
    """The directory of the run, by `fppo train`; `meanwhile` is told again and again how many steps it has taken."""
    directory = Path(settings.output_dir)
    if len(jsonl.read(directory / "digests.jsonl")) == settings.steps:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    files.save(settings, place := directory.parent / f"{directory.name}.toml")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as the pools' ranks: bits depend on it
    with subprocess.Popen([sys.executable, "-m", "fppo", "train", str(place)], env=environment) as run:
        while run.poll() is None:
            meanwhile(len(jsonl.read(directory / "digests.jsonl")))
            time.sleep(0.1)
    if run.returncode:
        raise SystemExit(run.returncode)
    return directory


def main(task: Path | None = None, seed: int = 0, steps: int | None = None, removed: int = len(POOLS)) -> None:
    """So many nodes are `removed`, one after the other. What `task` holds of an earlier time is not made again. The
    seed is that of the policy to begin with."""
    from ray.cluster_utils import Cluster

    with TemporaryDirectory() as place:
        task = task or Path(place)
        if not (task / quickstart.MODEL).exists():
            quickstart.prepare(task, seed)
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": SLOW}
        )
        nodes = [cluster.add_node(num_cpus=1) for _ in POOLS]
        settings = settings_of(task, "placed", steps, cluster.address)
        gone = 0

        def remove(done: int) -> None:
            nonlocal gone
            if gone < removed and done > (gone + 1) * settings.steps // (removed + 1):
                print(f"after step {done - 1}: node {gone + 1} is removed, and another joins", flush=True)
                cluster.remove_node(nodes[gone], allow_graceful=False)
                cluster.add_node(num_cpus=1)
                gone += 1

        runs = {
            "one process": trained(settings_of(task, "alone", steps)),
            "three nodes": trained(settings_of(task, "undisturbed", steps, cluster.address)),
            f"three nodes, {removed} removed": trained(settings, remove),
        }
        cluster.shutdown()
        for name, directory in runs.items():
            before, after = held_out_change(directory)
            print(f"{name}: held-out exact match {before:.1%} before PPO, {after:.1%} after")
        one, *others = (list(jsonl.read(directory / "digests.jsonl")) for directory in runs.values())
        for name, other in zip(list(runs)[1:], others, strict=True):
            equal = sum(x == y for x, y in zip(one, other, strict=True))
            print(f"{name}: {equal} of {len(one)} steps are those of one process, bit for bit, in batch and state")


if __name__ == "__main__":
    tyro.cli(main)
