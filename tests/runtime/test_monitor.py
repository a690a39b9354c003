"""The monitor of a rank, beat by beat: whom it looks at, for how long, and what it says before it ends the process."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
from torch.distributed import DistError

from fppo.runtime import clock, failure
from fppo.runtime._standing import Standing
from fppo.runtime.failure import FAILED, Limits, Monitor, PeerError
from fppo.runtime.watch import WaitingCollective, Watch

LIMITS = Limits(period=1.0, timeout=8.0, silence=5.0)
WORLD = 3


class Ended(BaseException):
    """The end of the process, with its status."""


class Kept:
    """A store in this process; `gone` once its launcher is."""

    def __init__(self):
        self.values, self.gone = {}, False

    def clone(self):
        return self

    def _there(self):
        if self.gone:
            raise DistError("connection reset")
        return self.values

    def set(self, key, value):
        self._there()[key] = value.encode()

    def get(self, key):
        return self._there()[key]

    def check(self, keys):
        return all(key in self._there() for key in keys)

    def compare_set(self, key, expected, desired):
        assert expected == ""
        return self._there().setdefault(key, desired.encode())


class Beats:
    """In place of the event for which a monitor waits between two beats: time passes, and `then(seconds)` happens."""

    def __init__(self, most, then, now):
        self.left, self.then, self.now, self.long = most, then, now, []

    def wait(self, seconds):
        self.now[0] += seconds
        self.long.append(seconds)
        self.then(self.now[0])
        self.left -= 1
        return self.left < 0


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a monitor for some beats; gives the status with which it ends the process, if it does, and what it says."""
    now, slept = [0.0], []
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append))
    monkeypatch.setattr(failure, "time", SimpleNamespace(sleep=slept.append))

    def ended(status):
        raise Ended(status)

    monkeypatch.setattr(failure.os, "_exit", ended)

    def beats(monitor, most=30, then=lambda now: None):
        now[0] = 0.0
        monitor._ended = Beats(most, then, now)
        try:
            monitor._run()
            status = None
        except Ended as error:
            (status,) = error.args
        return status, capsys.readouterr().err, now[0]

    return beats


def others(store, frozen=()):
    """Other ranks report at every beat, but for those that are frozen."""

    def then(now):
        for rank in range(1, WORLD):
            beat = 0 if rank in frozen else int(now)
            own = Standing(beat=beat, step=4, calls={"shard": 2}, line=f"a.py:{rank} in f")
            store.set(f"stand/{rank}", own.dumped())

    return then


def watch():
    made = Watch({"shard": (0, 1, 2)}, "shard 0")
    made.step = 4
    return made


@pytest.mark.parametrize("frozen", [1, 2])
def test_a_rank_looks_at_the_next_one_alone_and_for_as_long_as_the_limit_says(run, frozen):
    store = Kept()
    status, said, now = run(Monitor(store, 0, WORLD, watch(), LIMITS), then=others(store, (frozen,)))
    if frozen == 2:  # at which rank 1 looks
        assert (status, said) == (None, "")
        return
    assert (status, said) == (FAILED, "fppo: rank 0 (shard 0): rank 1 has not reported for 5 s\n")
    assert 6.0 <= now <= 8.0
    assert json.loads(store.values["error"]) == [0, "rank 1 has not reported for 5 s"]


def test_the_last_rank_looks_at_the_first(run):
    store = Kept()
    store.set("stand/0", Standing(1, 1, {}, "").dumped())
    status, said, _ = run(Monitor(store, 2, WORLD, watch(), LIMITS), then=others(store))
    assert (status, said) == (FAILED, "fppo: rank 2 (shard 0): rank 0 has not reported for 5 s\n")


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("how", ["waits", "goes on", "failed"])
def test_a_collective_is_waited_for_as_long_as_the_limit_says(run, beside, how):
    store, own = Kept(), watch()
    ahead = watch() if beside else None
    other = ahead or own
    other.waiting = WaitingCollective("shard", "all_gather", 3, 0.0)
    other.error = RuntimeError("reset") if how == "failed" else None
    report = others(store)

    def then(now):
        report(now)
        for rank in range(1, WORLD):
            store.set(f"ahead/{rank}", Standing(int(now), 4, {"shard": 9 if rank == 1 else 1}, "b.py:1 in g").dumped())
        if how == "goes on" and now % 6 == 0:
            other.waiting = WaitingCollective("shard", "all_gather", 3, now)

    status, said, now = run(Monitor(store, 0, WORLD, own, LIMITS, ahead), then=then)
    if how != "waits":
        assert (status, said) == (None, "")
        return
    assert status == FAILED
    assert 9.0 <= now <= 11.0
    start = "fppo: rank 0 (shard 0): " + ("of the batches that are made ahead, " if beside else "")
    late = "rank 2, at b.py:1 in g" if beside else "rank 1, at a.py:1 in f after step 4; rank 2, at a.py:2 in f"
    assert said == (
        f"{start}after step 4: all_gather over the axis 'shard' has waited for 8 s for {late} after step 4 "
        "(mesh.timeout is the limit)\n"
    )


def test_a_rank_publishes_what_both_of_its_threads_do(run):
    store, own, ahead = Kept(), watch(), watch()
    own.count("shard", 3)
    ahead.step = 0
    monitor = Monitor(store, 0, WORLD, own, LIMITS, ahead)
    monitor._worker = threading.get_ident()
    for thread in (0, -1):  # the one that makes batches ahead, once it has begun
        ahead.thread = thread
        run(monitor, most=4, then=others(store))
        first, second = (Standing.loaded(store.values[f"{kind}/0"]) for kind in ("stand", "ahead"))
        assert "test_monitor.py:" in first.line
        assert second.line == ("an unknown line" if thread else first.line)
    assert (first.beat, first.step, first.calls, first.at) == (4, 4, {"shard": 1}, "shard 0")
    assert (second.beat, second.step, second.calls) == (4, 4, {"shard": 0})


@pytest.mark.parametrize("rank", [0, 2])
def test_without_the_store_all_ranks_end_and_the_last_one_says_why(run, rank):
    store = Kept()
    report = others(store)

    def then(now):
        if now == 3.0:
            store.gone = True
        if not store.gone:
            report(now)

    monitor = Monitor(store, rank, WORLD, watch(), LIMITS)
    store.set("stand/0", "{}")
    status, said, _ = run(monitor, then=then)
    text = "fppo: rank 2: the launcher of the ranks cannot be reached any more (connection reset)\n"
    assert (status, said) == (FAILED, text if rank == 2 else "")
    assert monitor._ended.long[-1] == failure._GRACE


@pytest.mark.parametrize("claim", ["another's", "its own", "hello", "[true]", "[3]", "{}"])
def test_another_ranks_error_ends_a_rank_after_a_while_and_its_own_does_not(run, claim):
    store = Kept()
    monitor = Monitor(store, 0, WORLD, watch(), LIMITS)
    if claim == "its own":
        assert monitor._claim("mine", alone=False)
    else:
        store.set("error", json.dumps([1, "of rank 1"]) if claim == "another's" else claim)
    status, said, now = run(monitor, then=others(store))
    if claim == "its own":
        assert (status, said) == (None, "")
        return
    assert (status, now) == (FAILED, 1.0 + failure._GRACE)
    text = f"the store of the ranks holds an error that none of them has written, {claim}: another"
    assert (text in said) == (claim != "another's")
    assert monitor._told
    assert not monitor._claim("later", alone=True)


def left(monitor, error=None):
    """What a block that ends with an error, or without, raises in its place; None if it raises the same."""
    monitor._thread = SimpleNamespace(join=lambda _: None)
    try:
        monitor.__exit__(error and type(error), error, None)
    except BaseException as other:
        return other
    finally:
        assert monitor._ended.is_set()
    return None


def test_a_rank_that_ends_well_or_is_interrupted_claims_nothing():
    store = Kept()
    assert left(Monitor(store, 0, WORLD, watch(), LIMITS), KeyboardInterrupt()) is None
    assert store.values == {}
    assert left(Monitor(store, 1, WORLD, watch(), LIMITS)) is None
    assert store.values == {"done/1": b""}


@pytest.mark.usefixtures("run")
def test_the_first_error_has_a_note_of_its_rank_and_later_ones_are_quiet():
    store = Kept()
    first, second = KeyError("mine"), ValueError("later")
    assert left(Monitor(store, 0, WORLD, watch(), LIMITS), first) is None
    assert first.__notes__ == ["on rank 0 (shard 0) of 3"]
    assert json.loads(store.values["error"]) == [0, "'mine'"]
    found = left(Monitor(store, 1, WORLD, watch(), LIMITS), second)
    assert (type(found), found.code) == (SystemExit, FAILED)
    assert not hasattr(second, "__notes__")
    store.gone = True  # then a rank's own error is told by it, and another's by the last rank
    third = ValueError("without the store")
    assert left(Monitor(store, 1, WORLD, watch(), LIMITS), third) is None


@pytest.mark.usefixtures("run")
def test_an_error_beside_a_collective_that_waits_is_the_ranks_own(monkeypatch):
    """The thread that makes batches ahead has one, whose collective has not failed."""
    monkeypatch.setattr(failure, "sleep", lambda seconds: None)
    store, ahead, error = Kept(), watch(), KeyError("mine")
    ahead.waiting = WaitingCollective("shard", "all_gather", 3, 0.0)
    assert left(Monitor(store, 0, WORLD, watch(), LIMITS, ahead), error) is None
    assert error.__notes__ == ["on rank 0 (shard 0) of 3"]
    assert json.loads(store.values["error"]) == [0, "'mine'"]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("gone", [False, True])
def test_a_collective_that_failed_names_the_ranks_that_no_longer_report(run, monkeypatch, beside, rank, gone):
    del run
    store, own = Kept(), watch()
    ahead = watch() if beside else None
    broken = ahead or own
    broken.waiting, broken.error = WaitingCollective("shard", "all_gather", 3, 0.0), RuntimeError("reset")
    report = others(store, (rank or 1,))
    for kind in ("stand", "ahead"):
        store.set(f"{kind}/0", Standing(1, 4, {"shard": 3}, "a.py:0 in f").dumped())

    def beat(now):
        report(now)
        for number in (1, 2):
            store.values[f"ahead/{number}"] = store.values[f"stand/{number}"]
        if rank:  # the first rank reports, too
            store.set("stand/0", Standing(int(now), 4, {"shard": 3}, "a.py:0 in f").dumped())
            store.values["ahead/0"] = store.values["stand/0"]

    beat(1)
    monkeypatch.setattr(failure, "sleep", lambda seconds: beat(9))
    store.gone = gone
    error = RuntimeError("of the collective")
    found = left(Monitor(store, rank, WORLD, own, LIMITS, ahead), error)
    start = "of the batches that are made ahead, " if beside else ""
    if gone and rank == 0:
        assert type(found) is SystemExit
        return
    who = "; no longer reporting: rank 1, at a.py:1 in f after step 4" if rank == 0 else ""
    assert type(found) is PeerError
    assert found.__cause__ is error
    assert str(found) == f"{start}after step 4: all_gather over the axis 'shard' failed{who} (reset)"
