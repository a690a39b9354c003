"""A mesh simulated in one process: one thread per rank, and process groups whose collectives are copies.

torch's LocalTensor mode does not fit, since ranks hold different numbers of rows: its `tolist()` of lengths that differ
between ranks is not a list of numbers, and Python cannot branch on it. With threads every rank is plain Python.
"""

from __future__ import annotations

import contextvars
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from fppo.runtime._thread_group import Meeting, Stopped, ThreadGroup, World
from fppo.runtime.mesh import DENSE, SHARD_AXES, Mesh, lines_of
from fppo_kernels.collectives import Axis

T = TypeVar("T")


def simulate(axes: Mapping[str, int], fn: Callable[..., T], *per_rank: Sequence[Any]) -> list[T]:
    """Run `fn(mesh, *arguments)` on every rank of a mesh with these axes, such as `{"shard": 2, "sequence": 2}`, and
    return the results by rank.

    Ranks are numbered as in torch's DeviceMesh, the last axis fastest. Each of `per_rank` holds one argument per rank.
    `mesh` is like that of real processes: `mesh["shard"]` has a rank and a process group for `fppo_kernels.collectives`
    and torch.distributed. Sums are in the order of the ranks, so equal inputs give equal bits.

    Process-wide state is shared by the ranks, such as torch's global generators: draw from an `fppo.key.Key`. torch
    runs backward passes on a GPU in one thread, where collectives would deadlock: tensors outside the CPU raise
    ValueError.

    The first error of any rank stops all and is raised, with a note that names the rank. A collective that can never
    complete, because ranks have ended or wait in another one, is such an error. No process group is left behind.
    """
    meshes = _meshes(axes)
    size = len(meshes)
    wrong = [len(x) for x in per_rank if len(x) != size]
    if wrong:
        raise ValueError(f"mesh {dict(axes)} has {size} ranks: give {size} arguments for them, not {wrong[0]}")
    world, grad = meshes[0][0], torch.is_grad_enabled()
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        with torch.set_grad_enabled(grad), world.turns.shared():
            try:
                results[rank] = fn(meshes[rank][1], *(x[rank] for x in per_rank))
                world.end(rank)
            except Stopped as stopped:
                world.fail(rank, stopped)  # an error that follows from the one that stopped this rank
            except BaseException as error:
                world.fail(rank, error)

    contexts = [contextvars.copy_context() for _ in range(size)]
    threads = [
        threading.Thread(target=contexts[rank].run, args=(run, rank), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt from the keyboard
        world.fail(None, error)
        raise
    if world.error is not None:
        if world.failed is not None:
            world.error.add_note(f"on rank {world.failed} of the simulated mesh {dict(axes)}")
        raise world.error
    return results


def _meshes(axes: Mapping[str, int]) -> list[tuple[World, Mesh]]:
    """One mesh per rank, in order, all with the same world."""
    bad = {name: size for name, size in axes.items() if size < 1}
    if bad:
        raise ValueError(f"mesh axes must be 1 or larger, got {bad}")
    shape = list(axes.values())
    ranks = torch.arange(math.prod(shape)).reshape(shape)
    world = World(ranks.numel())
    axes_of: list[dict[str, Axis]] = [{} for _ in range(ranks.numel())]
    together = {name: (name,) for name in axes} | ({DENSE: SHARD_AXES} if axes.get("expert", 1) > 1 else {})
    for name, own in together.items():
        for line in lines_of(ranks, list(axes), own):
            meeting = Meeting(world, name, line)
            for number, rank in enumerate(line):
                group = ThreadGroup(meeting, number) if len(line) > 1 else None
                axes_of[rank][name] = Axis(len(line), number, group)
    return [(world, Mesh(axes=axes)) for axes in axes_of]
