"""The thread that decodes: what it hands to the engine and when, and what those who wait hear of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.requests import DrawnTokens, QueueFull, Request, RequestCounts, StepResult
from fppo.serve import loop as module
from fppo.serve.loop import DrawnPart, EngineLoop, ServerStopped
from tests.serve.parrot import log_prob
from tests.serve.test_recorded import answer
from tests.serve.world import until


class Counting:
    """An engine that draws its number of the step for each request, which ends with so many tokens as it has ids.

    It steps once for each `turn` that it gets, and takes adapters but "odd"."""

    limit, together = 77, ()

    def __init__(self, *, most=None):
        self.calls, self.live, self.step_number, self.most = [], {}, 0, most
        self.turns, self.ready, self.opened = threading.Semaphore(0), threading.Event(), None
        self.fails, self.failing, self.gate = None, lambda: None, True

    @contextlib.contextmanager
    def open(self, params, **how):
        self.opened = params, how
        yield self
        self.calls.append("closed")

    @property
    def counts(self):
        return RequestCounts(0, len(self.live), 0)

    def add(self, requests):
        self.calls.append(("add", [each.name for each in requests]))
        if self.most is not None and len(self.live) + len(requests) > self.most:
            raise QueueFull("full")
        self.live |= {each.name: [len(each.ids), []] for each in requests}

    def step(self):
        if self.gate and not self.turns.acquire(timeout=0.01):
            return StepResult(DrawnTokens(), [])
        if self.fails is not None:
            self.failing()
            raise self.fails
        self.calls.append("step")
        self.step_number += 1
        for each in self.live.values():
            each[1].append(self.step_number)
        names, tokens = [*self.live], [self.step_number] * len(self.live)
        ended = [name for name, (most, drawn) in self.live.items() if len(drawn) == most]
        finished = [answer(self.live.pop(name)[1], name) for name in ended]
        numbers = [log_prob(token) for token in tokens]
        return StepResult(DrawnTokens(names, tokens, numbers, numbers, 0), finished)

    def cancel(self, names):
        self.calls.append(("cancel", names))
        for name in names:
            self.live.pop(name, None)

    def release(self, names):
        self.calls.append(("release", names))

    def update(self, params, version):
        self.calls.append(("update", params, version))

    def put(self, name, adapter, version):
        if name == "odd":
            raise ValueError("it does not fit")
        self.calls.append(("put", name, adapter, version))

    def drop(self, name):
        self.calls.append(("drop", name))


def request(name, most):
    return Request(name=name, ids=(3,) * most, sampling=Sampling(), key=Key(0))


@contextlib.contextmanager
def looping(engine, **how):
    made = EngineLoop(engine, {"p": 1}, **how).start()
    try:
        yield made
    finally:
        made.stop()


def ends(heard):
    return [each for each in heard if not isinstance(each, DrawnPart)]


def test_those_who_read_along_hear_of_each_token_and_others_of_the_end():
    engine, heard = Counting(), {"along": [], "end": [], "gone": []}

    async def play(loop):
        for name, receive in heard.items():
            loop.submit(request(name, 3), receive.append, along=name == "along")
        await until(lambda: len(engine.live) == 3)
        engine.turns.release()
        await until(lambda: len(heard["along"]) == 1)
        loop.cancel("gone")
        await until(lambda: ("release", ["gone"]) in engine.calls)
        engine.turns.release(2)
        await until(lambda: ends(heard["along"]) and heard["end"])
        return loop.version

    with looping(engine, version=4, most_waiting=9) as loop:
        assert loop.limit == 77
        assert asyncio.run(play(loop)) == 4
    assert engine.opened == ({"p": 1}, {"version": 4, "most_waiting": 9})
    *parts, last = heard["along"]
    assert parts == [DrawnPart((n,), (log_prob(n),)) for n in (1, 2, 3)]
    assert last.tokens.tolist() == [1, 2, 3]
    assert [each.name for each in heard["end"]] == ["end"]
    assert heard["gone"] == []
    assert ("cancel", ["gone"]) in engine.calls
    assert engine.calls[-1] == "closed"


def test_newer_weights_are_looked_for_every_so_many_steps_and_taken_where_they_are_newer():
    engine, looked = Counting(), []
    found = iter([({"p": 2}, 5), ({"p": 3}, 5), ({"p": 4}, 4), ({"p": 5}, 9)])

    def newer():
        looked.append(engine.step_number)
        return next(found, None)

    engine.gate = False

    async def play(loop):
        for most in (7, 5):  # the second comes to an idle engine, which looks at once
            heard = []
            loop.submit(request("a", most), heard.append, along=False)
            await until(lambda heard=heard: heard)
            await until(lambda: not engine.live)

    with looping(engine, version=3, newer=newer, every=3) as loop:
        asyncio.run(play(loop))
        assert loop.version == 9
    assert looked[:5] == [0, 3, 6, 7, 10]
    assert [each for each in engine.calls if each[0] == "update"] == [("update", {"p": 2}, 5), ("update", {"p": 5}, 9)]
    assert engine.calls[9:12] == [("add", ["a"]), ("update", {"p": 5}, 9), "step"]


def test_weights_that_somebody_brings_are_taken_between_steps():
    engine = Counting()
    with looping(engine, version=3) as loop:
        loop.update({"p": 2}, 2)
        loop.put("x", "adapter", 8).result(30)
        assert loop.version == 2
    assert engine.calls[:2] == [("update", {"p": 2}, 2), ("put", "x", "adapter", 8)]


def test_adapters_are_put_and_dropped_and_their_errors_are_the_callers():
    engine = Counting()
    with looping(engine) as loop:
        assert loop.put("a", "factors", 6).result(30) is None
        with pytest.raises(ValueError, match="does not fit"):
            loop.put("odd", "factors").result(30)
        assert loop.drop("a").result(30) is None
    assert [each for each in engine.calls if each[0] in ("put", "drop")] == [("put", "a", "factors", 6), ("drop", "a")]
    with pytest.raises(ServerStopped):
        loop.put("b", "factors").result(30)


def test_an_engine_without_adapters_says_so():
    own = {name: x for name, x in vars(Counting).items() if name not in ("put", "__dict__", "__weakref__")}
    with looping(type("Plain", (), own)()) as loop, pytest.raises(ValueError, match="runs no adapters"):
        loop.put("a", "factors").result(30)


def test_what_goes_wrong_is_heard_by_all_who_wait_and_who_come_later():
    engine, heard, calls = Counting(), [], []

    async def play(loop):
        engine.failing = lambda: calls.append(loop.put("x", "factors"))  # which the loop does not come to
        loop.submit(request("a", 3), heard.append, along=False)
        await until(lambda: engine.live)
        engine.fails = RuntimeError("broken")
        engine.turns.release()
        await until(lambda: heard)
        with pytest.raises(ServerStopped):
            loop.submit(request("b", 1), heard.append, along=False)
        calls.append(loop.put("x", "factors"))

    with looping(engine) as loop:
        asyncio.run(play(loop))
        assert loop.failure is engine.fails
    assert heard == [engine.fails]
    for call, kind in zip(calls, (RuntimeError, ServerStopped), strict=True):
        with pytest.raises(kind):
            call.result(30)


def test_what_an_engine_that_is_open_refuses_is_the_end_of_that_request_alone():
    engine, heard = Counting(most=2), {name: [] for name in "abc"}
    loop = EngineLoop(engine, {})

    async def play():
        for name, receive in heard.items():
            loop.submit(request(name, 1), receive.append, along=False)
        loop.start()
        await until(lambda: heard["c"])
        engine.turns.release()
        await until(lambda: heard["a"] and heard["b"])

    asyncio.run(play())
    loop.stop()
    assert engine.calls[0] == ("add", ["a", "b", "c"])  # they had come together
    assert [type(each[0]).__name__ for each in heard.values()] == ["FinishedRequest", "FinishedRequest", "QueueFull"]


def test_an_engine_that_cannot_be_opened_says_so_at_the_start():
    class Broken:
        def open(self, params, **how):
            raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        EngineLoop(Broken(), {}).start()  # pyright: ignore[reportArgumentType]


@pytest.fixture
def clock(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def gathered(loop):
    return [each.request.name for each in loop._gathered(idle=False)]


def test_requests_are_read_together_with_those_that_come_within_a_moment(clock):
    """2 ms after the last one, and at most 30 ms after the first."""
    loop = EngineLoop(Counting(), {})

    def comes(name):
        loop._calls.put(module._Waiting(request(name, 1), print, None))  # pyright: ignore

    comes("a")
    comes("b")
    assert gathered(loop) == []
    clock[0] += 0.0019
    assert gathered(loop) == []
    clock[0] += 0.0002
    assert gathered(loop) == ["a", "b"]
    names = [f"{n}" for n in range(18)]
    for name in names[:-1]:
        comes(name)
        assert gathered(loop) == []
        clock[0] += 0.0018
    assert gathered(loop) == names[:-1]  # 30.6 ms after the first
    comes(names[-1])
    assert gathered(loop) == []
    clock[0] += 0.0021
    assert gathered(loop) == names[-1:]


def test_other_calls_are_done_in_their_order_among_the_requests():
    engine = Counting()
    loop = EngineLoop(engine, {})

    async def play():
        for name in "ab":
            loop.release([f"before {name}"])
            loop.submit(request(name, 1), print, along=False)
        loop.start()
        await until(lambda: len(engine.live) == 2)

    asyncio.run(play())
    loop.stop()
    expected = [("release", ["before a"]), ("add", ["a"]), ("release", ["before b"]), ("add", ["b"])]
    assert [call for call in engine.calls if call[0] in ("add", "release")] == expected
