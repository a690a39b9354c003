"""Checkpoints of real processes: read on other meshes, and whole whenever a rank is killed."""

import os
import signal
import time
from functools import partial

import attrs
import pytest
import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException  # type: ignore[attr-defined]

from fppo import tree
from fppo.key import Key
from fppo.runtime import checkpoint, fsdp
from fppo.runtime.mesh import Mesh, Sharding
from tests.distributed import processes

WIDTHS = {"a": (7, 3), "b": (1,), "c": (5,)}
SHAPES = {f"['params']['{name}']": torch.Size(shape) for name, shape in WIDTHS.items()}


def state(seed, wide=1):
    g = torch.Generator().manual_seed(seed)
    params = {name: torch.randn(*shape, generator=g).bfloat16() for name, shape in WIDTHS.items()}
    return {"params": params, "filler": torch.full((wide,), float(seed)), "key": Key(seed)}


def cut(value, mesh):
    mesh = attrs.evolve(mesh, sharding=Sharding())
    return {**value, "params": fsdp.shard(value["params"], mesh)}, mesh


def save(mesh, directory, step=3):
    held, mesh = cut(state(step), mesh)
    pending = checkpoint.begin_save(held, directory, step, mesh=mesh, shapes=SHAPES)
    return str(pending.wait())


def load(mesh, directory, step=3):
    """Whether what is loaded is this rank's part, bit for bit."""
    held, mesh = cut(state(0), mesh)
    found = checkpoint.load(held, directory, step, mesh=mesh, shapes=SHAPES)
    return tree.digest(found) == tree.digest(cut(state(step), mesh)[0])


@pytest.mark.slow
def test_two_processes_save_and_one_and_four_load(tmp_path):
    paths = processes.run({"shard": 2}, partial(save, directory=tmp_path))
    assert paths == [str(tmp_path / "step_00000003")] * 2
    assert load(Mesh.local(), tmp_path)
    assert processes.run({"replicate": 2, "shard": 2}, partial(load, directory=tmp_path)) == [True] * 4


def save_on_and_on(mesh, directory):
    step = 0
    while True:
        step += 1
        held, sharded = cut(state(step, wide=100_000), mesh)
        checkpoint.begin_save(held, directory, step, mesh=sharded, shapes=SHAPES, keep=2, timeout=90).wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path, rank):
    directory = tmp_path / "checkpoints"
    context = processes.start({"shard": 2}, partial(save_on_and_on, directory=directory), str(tmp_path))
    limit = time.monotonic() + 200
    while max(checkpoint.steps(directory), default=0) < 3 and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.1 * torch.rand((), generator=torch.Generator().manual_seed(rank)).item())
    os.kill(context.pids()[rank], signal.SIGKILL)
    before = checkpoint.steps(directory)[-1]
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):  # the other one may fail first, alone
        processes.wait(context)
    template = state(0, wide=100_000)
    step = checkpoint.steps(directory)[-1]
    assert step >= before >= 3
    assert tree.digest(checkpoint.load(template, directory, step)) == tree.digest(state(step, wide=100_000))
    checkpoint.begin_save(state(99), directory, 99, keep=1).wait()
    assert [path.name for path in directory.iterdir()] == ["step_00000099"]
