"""Watched groups compute what the groups compute, and count what is sent."""

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fppo import tree
from fppo.runtime.mesh import Mesh
from fppo.runtime.simulate import simulate
from fppo.runtime.watch import Traffic, watched
from fppo_kernels import collectives
from tests.distributed import processes

AXES = [{"shard": 2}, {"shard": 3}, {"replicate": 2, "shard": 2}]


def every_collective(mesh: Mesh, size: int) -> dict[str, torch.Tensor]:
    """Every collective once, with its gradient."""
    axis = mesh["shard"]
    number = mesh["replicate"].rank * axis.size + axis.rank
    x = torch.arange(size * axis.size * axis.size, dtype=torch.float64).reshape(axis.size, -1) + number
    x.requires_grad_()
    made = {
        "all_gather": collectives.all_gather(x, axis),
        "reduce_scatter": collectives.reduce_scatter(x, axis),
        "all_reduce": collectives.all_reduce(x, axis),
        "all_to_all": collectives.all_to_all(x, axis, split_dim=0, concat_dim=1),
        "broadcast": collectives.broadcast(x, axis),
        "permute": collectives.permute(x, axis),
    }
    grads = {}
    for name, y in made.items():
        (grads[f"{name} gradient"],) = torch.autograd.grad(y.square().sum(), x)
    return {name: y.detach() for name, y in made.items()} | grads


@given(axes=st.sampled_from(AXES), size=st.integers(1, 5))
def test_results_and_gradients_are_those_of_the_groups_themselves(axes, size):
    plain = simulate(axes, lambda mesh: tree.digest(every_collective(mesh, size)))
    assert simulate(axes, lambda mesh: tree.digest(every_collective(watched(mesh)[0], size))) == plain


@given(axes=st.sampled_from(AXES), size=st.integers(1, 5))
def test_the_bytes_of_each_collective_are_those_of_a_ring(axes, size):
    def counted(mesh):
        seen, watch = watched(mesh)
        axis = seen["shard"]
        x = torch.zeros(axis.size * axis.size, size, dtype=torch.float32)
        found = {}
        for name, call in {
            "all_gather": lambda: collectives.all_gather(x, axis),
            "reduce_scatter": lambda: collectives.reduce_scatter(x, axis),
            "all_reduce": lambda: collectives.all_reduce(x, axis),
            "all_to_all": lambda: collectives.all_to_all(x, axis, split_dim=0, concat_dim=1),
            "broadcast": lambda: collectives.broadcast(x, axis),
            "barrier": lambda: dist.barrier(axis.group),
        }.items():
            before = watch.traffic()["shard"]
            call()
            found[name] = watch.traffic()["shard"].since(before)[:2]
        assert watch.waiting is None
        if "replicate" in axes:
            assert watch.traffic()["replicate"] == Traffic()
        return found

    n = axes["shard"]
    part = 4 * n * n * size  # bytes of x
    expected = {
        "all_gather": (1, (n - 1) * part),
        "reduce_scatter": (1, (n - 1) * part // n),
        "all_reduce": (1, 2 * ((n - 1) * part // n)),
        "all_to_all": (1, (n - 1) * part // n),
        "broadcast": (1, part),
        "barrier": (1, 0),
    }
    assert simulate(axes, counted) == [expected] * len(simulate(axes, lambda mesh: None))


def on_gloo(mesh: Mesh) -> dict:
    plain = tree.digest(every_collective(mesh, 3))
    seen, watch = watched(mesh)
    found = tree.digest(every_collective(seen, 3))
    before = watch.traffic()["shard"]
    x, axis = torch.zeros(1000), seen["shard"]
    work = dist.all_reduce(x, group=axis.group, async_op=True)
    quiet = watch.waiting is None
    assert work is not None
    time.sleep(0.3 * axis.rank)
    dist.barrier(axis.group)  # rank 0 waits here
    waited = watch.traffic()["shard"].since(before).seconds
    work.wait()
    return {"plain": plain, "found": found, "quiet": quiet, "waited": waited, "calls": watch.traffic()["shard"].calls}


@pytest.fixture(scope="module")
def gloo():
    return processes.run({"shard": 2}, on_gloo)


def test_real_processes_get_the_same_results(gloo):
    for rank in gloo:
        assert rank["found"] == rank["plain"]
        assert rank["quiet"], "a collective in the background is not waited for"
    assert gloo[0]["calls"] == gloo[1]["calls"]


def test_the_seconds_are_those_that_a_rank_waits(gloo):
    assert gloo[0]["waited"] > 0.2
    assert gloo[1]["waited"] < 0.2
