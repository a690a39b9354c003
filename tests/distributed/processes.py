"""Functions on the ranks of a mesh of real gloo processes, called as `simulate` calls them on a simulated one."""

from __future__ import annotations

import math
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from fppo.runtime.mesh import Mesh
from tests.distributed.preloaded import PRELOADED


def server() -> ForkServerContext:
    """Processes come from one server of this one, that has imported everything and run nothing: thread pools that have
    run hang in a fork, and a process that starts by itself imports for seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _rank(rank: int, axes: Mapping[str, int], fn: Callable[[Mesh], Any], directory: str) -> None:
    torch.set_num_threads(1)
    size = math.prod(axes.values())
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=size)
    mesh = Mesh.of(init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)))
    torch.save(fn(mesh), f"{directory}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def start(axes: Mapping[str, int], fn: Callable[[Mesh], Any], directory: str) -> Any:
    """Starts the ranks, which work in `directory`: torch's ProcessContext, with `pids()` and `join()`."""
    server()
    worker = partial(_rank, axes=dict(axes), fn=fn, directory=directory)
    return mp.start_processes(worker, nprocs=math.prod(axes.values()), join=False, start_method="forkserver")  # type: ignore[attr-defined]


def wait(context: Any) -> None:
    """Returns when all ranks have; raises for the first one that failed or was killed, and ends the others."""
    while not context.join():
        pass


def run(axes: Mapping[str, int], fn: Callable[[Mesh], Any]) -> list[Any]:
    """What `fn(mesh)` returns on every rank; `fn` is a function of a module, and returns what torch.save takes."""
    with tempfile.TemporaryDirectory() as directory:
        context = start(axes, fn, directory)
        wait(context)
        return [torch.load(Path(directory) / f"{rank}.pt") for rank in range(math.prod(axes.values()))]
