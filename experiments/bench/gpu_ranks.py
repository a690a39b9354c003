"""Collectives between the GPUs of this machine, over NCCL: what they give, and how fast.

In a dry run they are of two processes, over gloo. It starts itself as a process for each rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from gpu_model import build, experience, parameters
from gpu_step import differing, updates
from gpu_tools import FULL, TINY, Plan, Record, Skipped, attempt, check, measure, once, table
from torch import Tensor

from fppo import models
from fppo.runtime.launch import Place, joined
from fppo.runtime.mesh import LOCAL, Mesh, Sharding
from fppo_kernels import collectives
from fppo_kernels.collectives import Axis

BANDWIDTH = 10.0  # GB/s over each rank's links: PCIe's, where NVLink gives ten times that
Collective = Callable[[Tensor, Axis], Tensor]
ALL: dict[str, Collective] = {
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "all_reduce": collectives.all_reduce,
    "all_to_all": lambda x, axis: collectives.all_to_all(x, axis, split_dim=0, concat_dim=1),
}


def bench_collectives(plan: Plan) -> list[Record]:
    """Each collective in float32 and bfloat16. Raises Skipped with fewer than two GPUs."""
    ranks = 2 if plan.device.type == "cpu" else torch.cuda.device_count()
    if ranks < 2:
        raise Skipped(f"{ranks} GPU: NCCL's collectives need two")
    place = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks)}
    command = [sys.executable, __file__, plan.device.type, *free_ports(len(meshes(ranks, plan)))]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **place, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
        )
        for r in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"ranks ended with {[process.returncode for process in processes]}")
    records, cut = json.loads(outputs[0].splitlines()[-1])
    columns = {"cut, ms": ".1f", "whole, ms": ".1f", "differs": ".2g"}
    print(table(f"an update cut over {ranks} ranks, and whole on each", columns, cut))
    print(table(f"collectives of {ranks} ranks", {"ms": ".3f", "GB/s": ".1f", "error": ".1g"}, records))
    verdicts = [check(f"{r['name']}: error", r["error"], 1e-6) for r in records]
    verdicts += [check(f"{r['name']}: GB/s", r["GB/s"], BANDWIDTH, least=True) for r in records]
    for r in cut:
        name = f"an update on {r['name']}"
        failed = {"name": name, "error": r.get("absent"), "passed": False}
        verdicts.append(
            failed if "absent" in r else check(f"{name}: what differs, of what changed", r["differs"], 0.02)
        )
    return [*records, *cut, *verdicts]


def meshes(ranks: int, plan: Plan) -> list[dict[str, int]]:
    """The meshes to try: all ranks on the shard axis, then two on each of the others; in a dry run on the last."""
    others = ("replicate", "sequence", "context", "tensor", "pipeline") if ranks % 2 == 0 else ()
    others = others[-1:] if plan.device.type == "cpu" else others
    return [{"shard": ranks}, *({"shard": ranks // 2, name: 2} for name in others)]


def free_ports(count: int) -> list[str]:
    """So many ports that nobody listens at."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [str(probe.getsockname()[1]) for probe in probes]


def expected(name: str, x: Callable[[int], Tensor], rank: int, ranks: int) -> Tensor:
    """What a collective is to give a rank, of the ranks' tensors."""
    whole = [x(r) for r in range(ranks)]
    match name:
        case "all_gather":
            return torch.cat(whole)
        case "reduce_scatter":
            return sum(whole[1:], whole[0]).chunk(ranks)[rank]
        case "all_reduce":
            return sum(whole[1:], whole[0])
        case _:
            return torch.cat([y.chunk(ranks)[rank] for y in whole], 1)


def measured(name: str, plan: Plan, axis: Axis, dtype: torch.dtype) -> Record:
    """A collective of whole numbers, which add up exactly in any dtype; and of many, timed."""

    def make(rank: int) -> Tensor:
        g = torch.Generator().manual_seed(rank)
        return torch.randint(-8, 8, (axis.size * 8, 33), generator=g).to(plan.device, dtype)

    got = ALL[name](make(axis.rank), axis)
    error = float((got - expected(name, make, axis.rank, axis.size)).abs().max())
    x = torch.ones(axis.size * 8, plan.collective // (axis.size * 8), dtype=dtype, device=plan.device)
    taken = measure(lambda: ALL[name](x, axis), plan.device, repeats=plan.repeats)["seconds"]
    sent = x.nbytes * {"all_gather": axis.size - 1, "all_reduce": 2 * (axis.size - 1) / axis.size}.get(
        name, (axis.size - 1) / axis.size
    )
    return {"name": f"{name} {dtype}", "ms": 1e3 * taken, "GB/s": sent / taken / 1e9, "error": error}


def updated(plan: Plan, mesh: Mesh) -> Record:
    """Updates of a state that is cut over the ranks, and of a whole one: where they end, and how long they take."""
    model, batch = build(plan.small, plan), experience(plan, 0, plan.small.vocabulary)
    start = parameters(model, plan.device)
    ends, taken = [], []
    for where in (mesh, LOCAL):
        update, state = updates(plan, model, where)
        held = [state]

        def step(update: Any = update, held: list[Any] = held) -> None:
            held[0] = update(held[0], batch)

        taken.append(min([once(step, plan.device) for _ in range(3)][1:]))
        ends.append(models.whole_params(models.place(model, where), held[0].params, where))
    return {"cut, ms": 1e3 * taken[0], "whole, ms": 1e3 * taken[1], "differs": differing(start, *ends)}


def worker(plan: Plan, ports: Sequence[str]) -> None:
    """One rank; the first prints what all of them measured together."""
    records: list[Record] = []
    cut: list[Record] = []
    world = int(os.environ["WORLD_SIZE"])
    for sizes, port in zip(meshes(world, plan), ports, strict=True):
        os.environ["MASTER_PORT"] = port
        place = Place.of_environment()
        if plan.device.type == "cuda":
            plan = plan._replace(device=torch.device("cuda", place.local_rank))
            torch.cuda.set_device(plan.device)
        with joined(sizes, place, plan.device, timeout=120.0, sharding=Sharding()) as (mesh, _, _):
            for dtype in (torch.float32, torch.bfloat16) if not records else ():
                records += [measured(name, plan, mesh["shard"], dtype) for name in ALL]
            name = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
            cut.append({"name": name, **attempt(partial(updated, plan, mesh))})
    if place.rank == 0:
        print(json.dumps([records, cut]), flush=True)


if __name__ == "__main__":
    worker(TINY if sys.argv[1] == "cpu" else FULL, sys.argv[2:])
