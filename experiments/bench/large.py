"""A run whose checkpoint is larger than the memory that each of its processes may have.

    python experiments/bench/large.py

makes a random model, gives every process of a run that limit (RLIMIT_DATA: memory that a process may write to), and
trains a policy beside a reference for two steps: load, sample, log-probs, update, checkpoint, export. A second start
goes on for one step from the checkpoint. One process is tried with the same limit first: it fails. Linux only.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tyro

from fppo import models, quickstart
from fppo.key import Key
from fppo.runs import jsonl, session
from fppo.settings import files

MIB = 1 << 20


def make(task: Path, *, width: int, layers: int) -> None:
    """A random model with the quickstart's tokenizer, and the quickstart's prompts."""
    tokenizer = quickstart.character_tokenizer()
    model = quickstart.small_model(len(tokenizer), width=width, layers=layers)
    models.save(model, models.init_params(model, Key(0)), task / quickstart.MODEL, tokenizer=tokenizer)
    for name, rows in zip((quickstart.TRAIN, quickstart.TEST), quickstart.sums(), strict=True):
        lines = [json.dumps({"prompt": s.prompt, "answer": s.answer, "source": "addition"}) for s in rows]
        (task / name).write_text("\n".join(lines) + "\n")


def settings_file(task: Path, name: str, *, tensor: int, shard: int, steps: int) -> Path:
    """Settings of a run that trains a policy on a mesh."""
    changes: Mapping[str, Any] = {
        "output_dir": str(task / name),
        "device": "cpu",
        "steps": steps,
        "mesh.tensor": tensor,
        "mesh.shard": shard,
        "model.checkpoint_layers": True,
        "rollout.batch_size": 16,
        "rollout.n": 4,
        "algorithm.advantage": "grpo",
        "actor.mini_batch_size": 16,
        "checkpoint.every": 1,
        "checkpoint.keep": 1,
        "data.eval_path": [],
        "eval.every": 0,
        "eval.exact_values": False,
    }
    place = task / f"{name}.toml"
    files.save(files.check(files.replace(quickstart.settings(task, 0), changes)), place)
    return place


def size_mib(directory: Path) -> float:
    """Of all files below it."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) / MIB


def written_mib(process: int) -> tuple[int, float]:
    """The parent of a process, and what it holds of memory that is no file's; RLIMIT_DATA counts that and more."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
        return int(lines["PPid"]), int(lines["RssAnon"].split()[0]) / 1024
    except (OSError, KeyError):
        return 0, 0.0


def trained(file: Path, *, ranks: int, limit_mib: int) -> tuple[int, float]:
    """The exit status of `fppo train` with a limit for each of its processes, and the most that one of them held."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_mib * MIB, limit_mib * MIB))

    command = [sys.executable, "-m", "fppo", "train", str(file), "--nproc", str(ranks)]
    log = file.with_suffix(".log")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    most = 0.0
    with (
        log.open("w") as out,
        subprocess.Popen(command, env=environment, preexec_fn=limited, stdout=out, stderr=subprocess.STDOUT) as run,
    ):
        while run.poll() is None:
            held = [written_mib(int(process)) for process in os.listdir("/proc") if process.isdigit()]
            most = max([most, *(mib for parent, mib in held if parent == run.pid)])
            time.sleep(0.02)
    return run.returncode, most


def main(tensor: int = 4, shard: int = 1, limit_mib: int = 4000, width: int = 1024, layers: int = 40) -> None:
    with TemporaryDirectory() as place:
        task, ranks = Path(place), tensor * shard
        make(task, width=width, layers=layers)
        model = size_mib(task / quickstart.MODEL)
        print(f"model: {model:.0f} MiB; every process may have {limit_mib} MiB", flush=True)
        alone = settings_file(task, "alone", tensor=1, shard=1, steps=1)
        status, _ = trained(alone, ranks=1, limit_mib=limit_mib)
        said = (task / "alone.log").read_text().strip().splitlines()[-1]
        print(f"one process: exit status {status} ({said})", flush=True)
        for steps in (2, 3):
            began = time.monotonic()
            file = settings_file(task, "run", tensor=tensor, shard=shard, steps=steps)
            status, most = trained(file, ranks=ranks, limit_mib=limit_mib)
            if status:
                raise SystemExit(f"{ranks} ranks, exit status {status}\n{(task / 'run.log').read_text()[-2000:]}")
            done = [line["step"] for line in jsonl.read(task / "run" / "metrics.jsonl")]
            saved = size_mib(task / "run" / session.CHECKPOINTS)
            print(
                f"{ranks} ranks: {len(done)} steps; checkpoint {saved:.0f} MiB; the fullest rank held {most:.0f} MiB; "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
        exported = size_mib(task / "run" / session.MODEL)
        print(f"export: {exported:.0f} MiB")


if __name__ == "__main__":
    tyro.cli(main)
