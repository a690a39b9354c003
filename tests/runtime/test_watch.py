"""Watched groups compute what the groups compute, and count what is sent."""

import time

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fppo import tree
from fppo.runtime.mesh import Mesh
from fppo.runtime.simulate import simulate
from fppo.runtime.watch import Traffic, Watch, WatchedGroup, watched
from fppo_kernels import collectives
from tests.distributed import processes

AXES = [{"shard": 2}, {"shard": 3}, {"replicate": 2, "shard": 2}]


def with_gradients(mesh: Mesh, size: int) -> dict[str, torch.Tensor]:
    """Every function of collectives.py once, with its gradient."""
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


def plain_functions(x: torch.Tensor, axis) -> dict:
    """Those of torch.distributed: the tensors that each one writes, and a call of it, by what is moved."""
    n, group = axis.size, axis.group
    whole, part = x.new_zeros(n * len(x)), x.new_zeros(len(x) // n)
    copies, parts, slots = x.clone(), list(x.clone().split(len(x) // n)), list(x.new_zeros(n, len(x) // n))
    lists = list(x.new_zeros(n, len(x)))
    names = ("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor")
    gather, scatter = (next(getattr(dist, name) for name in both if hasattr(dist, name)) for both in names)
    return {
        "all_gather": ([whole], lambda **how: gather(whole, x, group=group, **how)),
        "all_gather, a list": (lists, lambda **how: dist.all_gather(lists, x, group=group, **how)),
        "reduce_scatter": ([part], lambda **how: scatter(part, x, group=group, **how)),
        "all_to_all": ([x], lambda **how: dist.all_to_all_single(x, copies, group=group, **how)),
        "all_to_all, a list": (slots, lambda **how: dist.all_to_all(slots, parts, group=group, **how)),
        "all_reduce": ([copies], lambda **how: dist.all_reduce(copies, group=group, **how)),
        "largest": ([copies], lambda **how: dist.all_reduce(copies, dist.ReduceOp.MAX, group=group, **how)),
        "broadcast": ([copies], lambda **how: dist.broadcast(copies, group=group, group_src=1, **how)),
        "reduce": ([copies], lambda **how: dist.reduce(copies, group=group, group_dst=0, **how)),
        "barrier": ([], lambda **how: dist.barrier(group, **how)),
    }


def without_gradients(mesh: Mesh, size: int) -> dict[str, torch.Tensor]:
    """Every function of torch.distributed once, both at once and in the background."""
    axis, found = mesh["shard"], {}
    for ahead in (False, True):
        x = torch.arange(size * axis.size, dtype=torch.float32) + 100 * axis.rank
        for name, (written, call) in plain_functions(x, axis).items():
            if name == "all_to_all, a list" and dist.is_initialized():
                continue  # not on gloo
            work = call(async_op=ahead)
            assert (work is not None) == ahead
            if ahead:
                work.wait()
                assert work.is_completed() in (False, True)  # gloo says so a moment later
            if name != "reduce" or axis.rank == 0:  # what the others have then depends on the backend
                found |= {f"{name} {ahead} {i}": y.clone() for i, y in enumerate(written)}
    return found


def everything(mesh: Mesh, size: int) -> dict[str, str]:
    return tree.digest(with_gradients(mesh, size) | without_gradients(mesh, size))


@pytest.mark.slow
@given(axes=st.sampled_from(AXES), size=st.integers(1, 5))
def test_results_and_gradients_are_those_of_the_groups_themselves(axes, size):
    plain = simulate(axes, lambda mesh: everything(mesh, size))
    assert simulate(axes, lambda mesh: everything(watched(mesh)[0], size)) == plain


@given(axes=st.sampled_from(AXES), size=st.integers(1, 5))
def test_the_bytes_of_each_collective_are_those_of_a_ring(axes, size):
    def counted(mesh):
        seen, watch = watched(mesh)
        axis = seen["shard"]
        x = torch.zeros(axis.size * size)
        calls = {name: call for name, (_, call) in plain_functions(x, axis).items()}
        calls["permute"] = lambda: collectives.permute(x, axis)
        y, sizes = x.clone(), [size] * axis.size
        calls["all_to_all, sizes"] = lambda: dist.all_to_all_single(y, x, sizes, sizes, group=axis.group)
        found = {}
        for name, call in calls.items():
            before = watch.traffic()["shard"]
            call()
            found[name] = watch.traffic()["shard"].since(before)[:2]
        assert watch.waiting is watch.oldest() is None
        if "replicate" in axes:
            assert watch.traffic()["replicate"] == Traffic()
        return found

    n = axes["shard"]
    part = 4 * size  # bytes that x has for each rank
    expected = {
        "all_gather": (n - 1) * n * part,
        "all_gather, a list": (n - 1) * n * part,
        "reduce_scatter": (n - 1) * part,
        "all_to_all": (n - 1) * part,
        "all_to_all, a list": (n - 1) * part,
        "all_to_all, sizes": (n - 1) * part,
        "all_reduce": 2 * (n - 1) * part,
        "largest": 2 * (n - 1) * part,
        "broadcast": n * part,
        "reduce": n * part,
        "barrier": 0,
        "permute": n * part,
    }
    for found in simulate(axes, counted):
        assert found == {name: (1, size) for name, size in expected.items()}


def test_traffic_since_a_moment_is_what_came_after_it():
    assert Traffic(5, 70, 2.5).since(Traffic(2, 30, 1.0)) == Traffic(3, 40, 1.5)


def test_a_group_knows_its_ranks_among_all():
    def ranks(mesh):
        return watched(watched(mesh)[0])[1].ranks

    found = simulate({"replicate": 2, "shard": 2}, ranks)
    assert found[2] == {"replicate": (0, 2), "shard": (2, 3)}
    assert simulate({"replicate": 1, "shard": 2}, ranks)[0] == {"shard": (0, 1)}


def test_a_rank_has_its_place_on_the_wide_axes_as_text_where_there_are_several():
    """On one axis alone the place is the rank; stages are named all the same."""
    for axes, place in (
        ({"replicate": 2, "shard": 2, "tensor": 1}, "replicate 1, shard 0"),
        ({"shard": 3, "tensor": 1}, ""),
        ({"pipeline": 3}, "pipeline 2"),
    ):
        assert simulate(axes, lambda mesh: watched(mesh)[1].place)[2] == place


class Event:
    """One of a GPU's, which tells the time in ms once `done` is set."""

    def __init__(self, at):
        self.at, self.done = at, False

    def query(self):
        return self.done

    def elapsed_time(self, end):
        assert self.done
        assert end.done
        return end.at - self.at


class Group:
    """A group of a GPU: what is called with async_op gives work, other calls give None."""

    def __init__(self, watch):
        self.watch = watch

    def rank(self):
        return 0

    def size(self):
        return 2

    def allreduce(self, tensors, opts):
        assert self.watch.waiting is not None
        if isinstance(opts, Exception):
            raise opts
        return Group.Work() if opts.asyncOp else None

    class Work:
        def wait(self):
            return True

        def is_completed(self):
            return False


class Options:
    def __init__(self, ahead):
        self.asyncOp = ahead


def test_on_a_gpu_the_seconds_are_those_its_stream_stood_still_and_what_is_queued_is_waited_for(monkeypatch):
    made = []

    def event(device):
        made.append(Event(1000 * len(made)))
        return made[-1]

    monkeypatch.setattr("fppo.runtime.watch._event", lambda device: None if device is None else event(device))
    watch = Watch({"shard": (0, 1)})
    group, x = WatchedGroup(Group(watch), "shard", watch), torch.ones(2)
    assert group.allreduce([x], Options(False)) is None
    work = group.allreduce([x], Options(True))
    assert len(made) == 2  # what is only begun does not stop the stream
    assert work.wait()
    assert len(made) == 4
    first = watch.oldest()
    assert first[:3] == ("shard", "all_reduce", 1)
    assert watch.traffic()["shard"] == Traffic(2, 2 * 8, pytest.approx(0.0, abs=0.1))
    made[0].done = made[1].done = True
    assert watch.oldest()[:3] == ("shard", "all_reduce", 2)
    assert watch.traffic()["shard"].seconds == pytest.approx(1.0, abs=0.1)
    made[2].done = made[3].done = True
    assert watch.oldest() is None
    assert watch.traffic()["shard"].seconds == pytest.approx(2.0, abs=0.1)


def test_a_collective_that_fails_is_still_waited_for_and_one_called_wrongly_is_not():
    watch = Watch({"shard": (0, 1)})
    group, x = WatchedGroup(Group(watch), "shard", watch), torch.ones(2)
    error = RuntimeError("connection reset")
    with pytest.raises(RuntimeError, match="reset"):
        group.allreduce([x], error)
    assert watch.error is error
    assert watch.waiting[:3] == ("shard", "all_reduce", 1)
    with pytest.raises(TypeError):
        group.allreduce([x], TypeError("wrong"))
    assert watch.waiting is watch.error is None
    work = group.allreduce([x], Options(True))
    group.allreduce([x], Options(True))
    seen = []
    work._work.wait = lambda: seen.append(watch.waiting)
    work.wait()
    assert seen[0][:3] == ("shard", "all_reduce", 3)  # its own number, not that of the last one


def on_gloo(mesh: Mesh) -> dict:
    plain = everything(mesh, 3)
    seen, watch = watched(mesh)
    found = everything(seen, 3)
    before = watch.traffic()["shard"]
    x, axis = torch.zeros(1000), seen["shard"]
    work = dist.all_reduce(x, group=axis.group, async_op=True)
    quiet = watch.waiting is None
    assert work is not None
    time.sleep(2.0 * axis.rank)
    dist.barrier(axis.group)  # rank 0 waits here
    waited = watch.traffic()["shard"].since(before).seconds
    work.wait()
    calls, ranks = watch.traffic()["shard"].calls, watch.ranks
    return {"plain": plain, "found": found, "quiet": quiet, "waited": waited, "calls": calls, "ranks": ranks}


@pytest.fixture(scope="module")
def gloo():
    return processes.run({"shard": 2}, on_gloo)


@pytest.mark.slow
def test_real_processes_get_the_same_results(gloo):
    for rank in gloo:
        assert rank["found"] == rank["plain"]
        assert rank["quiet"], "a collective in the background is not waited for"
        assert rank["ranks"] == {"shard": (0, 1)}
    assert gloo[0]["calls"] == gloo[1]["calls"]


@pytest.mark.slow
def test_the_seconds_are_those_that_a_rank_waits(gloo):
    assert gloo[0]["waited"] > 1.0
    assert gloo[1]["waited"] < 1.0


def test_a_message_is_counted_at_both_of_its_ends():
    def run(mesh):
        seen, watch = watched(mesh)
        axis, x = seen["pipeline"], torch.arange(5.0)
        if axis.rank == 0:
            for _ in range(2):
                collectives.send(x, axis, target=2).wait()
        if axis.rank == 2:
            received = [collectives.receive(torch.empty(5), axis, source=0).wait() for _ in range(2)]
            assert all(torch.equal(x, y) for y in received)
        return watch.traffic()["pipeline"][:2], watch.begun(), watch.place

    line = {"pipeline from rank 0 to rank 2": 2}
    assert simulate({"pipeline": 3}, run) == [
        ((2, 40), {"pipeline": 2} | line, "pipeline 0"),
        ((0, 0), {"pipeline": 0}, "pipeline 1"),
        ((2, 0), {"pipeline": 2} | line, "pipeline 2"),
    ]


def test_a_message_over_a_lane_is_counted_like_one_over_its_axis():
    def run(mesh):
        axis = mesh["pipeline"]
        lanes = dict.fromkeys([(0, 1), (1, 0)], axis.group)
        seen, watch = watched(Mesh({**mesh.axes, "pipeline": attrs.evolve(axis, lanes=lanes)}))
        axis, x = seen["pipeline"], torch.full((5,), float(axis.rank))
        assert all(lane.group is lanes[pair] for pair, lane in axis.lanes.items())
        message = collectives.receive(torch.empty(5), axis, source=1 - axis.rank)
        collectives.send(x, axis, target=1 - axis.rank).wait()
        assert torch.equal(message.wait(), 1 - x)
        return watch.traffic()["pipeline"][:2], watch.begun()

    lines = {"pipeline from rank 0 to rank 1": 1, "pipeline from rank 1 to rank 0": 1}
    assert simulate({"pipeline": 2}, run) == [((2, 20), {"pipeline": 2} | lines)] * 2
