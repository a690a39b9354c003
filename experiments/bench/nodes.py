"""The quickstart with actor, critic and engine on three Ray nodes of this machine, each of which is removed on the way.

    python experiments/bench/nodes.py

Another node joins in the place of each. Prints what is lost, how the run ends beside that of one process, and whether
all that it wrote of batches and states is the same. Needs Ray: pip install -e ".[ray]".
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

POOLS = {"actor": "policy", "critic": "value", "rollout": "engines"}


def settings_of(task: Path, name: str, address: str | None = None) -> TrainSettings:
    """The quickstart's, in one process, or on the cluster at an address."""
    plain = quickstart.settings(task, 0)
    changes: dict[str, Any] = {"output_dir": str(task / name), "device": "cpu", "digest.every": 1}
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


def main(task: Path | None = None, seed: int = 0) -> None:
    """What `task` holds of an earlier time is not made again. The seed is that of the policy to begin with."""
    from ray.cluster_utils import Cluster

    with TemporaryDirectory() as place:
        task = task or Path(place)
        if not (task / quickstart.MODEL).exists():
            quickstart.prepare(task, seed)
        alone = trained(settings_of(task, "alone"))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        nodes = [cluster.add_node(num_cpus=1) for _ in POOLS]
        settings = settings_of(task, "placed", cluster.address)
        removed = 0

        def remove(steps: int) -> None:
            nonlocal removed
            if removed < len(nodes) and steps > (removed + 1) * settings.steps // (len(nodes) + 1):
                print(f"after step {steps - 1}: node {removed + 1} is removed, and another joins", flush=True)
                cluster.remove_node(nodes[removed], allow_graceful=False)
                cluster.add_node(num_cpus=1)
                removed += 1

        placed = trained(settings, remove)
        cluster.shutdown()
        for name, directory in (("one process", alone), ("three nodes", placed)):
            before, after = held_out_change(directory)
            print(f"{name}: held-out exact match {before:.1%} before PPO, {after:.1%} after")
        one, other = (list(jsonl.read(directory / "digests.jsonl")) for directory in (alone, placed))
        equal = sum(x == y for x, y in zip(one, other, strict=True))
        print(f"{equal} of {len(one)} steps are equal, bit for bit, in batch and state")


if __name__ == "__main__":
    tyro.cli(main)
