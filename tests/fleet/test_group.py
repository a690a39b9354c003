"""Calls of functions on ranks: what stays, what comes, what is refused, and what becomes of errors."""

import contextlib
import gc
import importlib.util
import os
import pickle
import threading
import time
import weakref
from functools import partial

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from fppo import tree
from fppo.fleet import HERE, LOCAL_GROUP, Group, GroupDied, Held, Here, RankSpec, at_once, cluster, group, on
from fppo.fleet.rank import PLAIN, Membership, Rank, RankReply
from fppo.runtime.launch import Place
from fppo.runtime.mesh import Axis, Mesh, Sharding
from fppo.runtime.offload import copied
from fppo.workers.imports import import_modules
from tests.fleet.threads import Threads
from tests.fleet.trees import TREES


def naps(count):
    """Numbers, each after a while."""
    for number in range(count):
        time.sleep(0.1)
        yield number


@pytest.fixture
def one():
    with Group("one", Threads()) as made:
        yield made


@pytest.fixture
def pair():
    return Threads(shard=2)


@pytest.fixture
def two(pair):
    with Group("two", pair, grace=0.2) as made:
        yield made


def make(here, start):
    return {"x": torch.full((3,), start + here.rank), "step": 4}, {"rank": here.rank}


def double(state, *, by=2):
    return {"x": state["x"] * by, "step": state["step"] + 1}, float(state["x"].sum())


def reduced(here, x, number=1):
    value = torch.full((number,), x)
    dist.all_reduce(value, group=here.mesh["shard"].group)
    return float(value.sum())


def fails_on(here, rank):
    if here.rank == rank:
        raise KeyError(f"rank {here.rank}")
    return reduced(here, 1.0)


def writes(x, scale):
    x["b"].mul_(scale)
    return x["b"].sum()


def test_what_stays_is_a_tree_of_handles_and_each_rank_has_its_own(two):
    state, other = two.call(make, HERE, 1.0, stays=(0,))
    assert isinstance(state["x"], Held)
    assert state["step"] == 4  # plain values are here, too
    assert other == {"rank": 0}
    state, total = two.call(double, state, by=3.0, stays=(0,))
    assert (state["step"], total) == (5, 3.0)
    assert two.call(summed, HERE, {"x": state["x"]}, "shard") == 3 * 3.0 + 3 * 6.0
    assert two.call(reduced, HERE, 1.0) == 2.0
    assert torch.equal(two.call(dict, state)["x"], torch.full((3,), 3.0))  # of the first rank


def of_stage(here):
    own = {f"layer {here.rank}": torch.ones(2) * here.rank}
    return {"params": own | ({"head": torch.ones(1)} if here.rank else {}), "none": {} if here.rank else own, "step": 3}


def summed(here, params, axis="pipeline"):
    value = sum(params.values()).sum()
    dist.all_reduce(value, group=here.mesh[axis].group)
    return float(value)


def test_stages_have_tensors_of_their_own_under_one_handle():
    with Group("stages", Threads(pipeline=2)) as stages:
        state = stages.call(of_stage, HERE, stays=True)
        assert (len(state["params"]), len(state["none"]), state["step"]) == (1, 1, 3)
        assert [path for path, _ in tree.leaves_with_paths(state)] == ["['params']", "['none']", "['step']"]
        assert stages.call(summed, HERE, state["params"]) == 4.0  # 0 + 0, and 1 + 1 + 1 + 1
        copied = stages.call(tree.copy, state["params"], stays=True)
        assert isinstance(next(iter(copied.values())), Held)
        assert stages.call(summed, HERE, copied) == 4.0
        assert list(stages.call(dict, copied)) == ["layer 0"]  # of the first rank


def devices(here, x, *, y):
    return [str(tensor.device) for tensor in (x["a"], x["b"], y)], here.device.type


def test_what_is_sent_arrives_on_the_ranks_device_and_what_comes_is_on_the_controllers():
    away, sent = torch.device("meta"), {"a": torch.ones(2), "b": torch.ones(1 << 15)}
    ranks = Threads()
    with Group("one", ranks, device=away) as one:
        held = one.call(make, HERE, 1.0, stays=True)[0]["x"]  # while the rank is on the host
        ranks.move(away)
        assert one.call(devices, HERE, sent, y=held) == (["meta", "meta", "cpu"], "meta")
        assert one.call(devices, HERE, sent, y=held, on_host=True) == (["cpu"] * 3, "meta")
        assert held.device == one.call(dict, {"x": held})["x"].device == away
    assert LOCAL_GROUP.call(devices, HERE, sent, y=sent["a"], on_host=True) == (["cpu"] * 3, "cpu")


def test_a_function_that_stays_is_called_by_its_handle(one):
    fns = one.call(lambda_of, HERE, stays=True)
    assert on(one, fns["add"])(torch.tensor(2.0), y=3.0) == 5.0
    assert on(LOCAL_GROUP, make) is make
    assert LOCAL_GROUP.call(make, HERE, 1.0, stays=True)[1] == {"rank": 0}


def lambda_of(here):
    return {"add": lambda x, y: x + y}


LIVES = []


def living(start):
    value = torch.full((3,), start)
    LIVES.append(weakref.ref(value))
    return value


def test_what_nobody_has_a_handle_of_is_let_go():
    """Ranks are told so once."""
    told = []

    class Told(Threads):
        def send(self, request, large):
            told.append(sorted(request.forget))
            return super().send(request, large)

    LIVES.clear()
    with Group("one", Told()) as one:
        first, second = one.call(living, 1.0, stays=True), one.call(living, 2.0, stays=True)
        del first
        gc.collect()
        one.call(dict)
        one.call(dict)
        assert [life() is None for life in LIVES] == [True, False]
        assert torch.equal(one.call(itself, second), torch.full((3,), 2.0))
    assert told == [[], [], [(1, 0)], [], []]


def itself(x):
    return x


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TREES, st.lists(st.booleans(), min_size=40, max_size=40))
def test_any_tree_of_values_and_handles_is_each_ranks_tree_of_values(two, value, which):
    held = two.call(itself, value, stays=True)
    assert pytree.tree_structure(held) == pytree.tree_structure(value)
    pairs = list(zip(pytree.tree_leaves(held), leaves := pytree.tree_leaves(value), strict=True))
    assert all(isinstance(x, Held) or x == y for x, y in pairs)
    assert all(isinstance(x, Held) == (not isinstance(y, PLAIN)) for x, y in pairs)
    mixed = [x if here else y for (x, y), here in zip(pairs, which, strict=False)][::-1]
    assert two.call(tree.digest, [mixed, {"x": held}]) == tree.digest([leaves[::-1], {"x": value}])


@pytest.mark.parametrize("read", [tree.copy, tree.digest, copied, pickle.dumps])
def test_a_handle_is_no_value_here(one, read):
    state, _ = one.call(make, HERE, 1.0, stays=(0,))
    with pytest.raises(TypeError, match="a value on the ranks of group 'one'"):
        read(state)
    assert tree.digest(one.call(tree.copy, state)) == tree.digest({"x": torch.full((3,), 1.0), "step": 4})


def test_handles_of_others_and_of_earlier_starts_are_refused(one, two):
    state, _ = one.call(make, HERE, 1.0, stays=(0,))
    with pytest.raises(
        ValueError, match="double runs on group 'two', but an argument is a value on the ranks of group 'one'"
    ):
        two.call(double, state)
    one.start()
    with pytest.raises(GroupDied, match=r"double: an argument is of start 1 of group 'one'.*its value is lost") as died:
        one.call(double, state)
    assert (died.value.group, died.value.again, died.value.silent) == ("one", True, False)
    assert one.call(make, HERE, 1.0)[1] == {"rank": 0}
    with pytest.raises(ValueError, match="make returned 2 results: there is no result 2 to keep"):
        one.call(make, HERE, 1.0, stays=(2,))


def test_an_error_on_a_rank_is_raised_here_and_ends_those_that_wait_for_it(two):
    with pytest.raises(KeyError, match="rank 1") as caught:
        two.call(fails_on, HERE, 1)
    assert "in fails_on, on rank 1 of 2 (thread 1) of group 'two'" in caught.value.__notes__[0]
    with pytest.raises(GroupDied, match="'two' cannot run reduced: fails_on failed on rank 1, and the others waited"):
        two.call(reduced, HERE, 1.0)
    two.start()
    assert two.call(reduced, HERE, 1.0) == 2.0


def fails_with_its_own():
    class Own(ValueError):
        pass

    raise Own("what no other process knows")


def test_an_error_that_does_not_pickle_is_named(one):
    with pytest.raises(RuntimeError, match=r"^Own: what no other process knows"):
        one.call(fails_with_its_own)


def test_an_error_on_all_ranks_ends_none(two):
    with pytest.raises(TypeError):
        two.call(double, 3)
    assert two.call(reduced, HERE, 1.0) == 2.0


def test_a_rank_that_is_lost_is_named(pair, two):
    pair.lose(1)
    with pytest.raises(GroupDied, match=r"rank 1 of 2 \(thread 1\) was lost in reduced: the thread is gone") as caught:
        two.call(reduced, HERE, 1.0)
    assert caught.value.group == "two"


def test_a_rank_that_is_lost_is_named_though_others_fail_before_that_is_seen(pair):
    with Group("two", pair) as two:
        pair.lose(1, seen_after=0.2)
        with pytest.raises(GroupDied, match=r"rank 1 of 2 \(thread 1\) was lost in fails_on"):
            two.call(fails_on, HERE, 0)


def test_a_call_that_never_ends_ends_the_group():
    with Group("slow", Threads(), patience=0.2) as slow, pytest.raises(GroupDied, match="forever was not done after"):
        slow.call(forever)


def forever():
    threading.Event().wait()


def test_a_stage_that_writes_into_what_others_read_is_found(one):
    batch = {"a": torch.ones(2), "b": torch.ones(1 << 15)}
    with pytest.raises(ValueError, match=r"writes has written into its argument \[0\]\[0\]\['b'\]"):
        one.call(writes, batch, 2.0)
    assert one.call(writes, batch, 1.0) == 1 << 15  # what it writes is what was there


def counted(here, directory, number, fails):
    """Yields numbers, each once the one before was read, and after `number` of them fails, or gives none for long."""
    for i in range(number):
        while i and not (directory / str(i - 1)).exists():
            time.sleep(0.001)
        yield {"x": torch.full((1 << 15,), float(i)), "i": i}
    if fails:
        raise KeyError("of the rank")


def check_stream(one, directory):
    """A group gives items as they come; errors of either side are raised, and its reader's end the group."""
    seen = []

    def read(item):
        assert torch.equal(item["x"], torch.full((1 << 15,), float(item["i"])))
        seen.append(item["i"])
        (directory / str(item["i"])).touch()

    assert one.call(counted, HERE, directory, 3, False, on_item=read) is None
    assert seen == [0, 1, 2]
    with pytest.raises(KeyError, match="of the rank"):
        one.call(counted, HERE, directory, 2, True, on_item=read)
    assert seen == [0, 1, 2, 0, 1]
    one.start()

    def fail(item):
        raise ValueError("of the reader")

    with pytest.raises(ValueError, match="of the reader"):
        one.call(counted, HERE, directory, 2, False, on_item=fail)
    with pytest.raises(GroupDied, match="counted was interrupted"):
        one.call(make, HERE, 1.0)
    one.start()
    assert one.call(make, HERE, 1.0)[0]["step"] == 4


def test_items_come_one_by_one(one, tmp_path):
    check_stream(one, tmp_path)
    items = []
    LOCAL_GROUP.call(counted, HERE, tmp_path, 3, False, on_item=items.append)
    assert [item["i"] for item in items] == [0, 1, 2]


def test_an_item_may_take_longer_than_the_others_have_after_a_failure():
    items = []
    with Group("one", Threads(), grace=0.001) as one:
        assert one.call(naps, 2, on_item=items.append, patience=60.0) is None
    assert items == [0, 1]


def test_the_time_of_a_rank_lies_within_that_of_its_call(one):
    one.calls()
    one.call(time.sleep, 0.05)
    (call,) = one.calls()
    ((start, seconds),) = call.ranks
    assert call.start <= start + 1e-3
    assert start + seconds <= call.start + call.seconds


def slow_on(here, rank):
    time.sleep(0.05 if here.rank == rank else 0.0)


def test_the_times_of_a_call_stand_in_the_order_of_ranks(two):
    """Whichever answers last."""
    for rank in (0, 1):
        two.calls()
        two.call(slow_on, HERE, rank)
        (call,) = two.calls()
        assert call.ranks[rank][1] >= 0.05


def test_each_item_has_the_patience_of_a_call_and_what_stands_still_is_not_silent(one, monkeypatch):
    passed, seen = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: passed[0])

    def slow(item):
        passed[0] += 1.5
        seen.append(item)

    def still(item):
        passed[0] += 1000.0
        seen.append(item)

    assert one.call(counted_to, 5, on_item=slow, patience=2.5) is None
    assert one.call(counted_to, 2, on_item=still, patience=2.5) is None
    assert seen == [*range(5), 0, 1]

    def passing():
        passed[0] += 0.02
        return passed[0]

    monkeypatch.setattr(time, "monotonic", passing)
    with pytest.raises(GroupDied, match=r"hangs was not done after 0.1 s on rank 0 of 1") as raised:
        one.call(hangs, on_item=seen.append, patience=0.1)
    assert raised.value.silent


def counted_to(number):
    yield from range(number)


def hangs():
    yield threading.Event().wait(5.0)


def test_calls_of_two_threads_reach_all_ranks_in_one_order(two):
    def calls(number):
        return [two.call(reduced, HERE, 1.0, number) for _ in range(5)]

    found = at_once({number: lambda n=number: calls(n) for number in (1, 3)})
    assert found == {1: [2.0] * 5, 3: [6.0] * 5}


def test_at_once_is_in_turn_and_raises_the_first_error_after_all_have_ended():
    ended, meet = [], threading.Barrier(2, timeout=60)

    def end(name):
        meet.wait()
        ended.append((name, torch.is_grad_enabled()))
        return name

    with torch.no_grad():
        assert at_once({"a": lambda: end("a"), "b": lambda: end("b")}) == {"a": "a", "b": "b"}
    assert sorted(ended) == [("a", False), ("b", False)]
    with pytest.raises(ZeroDivisionError):
        at_once({"a": lambda: end(1 // 0), "b": lambda: ended.append("b")})
    assert ended[-1] == "b"


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_there_is_no_cluster_of_it():
    with pytest.raises(ValueError, match="Ray is not installed: pip install"):
        cluster("local")


def part_of(x, *, y):
    return {"small": x["a"][:2], "large": torch.cat([y, y]), "n": 3}


def test_the_bytes_of_a_call_are_those_of_its_arguments_and_results(two):
    """Tensors alone count, small ones and large ones, also in items; results come from one rank."""
    x, y = {"a": torch.ones(5), "b": torch.ones(1 << 15, dtype=torch.float64)}, torch.ones(1 << 15)
    two.calls()
    two.call(part_of, x, y=y, label="named")
    held = two.call(part_of, x, y=y, stays=True)
    two.call(dict, held)
    two.call(counted_to, 3, on_item=lambda _: None)
    first, kept, again, stream = two.calls()
    sizes = 5 * 4 + (1 << 15) * 8 + (1 << 15) * 4, 2 * 4 + (1 << 16) * 4
    assert [(call.there, call.back) for call in (first, kept, again, stream)] == [
        *(sizes, (sizes[0], 0), (0, sizes[1])),
        (0, 0),
    ]
    assert [call.label for call in (first, kept, again, stream)] == ["named", "part_of", "dict", "counted_to"]
    assert {(call.group, len(call.ranks)) for call in (first, kept, again, stream)} == {("two", 2)}
    assert two.calls() == []


class Never(Threads):
    """Ranks that do not start."""

    def __init__(self, again):
        super().__init__()
        self.again = again

    def start(self):
        raise group.RankLost("no room", again=self.again)


@pytest.mark.parametrize("again", [True, False])
def test_a_group_that_does_not_start_says_why_and_whether_it_may_later(again):
    never = Group("never", Never(again))
    with pytest.raises(GroupDied, match="group 'never' cannot run dict: it has not been started"):
        never.call(dict)
    with pytest.raises(GroupDied, match="group 'never' did not start: no room") as raised:
        never.start()
    assert (raised.value.again, raised.value.group, raised.value.silent) == (again, "never", False)
    with pytest.raises(GroupDied, match="group 'never' cannot run dict: no room"):
        never.call(dict)


def test_a_rank_joins_the_mesh_of_its_spec(monkeypatch):
    """By the same function as ranks of torchrun, with all that the spec says of the mesh."""
    asked, made = [], Mesh({"context": Axis(2, 1)})

    def joined(*args, **keywords):
        asked.append((args, keywords))
        return contextlib.nullcontext((made, None, None))

    monkeypatch.setattr("fppo.fleet.rank.launch.joined", joined)
    for name in (
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "FPPO_STORE_TOKEN",
        "TORCHELASTIC_USE_AGENT_STORE",
    ):
        monkeypatch.setenv(name, "before")
    cpu, sharding, threads = torch.device("cpu"), Sharding(stage=2), torch.get_num_threads()
    spec = RankSpec(
        count=4,
        sizes={"pipeline": 2, "context": 2},
        sharding=sharding,
        virtual_stages=3,
        ring=True,
        threads=threads,
        patience=7.0,
    )
    rank = Rank()
    rank.join(Membership(rank=3, spec=spec, token="secret"), ("127.0.0.9", 1234))
    (((sizes, place, device), keywords),) = asked
    assert (sizes, place, device) == (spec.sizes, Place(3, 0, 4, started=True), cpu)
    assert keywords == {"timeout": 7.0, "sharding": sharding, "virtual_stages": 3}
    assert rank._here == Here(attrs.evolve(made, ring=True), cpu, 3)
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "FPPO_STORE_TOKEN")
    assert [os.environ[name] for name in names] == ["127.0.0.9", "1234", "3", "4", "secret"]
    rank.join(Membership(rank=0, spec=RankSpec(count=2, threads=threads)), ("127.0.0.9", 1))
    assert asked[1][0][0] == {"shard": 2}
    assert asked[1][1] == {"timeout": 600.0, "sharding": Sharding(), "virtual_stages": 1}
    assert not rank._here.mesh.ring
    alone = Rank()
    alone.join(Membership(rank=0, spec=RankSpec(threads=threads)), ("", 0))
    assert (alone._here, len(asked)) == (Here(), 2)
    assert (RankSpec().device, RankSpec(gpus=1).device, RankSpec(gpus=0.5).sizes) == ("cpu", "cuda", {"shard": 1})


def test_arguments_are_checked_in_the_first_call_of_a_function_on_a_value_alone(one):
    """A label of its own is as another function."""
    batch, told = {"a": torch.ones(2), "b": torch.ones(1 << 15)}, pytest.raises(ValueError, match="has written into")
    assert one.call(writes, batch, 1.0) == 1 << 15
    assert one.call(writes, batch, 2.0) == 2 << 15
    with told:
        one.call(writes, batch, 2.0, label="other")
    held = one.call(itself, batch, stays=True)
    assert one.call(writes, held, 2.0) == 2 << 15


@pytest.mark.parametrize("more", [True, False])
def test_a_reply_is_linked_with_its_tensors_and_with_what_follows(more):
    reply, large = RankReply(None, [], 2.0, has_next=more), [torch.ones(2).numpy()]
    found = reply.linked(large)
    assert (found.large, found.seconds, found.has_next) == (large, 2.0, more)
    assert (found.next_reply is not None) == more
    assert (reply.large, reply.next_reply) == ([], None)


def gives_up(state):
    kept = tree.donate(state)
    return kept["b"].add_(1.0).sum()


def test_a_function_may_take_over_the_memory_of_what_it_is_sent(one):
    """The caller's own tensors are another process's, and stay."""
    sent = {"b": torch.ones(1 << 15)}
    assert one.call(gives_up, sent) == 1 << 16
    assert torch.equal(sent["b"], torch.ones(1 << 15))


def noted(path):
    """One more letter in a file."""
    with open(path, "a") as file:
        file.write("x")


def test_every_rank_begins_anew_whenever_it_has_started(tmp_path):
    """Before any other call; what goes wrong there ends the start."""
    path = str(tmp_path / "begun")
    with Group("two", Threads(shard=2), begin=partial(noted, path)) as two:
        for count in (2, 4):
            assert two.call(os.path.getsize, path) == count
            two.start()
    with pytest.raises(ValueError, match="the module 'no_such' does not import"):
        Group("one", Threads(), begin=partial(import_modules, ["no_such"])).start()
