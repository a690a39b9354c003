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
