"""Results, snapshots and checkpoints that a server holds for its clients, against definitions by hand."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.serve.refusal import Refusal
from fppo.serve.tinker.checkpoints import KINDS, META, CheckpointMeta, CheckpointStore
from fppo.serve.tinker.futures import Futures, Payload
from fppo.serve.tinker.runs import Adapters
from fppo.serve.tinker.snapshots import SnapshotInfo, Snapshots
from tests.serve.tinker.test_futures import Clock

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "open", "settle", "settle", "read", "forget", "sweep"]),
        st.sampled_from("abc"),
        st.sampled_from(["me", "you"]),
        st.integers(0, 9),
    ),
    max_size=40,
)


@settings(max_examples=80)
@given(STEPS)
def test_futures_are_held_and_counted_until_their_time_is_over(steps):
    """7 seconds from when an outcome was first read, 20 from when it was set; and 12 bytes of an owner's, and the
    newest: those that were read first go first."""
    clock = Clock()
    futures, held = Futures(clock, read_seconds=7.0, seconds=20.0, most_bytes=12), {}
    for step, name, owner, size in steps:
        clock.now += size
        own = held.get(name)
        if step == "open":
            assert futures.open(name, owner, size) == (own is None)
            held.setdefault(name, {"owner": owner, "size": size, "outcome": None, "set": None, "read": None})
        elif step == "settle":
            futures.settle(name, Payload(bytes(size)))
            if own and own["outcome"] is None:
                own |= {"outcome": Payload(bytes(size)), "set": clock.now}
                others = {key: x for key, x in held.items() if x["owner"] == own["owner"] and key != name}
                full = [key for key, x in others.items() if x["outcome"] is not None and len(x["outcome"])]
                read = sorted((key for key in full if held[key]["read"] is not None), key=lambda key: held[key]["read"])
                unread = sorted((key for key in full if held[key]["read"] is None), key=lambda key: held[key]["set"])
                while full and len(own["outcome"]) + sum(len(held[key]["outcome"]) for key in full) > 12:
                    first = [*read, *unread][0]
                    del held[first]
                    full, read, unread = ([key for key in each if key != first] for each in (full, read, unread))
        elif step == "read":
            futures.read(name)
            if own and own["read"] is None:
                own["read"] = clock.now
        elif step == "forget":
            futures.forget([name, "nobody"])
            held.pop(name, None)
        else:
            settled = {key: x for key, x in held.items() if x["outcome"] is not None}
            old = [
                key
                for key, x in settled.items()
                if clock.now - x["set"] > 20 or (x["read"] is not None and clock.now - x["read"] > 7)
            ]
            assert sorted(futures.sweep()) == sorted(old)
            held = {key: x for key, x in held.items() if key not in old}
        for other in ("me", "you"):
            waiting = [x["size"] for x in held.values() if x["owner"] == other and x["outcome"] is None]
            assert futures.pending(other) == (len(waiting), sum(waiting))
            states = {key: futures.state(key, other) for key in "abc"}
            expected = {key: (x["outcome"],) for key, x in held.items() if x["owner"] == other}
            assert {key: tuple(x) for key, x in states.items() if x is not None} == expected
        assert futures.outcomes("abcd") == {key: x["outcome"] for key, x in held.items() if x["outcome"] is not None}


def snapshot_of(name, run, number, *, inflight=False):
    return SnapshotInfo(
        name=name,
        run=run,
        owner="me",
        base="tiny",
        adapters=Adapters(rank=2),
        inflight=inflight,
        version=number,
        created=float(number),
    )


USES = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "flight", "use", "use", "keep", "drop"]),
        st.sampled_from("ab"),
        st.integers(0, 5),
    ),
    max_size=14,
)
SIZES = {"a": 1, "b": 3}  # numbers of a run's weights; two fit, so that those of b are alone
# as many as there may be, and older weights in flight; the oldest is used, and one more comes
FULL = [("flight", "a", 0), *[("add", "a", 0)] * 3, ("use", "a", 0), ("add", "a", 0)]


@settings(max_examples=16)
@given(USES)
def test_snapshots_are_in_memory_by_their_last_use_and_size_and_at_most_so_many_of_a_run(tmp_path_factory, uses):
    root = tmp_path_factory.mktemp("snapshots")
    held = Snapshots(root, lambda base, adapters: (base, adapters), max_bytes=8, max_of_run=3)  # pyright: ignore
    expected, in_memory = {}, []  # numbers by name; names by their last use
    for number, (use, run, which) in enumerate([*FULL, *uses]):
        own = [name for name, (of, _, flight) in expected.items() if of == run and not flight]
        if use in ("add", "flight"):
            name = f"s:{run}:{number}" if use == "add" else f"s:{run}:inflight"
            info = snapshot_of(name, run, number, inflight=use == "flight")
            held.add(info, None, {"x": torch.tensor([float(number)] * SIZES[run])})  # pyright: ignore[reportArgumentType]
            expected.pop(name, None)
            expected[name] = (run, number, use == "flight")
            gone = [*own, name][:-3] if use == "add" else []
            expected = {key: x for key, x in expected.items() if key not in gone}
            in_memory = [key for key in in_memory if key not in (*gone, name)] + [name]
        elif use == "use" and expected:
            name = sorted(expected)[which % len(expected)]
            weights = held.weights(name)
            assert weights.params["x"].tolist() == [expected[name][1]] * SIZES[expected[name][0]]
            assert (weights.version, weights.name, weights.base) == (expected[name][1], name, "tiny")
            in_memory = [key for key in in_memory if key != name] + [name]
        elif use == "keep":
            held.keep(run)
            for name, (of, _, _) in expected.items():
                assert of != run or (root / name.replace(":", ".") / "snapshot.json").exists()
        elif use == "drop" and own:
            held.drop([own[0]])
            expected.pop(own[0])
            in_memory = [key for key in in_memory if key != own[0]]
            assert not (root / own[0].replace(":", ".")).exists()
        while len(in_memory) > 1 and 4 * sum(SIZES[expected[name][0]] for name in in_memory) > 8:
            del in_memory[0]
        assert [name for name, each in held._held.items() if each.weights is not None] == in_memory
        assert sorted(held.of_session("s")) == sorted(expected)
        assert held.of_session("other") == []
    with pytest.raises(Refusal, match="are gone"):
        held.weights("s:a:99")
    for run in "ab":
        held.keep(run)
    later = Snapshots(root, lambda base, adapters: (base, adapters), max_bytes=8, max_of_run=3)  # pyright: ignore
    order = sorted(expected, key=lambda name: expected[name][1])
    assert [info.name for info in later.restore()] == order
    for name in order:
        assert later.weights(name).params["x"].tolist() == [expected[name][1]] * SIZES[expected[name][0]]
        assert later.weights(name).version == expected[name][1]


RUN = "0123456789ab:train:{}"


def meta_of(run, kind, name, number, *, owner, expires):
    return CheckpointMeta(
        run=RUN.format(run),
        kind=kind,
        name=name,
        owner=owner,
        base="tiny",
        adapters=Adapters(rank=2),
        optimizer="adamw",
        number=number,
        created=float(number),
        data=f"data-{number}",
        expires=expires,
    )


SAVES = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "publish", "forget", "wait"]),
        st.integers(0, 1),
        st.sampled_from([*KINDS]),
        st.sampled_from("xy"),
        st.integers(1, 9),
    ),
    max_size=12,
)


@settings(max_examples=25)
@given(SAVES)
def test_checkpoints_are_found_listed_and_gone_with_their_time(tmp_path_factory, saves):
    """Run 0 is mine, run 1 is yours; a checkpoint with an odd number has a time to live."""
    clock = Clock()
    store, held = CheckpointStore(tmp_path_factory.mktemp("checkpoints"), clock), {}
    owners = ("me", "you")
    for number, (step, run, kind, name, seconds) in enumerate(saves):
        place = (run, kind, name)
        if step == "save":
            expires = clock.now + seconds if number % 2 else None
            meta = meta_of(run, kind, name, number, owner=owners[run], expires=expires)
            (store.data(meta) / "deep").mkdir(parents=True)
            (store.data(meta) / "deep" / "file").write_bytes(bytes(number))
            (store.data(meta) / "file").write_bytes(bytes(100))
            held[place] = store.commit(meta)
            assert held[place] == attrs.evolve(meta, size=100 + number)
            assert {each.name for each in store.directory(meta.run, kind, name).iterdir()} == {META, f"data-{number}"}
        elif step == "publish" and place in held:
            changed = attrs.evolve(held[place], public=not held[place].public)
            store.change(held[place], public=changed.public, expires=changed.expires)
            held[place] = changed
        elif step == "forget" and place in held:
            store.delete(held.pop(place))
            assert not store.directory(RUN.format(run), kind, name).exists()
        elif step == "wait":
            clock.now += seconds
        gone = [each for each, meta in held.items() if meta.expires is not None and meta.expires <= clock.now]
        for each in gone:
            meta = held.pop(each)
            assert store.get(meta.run, meta.kind, meta.name) is None
            assert not store.directory(meta.run, meta.kind, meta.name).exists()
        for own in (0, 1):
            mine = [meta for meta in held.values() if meta.owner == owners[own]]
            assert store.of_owner(owners[own]) == sorted(mine, key=lambda meta: -meta.number)
            assert store.of_run(RUN.format(own)) == sorted(mine, key=lambda meta: meta.number)
        for meta in held.values():
            for owner in owners:
                found = [store.find, lambda path, own, meta=meta: store.own(meta.run, meta.kind, meta.name, own)]
                for may, find in zip((owner == meta.owner or meta.public, owner == meta.owner), found, strict=True):
                    if may:
                        assert find(meta.path, owner) == meta
                    else:
                        with pytest.raises(Refusal):
                            find(meta.path, owner)
