"""Futures and ends of requests: set once, heard of by whoever waits, forgotten when their time is over."""

from __future__ import annotations

import asyncio
import threading

from fppo.serve.tinker.futures import Completions, FailedRequest, Futures, Payload


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_whoever_waits_hears_of_the_end_from_another_thread():
    futures = Futures(Clock())
    assert futures.open("a", "me")
    assert not futures.open("a", "me")

    async def wait():
        waiting = [asyncio.create_task(futures.wait("a", "me", 30.0)) for _ in range(3)]
        await asyncio.sleep(0)
        threading.Thread(target=futures.settle, args=("a", Payload(b"x"))).start()
        return await asyncio.gather(*waiting)

    assert [state.outcome for state in asyncio.run(wait())] == [Payload(b"x")] * 3
    futures.settle("a", FailedRequest("late"))
    assert futures.state("a", "me").outcome == Payload(b"x"), "an outcome is set once"


def test_a_future_is_its_owners_alone():
    futures = Futures(Clock())
    futures.open("a", "me")
    assert futures.state("a", "you") is None
    assert asyncio.run(futures.wait("a", "you", 0.0)) is None
    assert futures.pending("me") == (1, 0)
    assert futures.pending("you") == (0, 0)


def test_waiting_ends_without_an_outcome():
    futures = Futures(Clock())
    futures.open("a", "me")
    state = asyncio.run(futures.wait("a", "me", 0.001))
    assert state is not None
    assert state.outcome is None


def test_outcomes_are_forgotten_some_time_after_they_were_read_and_long_after_they_were_not():
    clock = Clock()
    futures = Futures(clock, read_seconds=10.0, seconds=100.0)
    for name in ("read", "unread", "open"):
        futures.open(name, "me")
    for name in ("read", "unread"):
        futures.settle(name, Payload(b""))
    futures.read("read")
    clock.now += 11
    assert futures.sweep() == ["read"]
    clock.now += 100
    assert futures.sweep() == ["unread"]
    assert futures.state("open", "me") is not None
    assert futures.open("read", "me")


def test_an_outcome_that_is_read_late_can_be_read_again_as_long_as_others():
    clock = Clock()
    futures = Futures(clock, read_seconds=10.0, seconds=100.0)
    futures.open("late", "me")
    futures.settle("late", Payload(b""))
    clock.now += 50
    futures.read("late")
    clock.now += 9
    assert futures.sweep() == []
    clock.now += 2
    assert futures.sweep() == ["late"]


def test_ends_come_in_order_behind_a_cursor():
    async def poll():
        ends = Completions(10)
        target, other = ("s", 0), ("s", 1)
        ends.add(target, "a", Payload(b"12"))
        ends.add(other, "b", FailedRequest("no"))
        first, cursor = await ends.after(target, 0, 0.0)
        asyncio.get_running_loop().call_soon(ends.add, target, "c", FailedRequest("no"))
        second, last = await ends.after(target, cursor, 30.0)
        nothing, same = await ends.after(target, last, 0.0)
        return first, second, nothing, same == last > cursor > 10

    first, second, nothing, ordered = asyncio.run(poll())
    assert [(each.name, each.size) for each in first] == [("a", 2)]
    assert [(each.name, each.size) for each in second] == [("c", None)]
    assert nothing == []
    assert ordered


def test_pending_requests_are_counted_until_they_have_an_outcome_or_are_forgotten():
    futures = Futures(Clock())
    for name, size in (("a", 5), ("b", 7), ("c", 1)):
        futures.open(name, "me", size)
        futures.open(name, "me", 100)
    assert futures.pending("me") == (3, 13)
    futures.settle("a", Payload(b""))
    futures.settle("a", Payload(b""))
    futures.forget(["c", "a"])
    assert futures.pending("me") == (1, 7)


def test_what_nobody_reads_is_held_from_its_end_on():
    clock = Clock()
    futures = Futures(clock, read_seconds=5.0, seconds=20.0)
    futures.open("a", "me")
    clock.now += 100.0
    futures.settle("a", Payload(b"x"))
    clock.now += 20.0
    assert futures.sweep() == []
    futures.read("a")
    clock.now += 0.1
    assert futures.sweep() == ["a"]
