"""The groups of a mesh, by a stand-in for torch.distributed: their ranks, their limits, and NCCL's device."""

import contextlib
import os
import signal
import subprocess
import time
from datetime import timedelta
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from fppo.runtime import launch
from fppo.runtime import mesh as meshes
from fppo.runtime.failure import MONITOR, Limits
from fppo.runtime.launch import Place, joined
from fppo.runtime.layout import Cut
from fppo.runtime.mesh import Axis, Mesh, Sharding
from fppo.runtime.parent import in_words
from fppo.runtime.stores import loopback_only, own_keys


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
        get_default_backend_for_device=torch.distributed.get_default_backend_for_device,
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
    """A process that ends at a time with a status, or when it is asked to, unless it is stubborn. Its work is done if
    it ends well; before, it may be as if a user had asked the launcher to stop."""

    def __init__(self, machine, env, ends, status, *, stubborn=False, stops=False):
        self.machine, self.env, self.status, self.stubborn, self.stops = machine, env, status, stubborn, stops
        self.ends, self.returncode, self.asked = machine.now + ends, None, []

    def poll(self):
        if self.stops:
            self.stops = False
            signal.raise_signal(signal.SIGTERM)
        if self.returncode is None and self.machine.now >= self.ends:
            self.returncode = self.status
            if self.status == 0:
                store = TCPStore("127.0.0.1", int(self.env["MASTER_PORT"]), is_master=False, wait_for_workers=False)
                own = own_keys(store, self.env["FPPO_STORE_TOKEN"], attempt=self.env[launch.RESTARTS])
                PrefixStore(MONITOR, own).set(f"done/{self.env['RANK']}", "")
        return self.returncode

    def send_signal(self, number):
        self.asked.append(("signal", number))

    def terminate(self):
        self.asked.append(("terminate", self.machine.now))
        self.returncode = None if self.stubborn else -15

    def kill(self):
        self.asked.append(("kill", self.machine.now))
        self.returncode = -9

    def wait(self):
        assert self.returncode is not None


@pytest.fixture
def machine(monkeypatch):
    """A machine with a time of its own; `children` end as those of `scripts` say."""
    made = SimpleNamespace(now=0.0, children=[], scripts=[])

    def started(command, *, env, **how):
        assert command[1:] == ["-m", "fppo", "train"]
        script, words = made.scripts[len(made.children)], {}
        made.children.append(Child(made, env, *script[:2], **(script[2] if script[2:] else words)))
        return made.children[-1]

    def passes(seconds):
        made.now += max(seconds, 0.5)

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(time, "sleep", passes)
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    return made


STOPPING = {"stops": True}


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ([(1, 0)], 0),
        ([(1, launch.STOPPED)], launch.STOPPED),
        ([(1, 1), (1, 9), (1, 0)], 0),
        ([(1, 1), (1, 9), (1, 3)], 3),
        ([(1, 1), (1, 9, STOPPING)], 9),
        ([(1, 1), (1, launch.STOPPED, STOPPING)], launch.STOPPED),
    ],
)
def test_ranks_that_fail_are_restarted_unless_a_stop_was_requested(ends, status, machine, capsys):
    machine.scripts = [script for end in ends for script in (end, end[:2])]
    assert launch.start(["train"], 2, max_restarts=2) == status
    assert len(machine.children) == len(machine.scripts)
    said = [f"fppo: starting all 2 ranks again ({number} of 2 times)" for number in range(1, len(ends))]
    assert capsys.readouterr().err.splitlines() == said
    for child in machine.children:
        assert child.asked == ([("signal", signal.SIGTERM)] if child in machine.children[2:] and ends[-1][2:] else [])


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
        ([(900, 0, {"stubborn": True}), (1, 5)], 5, ""),
    ],
)
def test_the_status_of_ranks_is_that_of_the_first_to_fail_and_others_have_a_while(ends, status, said, machine, capsys):
    machine.scripts = ends
    assert launch.start(["train"], len(ends)) == status
    assert capsys.readouterr().err == said
    first, *others = machine.children
    assert not any(child.asked for child in others)
    if ends[0][0] != 900:
        assert not first.asked
        return
    late = ends[1][0] + 15 + 0.5
    assert first.asked[0] == ("terminate", late)
    if first.stubborn:
        kinds = [kind for kind, _ in first.asked]
        assert kinds == ["terminate"] * (len(kinds) - 1) + ["kill"]
        assert first.asked[-1] == ("kill", late + 5)


@pytest.mark.parametrize(("threads", "expected"), [(None, "2"), ("5", "5"), ("", "2")])
def test_a_rank_finds_its_place_in_its_environment(threads, expected, machine, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(9))
    machine.scripts = [(1, 1)] * 4 + [(1, 0)] * 4
    launch.start(["train"], 4, max_restarts=1)
    given = machine.children[6].env
    names = ("OMP_NUM_THREADS", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "FPPO_LAUNCHER")
    assert [given[name] for name in names] == [expected, "127.0.0.1", "True", str(os.getpid())]
    assert loopback_only().items() <= given.items()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, given[name])
    assert Place.of_environment() == Place(2, 2, 4, 4, started=True, attempt=1)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name)
    assert Place.of_environment() == Place(2, 2, 4, 4, started=True, attempt=0)
    monkeypatch.delenv("RANK")
    assert Place.of_environment() == Place() == Place(0, 0, 1, 1, started=False, attempt=0)
    machine.children, machine.scripts = [], [(1, 0)] * 10
    launch.start(["train"], 10)
    assert machine.children[0].env["OMP_NUM_THREADS"] == ("5" if threads == "5" else "1")
