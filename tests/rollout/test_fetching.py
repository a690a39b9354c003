"""An engine whose parameters wait on the host gets them on its device, and all that is asked of it."""

from __future__ import annotations

import contextlib

import pytest
import torch

from fppo.key import Key
from fppo.rollout import Ask, FetchingEngine, Sampling
from fppo.rollout.requests import Request, RequestCounts
from fppo.rollout.spread import FetchingRequests


class Fetching:
    """A lane that notes what it fetches: a copy with 1 more."""

    def __init__(self):
        self.fetched = []

    def fetch(self, tensors):
        self.fetched.append([float(x) for x in tensors])
        return lambda: [x + 1 for x in tensors]


class Inner:
    """An engine, open or not, that notes its calls."""

    together, limit, counts = ("tensor",), 17, RequestCounts(1, 2, 3)

    def __init__(self):
        self.calls = []

    @contextlib.contextmanager
    def open(self, params, **how):
        self.calls.append(("open", float(params["w"]), how))
        yield self
        self.calls.append("closed")

    def generate(self, params, ask):
        self.calls.append(("generate", float(params["w"]), ask))
        return "rollout"

    def __getattr__(self, name):
        return lambda *given: self.calls.append((name, *given)) or f"result of {name}"


def test_all_that_is_asked_comes_with_parameters_on_the_device():
    inner, lane = Inner(), Fetching()
    engine, ask = FetchingEngine(engine=inner, lane=lane), Ask("prompts", Sampling(), Key(0))  # pyright: ignore
    assert engine.generate({"w": torch.tensor(4.0)}, ask) == "rollout"
    request = Request(name="a", ids=(3,), sampling=Sampling(), key=Key(0))
    with engine.open({"w": torch.tensor(6.0)}, version=5, most_waiting=9) as requests:
        assert isinstance(requests, FetchingRequests)
        assert (requests.together, requests.limit, requests.counts) == (("tensor",), 17, (1, 2, 3))
        requests.add([request])
        assert requests.step() == "result of step"
        requests.cancel(["a"])
        requests.release(["b"])
        requests.update({"w": torch.tensor(8.0)}, 6)
    *calls, update, closed = inner.calls
    assert calls == [
        ("generate", 5.0, ask),
        ("open", 7.0, {"version": 5, "most_waiting": 9}),
        ("add", [request]),
        ("step", None),
        ("cancel", ["a"]),
        ("release", ["b"]),
    ]
    assert (update[0], {name: float(x) for name, x in update[1].items()}, update[2]) == ("update", {"w": 9.0}, 6)
    assert closed == "closed"
    assert lane.fetched == [[4.0], [6.0], [8.0]]


def test_an_engine_that_cannot_be_open_answers_at_once_with_the_same_parameters():
    class Generating:
        def generate(self, params, ask):
            raise ValueError(f"{float(params['w'])}, version {ask.version}")

    engine = FetchingEngine(engine=Generating(), lane=Fetching())  # pyright: ignore
    with engine.open({"w": torch.tensor(1.0)}, version=5) as requests:
        requests.add([Request(name="a", ids=(3,), sampling=Sampling(), key=Key(0))])
        requests.update({"w": torch.tensor(3.0)}, 6)
        with pytest.raises(ValueError, match=r"4\.0, version 6"):
            requests.step()
