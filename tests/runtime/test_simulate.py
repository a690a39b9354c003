"""The simulated mesh: who is where, what goes in and out, and what happens when a rank goes wrong."""

import contextvars
import threading
import time

import pytest
import torch
import torch.distributed as dist

from fppo import losses, tree
from fppo.runtime import _thread_group
from fppo.runtime.mesh import Mesh, all_reduce
from fppo.runtime.simulate import simulate
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from fppo_kernels import collectives
from tests import tiny

AXES = {"replicate": 2, "shard": 3}


def test_ranks_stand_in_the_order_of_a_device_mesh():
    places = simulate(AXES, lambda mesh: (mesh["replicate"].rank, mesh["shard"].rank, mesh["sequence"].size))
    assert places == [(i, j, 1) for i in range(2) for j in range(3)]


def test_each_rank_gets_its_arguments_and_sums_over_its_own_axis():
    xs = [torch.tensor([float(10**rank)]) for rank in range(6)]

    def sums(mesh, x, name):
        return [collectives.all_reduce(x, mesh[axis]).item() for axis in ("replicate", "shard")] + [name]

    found = simulate(AXES, sums, xs, "abcdef")
    assert found[1] == [10010, 111, "b"]
    assert found[5] == [100100, 111000, "f"]


@pytest.mark.parametrize(
    ("op", "expected"),
    [("SUM", [12.0, 2.0]), ("AVG", [4.0, 2 / 3]), ("MAX", [7.0, 3.0]), ("MIN", [2.0, -2.0]), ("PRODUCT", [42.0, -6.0])],
)
def test_ranks_reduce_by_each_operation(op, expected):
    xs = [torch.tensor([a, b]) for a, b in ((2.0, 1.0), (3.0, -2.0), (7.0, 3.0))]
    found = simulate({"shard": 3}, lambda mesh, x: all_reduce(x, mesh["shard"], getattr(dist.ReduceOp, op)), xs)
    for each in found:
        torch.testing.assert_close(each, torch.tensor(expected))


def test_operations_that_the_simulated_mesh_has_not_are_named():
    with pytest.raises(ValueError, match="does not reduce by BAND; it knows SUM, AVG, MAX, MIN and PRODUCT"):
        simulate({"shard": 2}, lambda mesh: all_reduce(torch.ones(2).int(), mesh["shard"], dist.ReduceOp.BAND))


def test_the_number_of_arguments_must_be_that_of_the_ranks():
    with pytest.raises(ValueError, match="6 ranks: give 6 arguments for them, not 2"):
        simulate(AXES, lambda mesh, x: x, [1, 2])
    with pytest.raises(ValueError, match="mesh axes must be 1 or larger"):
        simulate({"shard": 0}, lambda mesh: None)
    with pytest.raises(ValueError, match="unknown mesh axes"):
        simulate({"rows": 2}, lambda mesh: None)


REFUSED = {
    "all_reduce": lambda x, axis: collectives.all_reduce(x, axis),
    "all_gather": lambda x, axis: collectives.all_gather(x, axis),
    "reduce_scatter": lambda x, axis: collectives.reduce_scatter(x, axis),
    "all_to_all": lambda x, axis: collectives.all_to_all(x, axis, split_dim=0, concat_dim=1),
    "send": lambda x, axis: collectives.send(x, axis, target=1 - axis.rank),
    "receive": lambda x, axis: collectives.receive(x, axis, source=1 - axis.rank),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_that_are_not_on_a_cpu_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}.* on meta: a simulated mesh runs on CPUs"):
        simulate({"shard": 2}, lambda mesh: REFUSED[name](torch.ones(2, 2, device="meta"), mesh["shard"]))


def test_functions_of_torch_distributed_take_its_groups():
    def run(mesh):
        axis = mesh["shard"]
        group, x = axis.group, torch.full((2,), float(axis.rank + 1))
        largest, mean, product = x.clone(), x.clone(), x.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
        dist.all_reduce(product, op=dist.ReduceOp.PRODUCT, group=group, async_op=True).wait()
        parts = [torch.empty(2) for _ in range(3)]
        dist.all_gather(parts, x, group=group)
        scattered = torch.empty(2)
        dist.reduce_scatter(scattered, [x * i for i in range(3)], group=group)
        exchanged = [torch.empty(1) for _ in range(3)]
        dist.all_to_all(exchanged, [x[:1] * 10 ** (i + 1) for i in range(3)], group=group)
        dist.barrier(group=group)
        numbers = [largest[0], mean[0], product[0], *(p[0] for p in parts), scattered[0], *(e[0] for e in exchanged)]
        return [dist.get_world_size(group), *(n.item() for n in numbers)]

    for rank, found in enumerate(simulate({"shard": 3}, run)):
        assert found == [3, 3, 2, 6, 1, 2, 3, 6 * rank, *(i * 10 ** (rank + 1) for i in (1, 2, 3))]


def test_ranks_may_hold_different_numbers_of_rows_and_branch_on_them():
    def rows(mesh, lengths):
        axis = mesh["shard"]
        most = torch.tensor(max(lengths, default=0))
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=axis.group)
        return [most.item()] * len(lengths) if lengths else "none"

    assert simulate({"shard": 3}, rows, [[4, 9], [], [2]]) == [[9, 9], "none", [9]]


def test_the_first_error_of_a_rank_is_raised_with_its_place():
    def run(mesh):
        if mesh["shard"].rank == 1 and mesh["replicate"].rank == 0:
            raise KeyError("spilled")
        return collectives.all_reduce(torch.ones(1), mesh["shard"])

    with pytest.raises(KeyError, match="spilled") as caught:
        simulate(AXES, run)
    assert caught.value.__notes__ == ["on rank 1 of the simulated mesh {'replicate': 2, 'shard': 3}"]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda a, b: a.rank and collectives.all_reduce(torch.ones(1), a), "rank 0 has ended; rank 1 waits in"),
        (lambda a, b: time.sleep(0.1) if a.rank else collectives.all_reduce(torch.ones(1), a), "rank 1 has ended"),
        (lambda a, b: collectives.all_reduce(torch.ones(1 + a.rank), a), "call different collectives"),
        (lambda a, b: (collectives.all_reduce if a.rank else collectives.permute)(torch.ones(1), a), "different coll"),
        (lambda a, b: collectives.all_reduce(torch.ones(1), b if a.rank == b.rank else a), "no rank .* can go on"),
    ],
    ids=["ended", "ends later", "shapes", "names", "groups"],
)
def test_ranks_that_do_not_meet_fail_and_do_not_hang(run, message):
    with pytest.raises(RuntimeError, match=message):
        simulate({"replicate": 2, "shard": 2}, lambda mesh: run(mesh["shard"], mesh["replicate"]))


OTHER = {"dtype": lambda x: x.double(), "shape": lambda x: torch.cat([x, x])}
ALIKE = {
    **{name: REFUSED[name] for name in ("all_reduce", "all_gather", "reduce_scatter")},
    "reduce": lambda x, axis: dist.reduce(x, group=axis.group, group_dst=0),
    "broadcast": lambda x, axis: dist.broadcast(x, group=axis.group, group_src=0),
}


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("name", ALIKE)
def test_tensors_of_one_collective_must_be_alike_on_all_ranks(name, other):
    def run(mesh):
        x, axis = torch.ones(4), mesh["shard"]
        return ALIKE[name](OTHER[other](x) if axis.rank else x, axis)

    with pytest.raises(RuntimeError) as raised:
        simulate({"shard": 2}, run)
    sizes = [2, 4] if name == "reduce_scatter" else [4, 8]
    one, two = ("float32", sizes[0]), ("float64", sizes[0]) if other == "dtype" else ("float32", sizes[1])
    calls = [f"rank {i} called {name} of torch.{dtype} [{size}]" for i, (dtype, size) in enumerate((one, two))]
    assert str(raised.value) == f"the ranks of 'shard' call different collectives: {'; '.join(calls)}"


def test_one_rank_runs_at_a_time_between_collectives(monkeypatch):
    monkeypatch.setattr(_thread_group, "PATIENCE", 30.0)
    running, most = [], []

    def run(mesh):
        for _ in range(3):
            running.append(mesh["shard"].rank)
            time.sleep(0.002)
            most.append(len(running))
            running.remove(mesh["shard"].rank)
            collectives.all_reduce(torch.ones(1), mesh["shard"])

    simulate({"shard": 4}, run)
    assert set(most) == {1}


def test_ranks_may_wait_for_each_other_elsewhere():
    events = [threading.Event(), threading.Event()]

    def run(mesh):
        rank = mesh["shard"].rank
        for _ in range(2):
            collectives.all_reduce(torch.ones(1), mesh["shard"])
            events[rank].set()
            assert events[1 - rank].wait(30)
        return collectives.all_reduce(torch.ones(1), mesh["shard"]).item()

    assert simulate({"shard": 2}, run) == [2, 2]


def test_nothing_is_left_behind_and_meshes_nest():
    def outer(mesh):
        inner = simulate({"sequence": 2}, lambda m: collectives.all_reduce(torch.ones(1), m["sequence"]).item())
        return collectives.all_reduce(torch.tensor(inner), mesh["shard"]).tolist()

    threads = set(threading.enumerate())
    assert simulate({"shard": 2}, outer) == [[4, 4], [4, 4]]
    with pytest.raises(ZeroDivisionError):
        simulate({"shard": 2}, lambda mesh: 1 // mesh["shard"].rank)
    assert not set(threading.enumerate()) - threads
    assert not dist.is_initialized()


def test_grad_mode_and_context_are_the_callers():
    place = contextvars.ContextVar("place", default="none")
    place.set("here")
    with torch.no_grad():
        assert simulate({"shard": 2}, lambda mesh: (torch.is_grad_enabled(), place.get())) == [(False, "here")] * 2
    assert simulate({"shard": 2}, lambda mesh: torch.is_grad_enabled()) == [True, True]


@pytest.mark.slow
def test_an_update_over_shares_of_a_batch_is_that_of_one_process_and_repeats_to_the_bit():
    model, params = tiny.model_and_params("lm")
    batch, optimizer = tiny.experience(5, 7), adamw(schedule("constant", 1e-2), eps=1e-2)

    def update(mesh):
        state, _ = UpdateActor(
            forward=Forward(model, mesh=mesh),
            loss_fn=losses.ppo_clip,
            loop=Loop(mini_batch_size=7, micro_batching=MicroBatching(size=2), epochs=2),
            optimizer=optimizer,
        )(init_state(params, optimizer), batch)
        return state

    first, second = (simulate({"replicate": 2, "shard": 2}, update) for _ in range(2))
    expected = update(Mesh.local())
    assert len({str(tree.digest(state)) for state in [*first, *second]}) == 1
    for (path, a), (_, b) in zip(tree.leaves_with_paths(first[0]), tree.leaves_with_paths(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda m, path=path: f"{path}: {m}")
