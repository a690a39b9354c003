"""Ranks of a Ray cluster, by a stand-in for the module: where they are, what they are sent, and what is lost."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import threading
import time
from functools import partial

import attrs
import pytest
import torch

from fppo.fleet import HERE, Group, GroupDied, RankSpec, cluster
from fppo.fleet.on_ray import RayCluster, joined
from fppo.fleet.rank import Rank
from fppo.runtime.parent import module_path
from tests.fleet.ray_stand_in import Cluster, RayActorError, RayError
from tests.fleet.test_group import check_stream, double, fails_on, itself, make, reduced
from tests.fleet.threads import meshes_of

NODES = [("10.0.0.1", "aaaaaaaaaa", [0, 1]), ("10.0.0.1", "bbbbbbbbbb", [0, 1]), ("10.0.0.2", "cccccccccc", [0, 1])]


@pytest.fixture
def ray(monkeypatch):
    """A cluster of three nodes, on which two actors each run; `hosts` and `joins` are what ranks were told, `make_rank`
    makes these on simulated meshes, and `now` is the time of a clock that only sleep moves."""
    made = Cluster(NODES, cpus=6)
    made.hosts, made.joins, made.now, meshes, lock = [], [], 0.0, {}, threading.Lock()

    class Told(Rank):
        def host(self, address):
            made.hosts.append(address)
            return 4321

        def join(self, member, address):
            made.joins.append((member, address))
            made.here.actor.rank = member.rank
            super().join(member, address)

    def simulated(member, address, device):
        with lock:
            if member.token not in meshes:
                meshes[member.token] = meshes_of({"shard": member.spec.count})
        return contextlib.nullcontext(meshes[member.token][member.rank])

    def sleep(seconds):
        made.now += seconds

    made.make_rank = partial(Told, simulated)
    with monkeypatch.context() as patch:
        for name, module in made.modules().items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(time, "sleep", sleep)
        patch.setattr(time, "monotonic", lambda: made.now)
        patch.setattr(torch, "set_num_threads", lambda count: None)
        patch.setattr(torch.accelerator, "set_device_index", lambda device: None)
        yield made


def test_ranks_are_placed_by_node_told_of_each_other_and_called_as_others_are(ray):
    spec = RankSpec(count=4, threads=3, patience=7.0)
    with RayCluster("local", make_rank=ray.make_rank) as here, Group("actor", here.ranks(spec), patience=60.0) as group:
        own = f"process {os.getpid()} on node"
        # bundles lie on the nodes from the last one on: the ranks go by address, node and bundle
        places = [
            ("10.0.0.1", "aaaaaaaa"),
            ("10.0.0.1", "bbbbbbbb"),
            ("10.0.0.2", "cccccccc"),
            ("10.0.0.2", "cccccccc"),
        ]
        assert group.places == [f"{own} {address} {name}" for address, name in places]
        assert ray.hosts == ["10.0.0.1"]
        assert ray.timeouts == [7.0] * (4 + 1 + 4)  # where each is, the first one's address, and that all have joined
        assert sorted(member.rank for member, _ in ray.joins) == [0, 1, 2, 3]
        assert all((member.spec, address) == (spec, ("10.0.0.1", 4321)) for member, address in ray.joins)
        (token,) = {member.token for member, _ in ray.joins}
        assert len(token) == 32
        (room,) = ray.rooms
        assert (room.bundles, room.strategy) == ([{"CPU": 1.0}] * 4, "PACK")
        assert 0 < room.waited[0] <= 7.0
        for number, actor in enumerate(ray.actors):
            strategy = actor.how["scheduling_strategy"]
            assert (strategy.room, strategy.index) == (room, number)
            assert (actor.how["num_cpus"], actor.how["num_gpus"]) == (1, 0)
            variables = {"PYTHONPATH": os.pathsep.join(module_path()), "OMP_NUM_THREADS": "3"}
            assert actor.how["runtime_env"] == {"env_vars": variables}
        state, other = group.call(make, HERE, 1.0, stays=(0,))
        assert other == {"rank": 0}
        assert group.call(double, state, by=3.0)[1] == 3.0
        assert group.call(reduced, HERE, 1.0, label="a sum") == 4.0
        assert all(actor.names[-1] == "a sum" for actor in ray.actors)
        with pytest.raises(TypeError):
            group.call(double, 3)
        assert group.call(reduced, HERE, 2.0) == 8.0
        assert ray.free["CPU"] == 2.0
    assert ray.free["CPU"] == 6.0
    assert ray.address is None
    assert all(actor.lost is not None for actor in ray.actors)


def test_ranks_with_gpus_go_by_these_on_a_node(ray):
    with RayCluster("local", make_rank=ray.make_rank) as here, Group("a", here.ranks(RankSpec(count=6, gpus=1))):
        assert [actor.how["num_gpus"] for actor in ray.actors] == [1] * 6
        assert ray.rooms[0].bundles == [{"CPU": 1.0, "GPU": 1}] * 6
        order = [(actor.node[1], actor.gpus) for actor in sorted(ray.actors, key=lambda actor: actor.rank)]
        assert order == [(name, [gpu]) for name in ("aaaaaaaaaa", "bbbbbbbbbb", "cccccccccc") for gpu in (0, 1)]


def test_a_large_tensor_is_put_once_and_a_request_once_for_all_ranks(ray):
    x = torch.arange(1 << 15)
    with (
        RayCluster("local", make_rank=ray.make_rank) as here,
        Group("one", here.ranks()) as one,
        Group("two", here.ranks(RankSpec(count=2))) as two,
    ):
        for group in (one, two, two):
            assert torch.equal(group.call(itself, {"x": x, "n": 3})["x"], x)
        sizes = [value.nbytes for value in ray.puts if hasattr(value, "nbytes")]
        assert sizes == [x.nbytes]  # one cluster's memory, whichever group reads it
        assert len(ray.puts) - len(sizes) == 2  # the requests to two ranks
        x += 1
        assert torch.equal(one.call(itself, x), x)


def test_items_come_one_by_one_and_replies_that_end_early_are_a_loss(ray, tmp_path):
    with RayCluster("local", make_rank=ray.make_rank) as here, Group("one", here.ranks(), patience=60.0) as one:
        check_stream(one, tmp_path)

    def lost(actor):
        raise RayActorError("the node is gone\nand more")

    with RayCluster("local", make_rank=ray.make_rank) as here, Group("one", here.ranks()) as one:
        ray.cut, seen = lost, []
        with pytest.raises(GroupDied, match=r"was lost in range: the node is gone$"):
            one.call(range, 3, on_item=seen.append)
        assert seen == [0]


def test_a_stream_without_its_last_reply_is_a_loss(ray, monkeypatch):
    with RayCluster("local", make_rank=ray.make_rank) as here, Group("one", here.ranks()) as one:
        monkeypatch.setattr(Rank, "stream", lambda *_: iter(()))
        with pytest.raises(GroupDied, match=r"was lost in range: its replies ended before the call did"):
            one.call(range, 3, on_item=print)


@pytest.mark.parametrize("kind", [RayActorError, RayError])
def test_a_rank_that_is_lost_ends_the_group_which_starts_anew_with_a_new_room(ray, kind):
    """Whether its actor has ended, or Ray says otherwise that there is no answer, as of an object on a lost node."""
    with RayCluster("local", make_rank=ray.make_rank) as here, Group("actor", here.ranks(RankSpec(count=2))) as group:
        ray.actors[0].lost = kind("\n the actor died \nwith a trace")
        with pytest.raises(GroupDied, match=r"rank [01] of 2 \(process .*\) was lost in itself: the actor died$"):
            group.call(itself, 3)
        group.start()
        assert group.call(itself, 4) == 4
        assert (len(ray.rooms), len(ray.taken), len(ray.actors)) == (2, 1, 4)
        assert {member.token for member, _ in ray.joins[:2]} != {member.token for member, _ in ray.joins[2:]}


def test_actors_that_end_at_once_are_started_again_within_the_patience(ray):
    """On a node whose loss the cluster has not noticed."""
    ray.starts_lost = [RayActorError("gone"), None, None, RayActorError("gone")]
    with RayCluster("local", make_rank=ray.make_rank) as here:
        group = Group("actor", here.ranks(RankSpec(count=2)))
        group.start()
        assert (len(ray.rooms), len(ray.taken), len(ray.actors)) == (3, 1, 6)
        assert group.call(itself, 4) == 4
        group.close()
        for error, patience in ((RayError("wrong\ncode"), 600.0), (RayActorError("wrong\ncode"), 2.0)):
            ray.starts_lost, before = [error] * 9, len(ray.rooms)
            group = Group("actor", here.ranks(RankSpec(count=1, patience=patience)))
            with pytest.raises(GroupDied, match=r"did not start: its ranks end as they begin: wrong$") as raised:
                group.start()
            assert not raised.value.again
            assert ray.taken == []
            assert (len(ray.rooms) - before > 1) == (patience < 600.0)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (RankSpec(count=7), "7 ranks need 1 CPU each, and the cluster has 6 of 6 CPU free"),
        (RankSpec(count=5, gpus=2), "5 ranks need 1 CPU, 2 GPU each, and the cluster has 6 of 6 CPU, 6 of 6 GPU free"),
    ],
)
@pytest.mark.parametrize("address", ["local", "10.0.0.1:6379"])
def test_where_there_is_no_room_the_resources_are_named(ray, spec, text, address, monkeypatch):
    """A cluster of this machine alone never has more; to another one nodes may come."""
    monkeypatch.setattr(socket, "create_connection", lambda *_: io.BytesIO())
    with RayCluster(address, make_rank=ray.make_rank) as here:
        group = Group("actor", here.ranks(attrs.evolve(spec, patience=5.0)))
        with pytest.raises(GroupDied) as raised:
            group.start()
        assert str(raised.value) == f"group 'actor' did not start: {text}"
        assert not raised.value.again
        waited = [seconds for room in ray.rooms for seconds in room.waited]
        assert len(waited) == (address != "local")
        assert all(4.0 < seconds <= 5.0 for seconds in waited)
        with Group("other", here.ranks(RankSpec(count=4))), pytest.raises(GroupDied, match="has 2 of 6 CPU free"):
            Group("late", here.ranks(RankSpec(count=3, patience=0.0))).start()
        assert ray.rooms[-1].waited == [1.0]  # it looks for a second all the same


def test_a_process_is_in_one_cluster_and_leaves_what_it_has_joined(ray, monkeypatch):
    reached = []
    monkeypatch.setattr(socket, "create_connection", lambda where, _: reached.append(where) or io.BytesIO())
    module = sys.modules["ray"]
    with cluster("local"):
        assert joined("local") == joined("10.0.0.1:6379") == (module, False)
        with RayCluster("local"):
            pass
        assert ray.address is not None
        text = r"is in the Ray cluster at 10\.0\.0\.1:6379 already, not in that at '10\.0\.0\.9:1'"
        with pytest.raises(ValueError, match=text):
            joined("10.0.0.9:1")
    assert ray.address is None
    assert joined("10.0.0.9:1", show_output=False) == (module, True)
    assert reached == [("10.0.0.9", 1)]
    plain = {"configure_logging": False}
    assert ray.inits == [
        {"address": "local", "log_to_driver": True, "include_dashboard": False, **plain},
        {"address": "10.0.0.9:1", "log_to_driver": False, **plain},
    ]


def test_an_address_without_a_listener_is_named_at_once(ray):
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        for address in (there, f"ray://{there}"):
            with RayCluster(address):
                assert ray.address == address
    for address in (there, "auto", "127.0.0.1:x"):
        with pytest.raises(ValueError, match=f"there is no Ray cluster at '{address}' .*; give the HOST:PORT of one"):
            joined(address)


def test_an_error_on_a_rank_is_its_own(ray):
    with RayCluster("local", make_rank=ray.make_rank) as here, Group("one", here.ranks()) as one:
        with pytest.raises(KeyError, match="rank 0") as raised:
            one.call(fails_on, HERE, 0)
        assert "on rank 0 of 1 (process" in raised.value.__notes__[0]
