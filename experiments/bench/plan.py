"""`fppo plan` beside runs: planned memory and the peak of real processes, bytes on the wire, seconds of planning.

    python experiments/bench/plan.py

Each run has processes of its own (two talk by gloo); the peak is the rise of their resident memory, state and all.
"mapped" has glibc map every tensor on its own, which is what is planned; "default" has its heap, which keeps much of
what is freed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config

from fppo.runtime.mesh import Mesh, Sharding
from fppo.studies.plan import passes
from fppo.studies.plan.case import Case, config_of, hardware_of
from fppo.studies.plan.measured import prepared, telling
from fppo.studies.plan.passes import model_of
from fppo.studies.plan.plan import plan, shard_numbers
from fppo.studies.plan.track import Tracker, peak_of

SIZES = {"17M": (384, 6), "50M": (640, 8)}  # width and layers
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# size, axis, ranks, stage, layers recomputed, log_probs, tokens of a pass
CASES = [
    ("17M", "shard", 1, 3, False, "chunked", 2048),
    ("17M", "shard", 1, 3, True, "chunked", 2048),
    ("17M", "shard", 1, 3, False, "reference", 2048),
    ("50M", "shard", 1, 3, False, "chunked", 2048),
    ("50M", "shard", 1, 3, True, "chunked", 4096),
    ("17M", "shard", 2, 1, False, "chunked", 2048),
    ("17M", "shard", 2, 2, False, "chunked", 2048),
    ("17M", "shard", 2, 3, False, "chunked", 2048),
    ("17M", "shard", 2, 3, True, "chunked", 2048),
    ("50M", "shard", 2, 3, True, "chunked", 2048),
    ("17M", "sequence", 2, 3, False, "chunked", 2048),
]


def config(width: int, layers: int) -> Qwen2Config:
    """A Qwen2 of this shape."""
    return Qwen2Config(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )


def case_of(size: str, axis: str, ranks: int, stage: int, again: bool, log_probs: str, tokens: int) -> Case:
    """One of CASES."""
    return Case(
        name=size,
        config=config(*SIZES[size]),
        hardware=hardware_of("cpu"),
        mesh={axis: ranks},
        sharding=Sharding(stage=stage),
        tokens=tokens,
        length=256,
        compute_dtype=None,
        checkpoint_layers=again,
        critic=True,
        log_probs=log_probs,
        full=True,
    )


def status_bytes(field: str) -> int:
    """Bytes of this process, by a field of its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def run(case: Case, name: str, mesh: Mesh) -> dict[str, Any]:
    """One stage on this rank: the rise of its resident memory, what it sent, and the seconds that it took."""
    sent: Counter[str] = Counter()

    def count(axis: str, op: str, size: int, *rest: Any) -> None:
        sent[axis] += size

    # what torch, gloo and the kernels take once
    small = attrs.evolve(case, config=config(128, 1), tokens=256)
    state, stage, _ = prepared(small, name, mesh, Tracker())
    stage(state)
    del state, stage
    gc.collect()
    before = status_bytes("VmRSS")
    state, stage, batch = prepared(case, name, telling(mesh, count), Tracker())
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    stage(state)
    del batch
    return {"peak": status_bytes("VmHWM") - before, "sent": dict(sent), "seconds": time.perf_counter() - start}


def rank_of(rank: int, options: Sequence[Any], name: str, directory: str) -> None:
    """One process of a run, that writes what it found."""
    torch.set_num_threads(1)
    case = case_of(*options)
    mesh = Mesh.local()
    if case.world > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=case.world)
        mesh = Mesh.of(init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh)))
    Path(directory, f"{rank}.json").write_text(json.dumps(run(case, name, mesh)))
    if case.world > 1:
        dist.barrier()
        dist.destroy_process_group()


def processes(options: Sequence[Any], name: str) -> dict[str, Any]:
    """The run of a case, in processes of its own: what the rank that the plan is of has found."""
    case = case_of(*options)
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(  # type: ignore[attr-defined]
            partial(rank_of, options=options, name=name, directory=directory), nprocs=case.world, start_method="spawn"
        )
        return json.loads(Path(directory, f"{passes.fullest_slice(case)}.json").read_text())


def compare(options: Sequence[Any], name: str) -> None:
    """One line: planned, measured with and without the heap, and bytes sent."""
    case = case_of(*options)
    phases = passes.run_stage(case, name)
    planned = peak_of(phases)[1].total
    wire = sum(sum(phase.cost.sent.values()) for phase in phases)
    results = []
    for extra in (MAPPED, {}):
        command = [sys.executable, __file__, "--run", json.dumps([options, name])]
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | extra).stdout
        results.append(json.loads(out.splitlines()[-1]))
    mapped, default = (x["peak"] for x in results)
    size, axis, ranks, stage, again, log_probs, tokens = options
    mesh = "1" if ranks == 1 else f"{axis} {ranks}" + (f", stage {stage}" if axis == "shard" else "")
    what = f"{size} {name.removeprefix('update ')}, {mesh}, {log_probs}{', recomputed' if again else ''}, {tokens}"
    sent = sum(results[0]["sent"].values())
    same = "-" if not sent else "equal" if sent == wire else f"{wire / sent - 1:+.2%}"
    print(
        f"{what:<52}{planned / 2**20:>9.0f}{mapped / 2**20:>9.0f}{planned / mapped - 1:>+8.1%}"
        f"{default / 2**20:>9.0f}{planned / default - 1:>+8.1%}{same:>8}",
        flush=True,
    )


def large() -> None:
    """A 70B model on 1,024 GPUs, from few layers and from all; and the shares of 64 ranks."""
    name, sizes = config_of("llama-3.1-70b")
    mesh = {"replicate": 8, "shard": 64, "sequence": 2}
    case = Case(name=name, config=sizes, hardware=hardware_of("h200"), mesh=mesh, checkpoint_layers=True)
    for full in (False, True):
        start = time.perf_counter()
        planned = plan(attrs.evolve(case, full=full))
        taken = time.perf_counter() - start
        how = "all 80 layers" if full else "from 4 and 5 layers"
        results = f"{planned.peak.total / 2**30:.3f} GiB, {planned.seconds:.2f} s a step, MFU {planned.mfu():.0%}"
        print(f"{name} on {case.world:,} h200, {how}: planned in {taken:.1f} s; {results}")
    for each in ("qwen2.5-0.5b", "qwen2.5-7b", "llama-3.1-70b"):
        cut = attrs.evolve(case, config=config_of(each)[1], mesh={"shard": 64})
        total = sum(shape.numel() for shape in model_of(cut, "actor").shapes.values())
        ratio = 64 * shard_numbers(cut, "actor") / total
        print(f"{each}: a 64th of the state is planned as {ratio - 1:+.3%} of total / 64")


def main() -> None:
    """Prints one line per case, then the large plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        print(json.dumps(processes(*json.loads(options.run))))
        return
    print(f"{'MiB':<52}{'planned':>9}{'mapped':>9}{'':>8}{'default':>9}{'':>8}{'sent':>8}")
    for each in CASES:
        compare(each, "update actor")
    for name in ("log-probs", "values", "update critic"):
        compare(CASES[0], name)
    print()
    large()


if __name__ == "__main__":
    main()
