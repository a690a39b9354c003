"""The groups of a mesh, by a stand-in for torch.distributed: their ranks, their limits, and NCCL's device."""

import contextlib
from datetime import timedelta
from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo.runtime import launch
from fppo.runtime import mesh as meshes
from fppo.runtime.failure import Limits
from fppo.runtime.launch import Place, joined
from fppo.runtime.layout import Cut
from fppo.runtime.mesh import Axis, Mesh, Sharding
from fppo.runtime.parent import in_words


@pytest.fixture
def asked(monkeypatch):
    """What was asked of torch.distributed: keywords of its start, ranks and limit of each group."""
    asked = SimpleNamespace(start={}, groups=[])

    def new_group(ranks, *, timeout):
        asked.groups.append((tuple(ranks), timeout))
        return tuple(ranks)

    distributed = SimpleNamespace(
        init_process_group=lambda backend, **keywords: asked.start.update(keywords, backend=backend),
        new_group=new_group,
        group=SimpleNamespace(WORLD="everyone"),
        barrier=lambda: None,
        destroy_process_group=lambda: None,
        ProcessGroup=None,
    )
    monkeypatch.setattr(launch, "dist", distributed)
    monkeypatch.setattr(meshes, "dist", distributed)
    asked.met, asked.keys = [], []
    monkeypatch.setattr(
        launch, "rendezvous", lambda *of, **how: asked.met.append((*of, *how.items())) or iter([("store",)])
    )
    monkeypatch.setattr(launch, "own_keys", lambda store, attempt: asked.keys.append((store, attempt)))
    monkeypatch.setattr(launch, "PrefixStore", lambda name, store: name)
    monkeypatch.setenv(launch.RESTARTS, "2")
    asked.monitors, asked.watches, asked.meshes = [], [], []
    monkeypatch.setattr(launch, "Monitor", lambda *of: asked.monitors.append(of) or contextlib.nullcontext())

    def watched(mesh):
        asked.watches.append(object())
        asked.meshes.append(attrs.evolve(mesh))  # another than the one that is not watched
        return asked.meshes[-1], asked.watches[-1]

    monkeypatch.setattr(launch, "watched", watched)
    return asked


@pytest.mark.parametrize(("device", "bound"), [("cpu", None), ("cuda:3", torch.device("cuda:3"))])
def test_every_group_waits_as_long_as_the_settings_say(asked, device, bound):
    sizes = {"replicate": 2, "shard": 2, "sequence": 1}
    place, limit = Place(rank=2, world=4), timedelta(seconds=20)
    with joined(sizes, place, torch.device(device), timeout=10.0, sharding=Sharding(), twin=True) as joint:
        mesh, watch, second = joint
        axes = {name: (axis.size, axis.rank, axis.group) for name, axis in mesh.axes.items()}
        assert axes == {"replicate": (2, 1, (0, 2)), "shard": (2, 0, (2, 3))}
        assert second.axes == mesh.axes
    assert (asked.start["timeout"], asked.start["device_id"]) == (limit, bound)
    assert (asked.met, asked.keys) == ([("env://", ("rank", 2), ("world_size", 4))], [("store", "2")])
    first, twin = asked.watches
    assert watch is first
    assert [x is y for x, y in zip((mesh, second), asked.meshes, strict=True)] == [True, True]
    assert asked.monitors == [("monitor", 2, 4, first, Limits(timeout=10.0), twin)]
    assert (asked.start["rank"], asked.start["world_size"], asked.start["store"]) == (2, 4, "groups")
    assert asked.start["backend"] == ("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    assert asked.groups == [((0, 2), limit), ((1, 3), limit), ((0, 1), limit), ((2, 3), limit)] * 2


def test_one_axis_is_the_group_of_all_but_for_a_twin(asked):
    place = Place(rank=1, world=2)
    with joined({"shard": 2}, place, torch.device("cpu"), timeout=1.0, sharding=Sharding(), twin=True) as (
        mesh,
        _,
        second,
    ):
        assert (mesh["shard"].rank, mesh["shard"].group, mesh.sharded) == (1, "everyone", True)
        assert second["shard"].group == (0, 1)


@pytest.mark.parametrize(
    ("sizes", "sharded"), [({"pipeline": 3, "shard": 2}, True), ({"pipeline": 3, "tensor": 2}, False)]
)
def test_a_pipeline_axis_has_a_lane_to_and_from_each_neighbour_around_it(asked, sizes, sharded):
    limit, sharding = timedelta(seconds=2), Sharding(stage=2)
    how = {"timeout": 1.0, "sharding": sharding, "virtual_stages": 3, "twin": True}
    with joined(sizes, Place(rank=2, world=6), torch.device("cpu"), **how) as (mesh, _, second):
        for each in (mesh, second):
            lanes = {(0, 1): (0, 2), (1, 0): (0, 2), (1, 2): (2, 4), (2, 1): (2, 4)}
            assert (each["pipeline"].rank, each["pipeline"].lanes) == (1, lanes)
            assert (each.virtual_stages, each.sharding) == (3, sharding if sharded else None)
    pairs = [(0, 2), (2, 4), (0, 4), (0, 2), (2, 4), (0, 4), (1, 3), (3, 5), (1, 5), (1, 3), (3, 5), (1, 5)]
    made = [((0, 2, 4), limit), ((1, 3, 5), limit), ((0, 1), limit), ((2, 3), limit), ((4, 5), limit)]
    assert asked.groups == [*made, *((pair, limit) for pair in pairs)] * 2


def test_two_stages_have_a_lane_in_either_direction(asked):
    with joined({"pipeline": 2}, Place(rank=0, world=2), torch.device("cpu"), timeout=1.0, sharding=Sharding()) as (
        mesh,
        *_,
    ):
        assert mesh["pipeline"].lanes == {(0, 1): (0, 1), (1, 0): (0, 1)}


@pytest.mark.parametrize("sizes", [{"shard": 2, "expert": 2, "tensor": 2}, {"expert": 4, "tensor": 2}], ids=str)
def test_an_expert_axis_shares_what_is_dense_with_the_shard_axis(asked, sizes):
    of_experts, limit = Cut(0, 2, (8,), "expert"), timedelta(seconds=2)
    with joined(sizes, Place(rank=5, world=8), torch.device("cpu"), timeout=1.0, sharding=Sharding()) as (mesh, *_):
        assert mesh.sharded
        assert mesh.shard_axis() == Axis(4, 2, (1, 3, 5, 7))
        assert mesh.shard_axis(of_experts) == mesh["shard"] == Axis(*((2, 1, (1, 5)) if "shard" in sizes else ()))
        assert mesh.shard_axis(Cut(0, 2, (8,))) == mesh.shard_axis()
    assert asked.groups.count(((1, 3, 5, 7), limit)) == (1 if "shard" in sizes else 2)


def test_a_mesh_says_where_rows_are_without_a_group_of_its_own():
    axes = {"shard": Axis(2, 1, "shard"), "expert": Axis(3, 2, "expert")}
    assert Mesh(axes, Sharding()).shard_axis() == Axis(6, 5)
    assert Mesh(axes).shard_axis() == Mesh(axes).shard_axis(Cut(0, 3, (3,), "expert")) == Axis()
    assert Mesh({"expert": axes["expert"]}, Sharding()).shard_axis() == axes["expert"]
    with pytest.raises(ValueError, match=r"the mesh has the axes \['expert', 'shard'\]: name shard before expert"):
        meshes.with_dense(dict(reversed(axes.items())), torch.arange(6).view(3, 2), 0)


@pytest.mark.parametrize(
    ("ends", "status", "starts"),
    [
        ([(0, False)], 0, 1),
        ([(launch.STOPPED, False)], launch.STOPPED, 1),
        ([(1, False), (9, False), (0, False)], 0, 3),
        ([(1, False), (9, False), (3, False)], 3, 3),
        ([(1, False), (9, True)], 9, 2),  # a stop was requested
        ([(1, False), (launch.STOPPED, True)], launch.STOPPED, 2),
    ],
)
def test_ranks_that_fail_are_restarted_unless_a_stop_was_requested(ends, status, starts, monkeypatch, capsys):
    attempts = []

    def attempt(arguments, ranks, number):
        attempts.append(number)
        return ends[number]

    monkeypatch.setattr(launch, "_attempt", attempt)
    assert launch.start(["train"], 4, max_restarts=2) == status
    assert attempts == list(range(starts))
    said = [f"fppo: starting all 4 ranks again ({number} of 2 times)" for number in range(1, starts)]
    assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize(("threads", "expected"), [(None, "2"), ("5", "5"), ("", "2")])
def test_a_rank_finds_its_place_in_its_environment(threads, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: range(9))
    given = launch._environment(2, 4, 1234, 3)
    assert given["OMP_NUM_THREADS"] == expected
    assert (given["MASTER_ADDR"], given["MASTER_PORT"], given["TORCHELASTIC_USE_AGENT_STORE"]) == (
        *("127.0.0.1", "1234"),
        "True",
    )
    assert given["FPPO_LAUNCHER"] == str(launch.os.getpid())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, given[name])
    assert Place.of_environment() == Place(2, 2, 4, 4, started=True, attempt=3)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name)
    assert Place.of_environment() == Place(2, 2, 4, 4, started=True, attempt=0)
    monkeypatch.delenv("RANK")
    assert Place.of_environment() == Place() == Place(0, 0, 1, 1, started=False, attempt=0)
    assert launch._environment(0, 100, 1, 0)["OMP_NUM_THREADS"] == ("5" if threads == "5" else "1")


def test_a_child_sees_those_gpus_of_its_parent_s_that_it_is_to_have():
    assert launch.visible([0, 2], None) == launch.visible([0, 2], " ") == "0,2"
    assert launch.visible([0, 2], "4, 5,GPU-a") == "4,GPU-a"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "with status 0"),
        (3, "with status 3"),
        (None, "with status None"),
        (-9, "by SIGKILL, perhaps for want of memory"),
        (-15, "by SIGTERM"),
    ],
)
def test_an_end_is_put_into_words(status, words):
    assert in_words(status) == words


class Child:
    """A process that ends at a time with a status, or when it is asked to, unless it is stubborn."""

    def __init__(self, now, ends, status, stubborn=False):
        self.now, self.ends, self.status, self.stubborn, self.returncode = now, ends, status, stubborn, None
        self.asked = []

    def poll(self):
        if self.returncode is None and self.now[0] >= self.ends:
            self.returncode = self.status
        return self.returncode

    def terminate(self):
        self.asked.append(("terminate", self.now[0]))
        self.returncode = None if self.stubborn else -15

    def kill(self):
        self.asked.append(("kill", self.now[0]))
        self.returncode = -9


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [
        ([(1, 0), (2, 0)], 0, ""),
        ([(1, launch.STOPPED), (2, 0)], launch.STOPPED, ""),
        ([(1, 0), (40, launch.STOPPED)], launch.STOPPED, ""),  # a stop may take its time
        ([(5, 0), (2, 3), (9, 7)], 3, ""),  # the first in time
        ([(2, 4), (2, 3)], 4, ""),
        ([(3, 1), (2, launch.STOPPED)], 1, ""),
        ([(4, 0), (2, -9)], 9, "fppo: rank 1 was ended by SIGKILL: out of memory?\n"),
        ([(1, -15), (2, 0)], 15, "fppo: rank 0 was ended by SIGTERM\n"),
        ([(900, 0), (2, 3)], 3, ""),
    ],
)
def test_the_status_of_ranks_is_that_of_the_first_to_fail_and_others_have_a_while(
    ends, status, said, monkeypatch, capsys
):
    now = [0.0]
    time = SimpleNamespace(sleep=lambda _: now.__setitem__(0, now[0] + 0.5), monotonic=lambda: now[0])
    monkeypatch.setattr(launch, "time", time)
    children = [Child(now, *end) for end in ends]
    assert launch._supervised(children) == status
    assert capsys.readouterr().err == said
    asked = [each for child in children for each in child.asked]
    assert asked == ([("terminate", 2 + launch._GRACE + 0.5)] if ends[0][0] == 900 else [])


def test_a_rank_that_does_not_end_when_it_is_asked_is_killed(monkeypatch):
    now = [0.0]
    time = SimpleNamespace(sleep=lambda _: now.__setitem__(0, now[0] + 1.0), monotonic=lambda: now[0])
    monkeypatch.setattr(launch, "time", time)
    children = [Child(now, 900, 0, stubborn=True), Child(now, 1, 5)]
    assert launch._supervised(children) == 5
    kinds = [kind for kind, _ in children[0].asked]
    assert kinds == ["terminate"] * (len(kinds) - 1) + ["kill"]
    assert children[0].asked[-1][1] == 1 + launch._GRACE + launch._KILL + 1
    assert children[1].asked == []
