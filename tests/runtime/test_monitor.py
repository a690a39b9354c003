"""The monitor of a rank, beat by beat: whom it looks at, for how long, and what it says before it ends the process."""

from __future__ import annotations

import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import DistError

from fppo.runtime._standing import Standing
from fppo.runtime.failure import FAILED, Limits, Monitor, PeerError
from fppo.runtime.watch import WaitingCollective, Watch

LIMITS = Limits(period=1.0, timeout=8.0, silence=5.0)
WORLD = 3
GRACE = 2.0  # seconds in which a rank may end by itself


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


class Script:
    """What happens to a monitor: its beats, in a time of their own, in place of its thread; `then(seconds)` happens at
    each of them, and `meanwhile` as it sleeps."""

    def __init__(self):
        self.now, self.at, self.left, self.waits, self.ended = 0.0, 0.0, 0, [], False
        self.then = self.meanwhile = lambda: None

    def wait(self, seconds):
        self.now = self.at = self.now + seconds
        self.waits.append(seconds)
        self.then(self.now)
        self.left -= 1
        return self.left < 0

    def set(self):
        self.ended = True

    def sleep(self, seconds):
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def script(monkeypatch):
    made = Script()

    def ended(status):
        raise Ended(status)

    def beats(target, **_):
        return SimpleNamespace(start=target, join=lambda _: None)

    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    monkeypatch.setattr(time, "sleep", made.sleep)
    monkeypatch.setattr(threading, "Event", lambda: made)
    monkeypatch.setattr(threading, "Thread", beats)
    monkeypatch.setattr(os, "_exit", ended)
    return made


@pytest.fixture
def run(script, capsys):
    """Runs a monitor for some beats; gives the status with which it ends the process, if it does, and what it says."""

    def beats(monitor, most=30, then=lambda now: None):
        script.now, script.left, script.then = 0.0, most, then
        try:
            monitor.__enter__()
            status = None
        except Ended as error:
            (status,) = error.args
        return status, capsys.readouterr().err, script.at

    return beats


@pytest.fixture
def left(script):
    """What a block that ends with an error, or without, raises in its place; None if it raises the same."""

    def ends(monitor, error=None):
        script.ended = False
        try:
            monitor.__exit__(error and type(error), error, None)
        except BaseException as other:
            return other
        finally:
            assert script.ended
        return None

    return ends


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
    for thread in (0, -1):  # the one that makes batches ahead, once it has begun
        ahead.thread = thread
        run(monitor, most=4, then=others(store))
        first, second = (Standing.loaded(store.values[f"{kind}/0"]) for kind in ("stand", "ahead"))
        assert "test_monitor.py:" in first.line
        assert second.line == ("an unknown line" if thread else first.line)
    assert (first.beat, first.step, first.calls, first.at) == (4, 4, {"shard": 1}, "shard 0")
    assert (second.beat, second.step, second.calls) == (4, 4, {"shard": 0})


@pytest.mark.parametrize("rank", [0, 2])
def test_without_the_store_all_ranks_end_and_the_last_one_says_why(run, script, rank):
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
    assert script.waits[-1] == GRACE


def test_another_ranks_error_ends_a_rank_after_a_while_and_its_own_does_not(run, left):
    store = Kept()
    first, second = (Monitor(store, rank, WORLD, watch(), LIMITS) for rank in (0, 1))
    assert left(first, KeyError("mine")) is None
    assert run(first, then=others(store))[:2] == (None, "")
    assert run(second) == (FAILED, "", 1.0 + GRACE)
    later = left(second, ValueError("later"))
    assert (type(later), later.code) == (SystemExit, FAILED)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.tuples(st.integers(-1, WORLD), st.text(max_size=9)).map(json.dumps),
        st.sampled_from(["hello", "[true]", "[3]", "{}", "[]", "null", '["0", "x"]', "[true, 1]", "[1.0]", "[" * 50]),
    )
)
def test_one_rank_tells_of_an_error_that_none_has_written(run, left, capsys, claim):
    store, said = Kept(), []
    store.set("error", claim)
    for rank in range(WORLD):
        status, text, _ = run(Monitor(store, rank, WORLD, watch(), LIMITS))
        assert status == FAILED
        said += text.splitlines()
    (text,) = said
    assert "the store of the ranks holds an error that none of them has written" in text
    ends = [left(Monitor(store, rank, WORLD, watch(), LIMITS), ValueError("mine")) for rank in range(WORLD)]
    assert [type(end) for end in ends] == [SystemExit] * WORLD
    assert capsys.readouterr().err.splitlines() == [text]  # also to those that fail by themselves


def test_a_rank_that_ends_well_or_is_interrupted_claims_nothing(left):
    store = Kept()
    assert left(Monitor(store, 0, WORLD, watch(), LIMITS), KeyboardInterrupt()) is None
    assert store.values == {}
    assert left(Monitor(store, 1, WORLD, watch(), LIMITS)) is None
    assert store.values == {"done/1": b""}


def test_the_first_error_has_a_note_of_its_rank_and_later_ones_are_quiet(left):
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


def test_an_error_beside_a_collective_that_waits_is_the_ranks_own(left):
    """The thread that makes batches ahead has one, whose collective has not failed."""
    store, ahead, error = Kept(), watch(), KeyError("mine")
    ahead.waiting = WaitingCollective("shard", "all_gather", 3, 0.0)
    assert left(Monitor(store, 0, WORLD, watch(), LIMITS, ahead), error) is None
    assert error.__notes__ == ["on rank 0 (shard 0) of 3"]
    assert json.loads(store.values["error"]) == [0, "'mine'"]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("gone", [False, True])
def test_a_collective_that_failed_names_the_ranks_that_no_longer_report(left, script, beside, rank, gone):
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
    script.meanwhile = lambda: store.gone or beat(9)
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
