"""An engine whose parameters wait on the host gets them on its device, and all that is asked of it."""

from __future__ import annotations

import contextlib
import weakref
from collections import UserDict

import attrs
import pytest
import torch

from fppo.key import Key
from fppo.rollout import Ask, FetchingEngine, Sampling
from fppo.rollout.requests import Request, RequestCounts
from fppo.rollout.spread import FetchingRequests
from fppo.runtime.offload import Lane
from tests.limited import Limited
from tests.models.families import make
from tests.rollout.test_embedded import engine_of, make_prompts


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


class CopiesNoted(Lane):
    """A lane that knows which of its copies are alive."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.copies = []

    def fetch(self, tensors):
        copies = super().fetch(tensors)()
        self.copies += [weakref.ref(x) for x in copies if x.ndim > 1]
        return lambda: copies

    @property
    def alive(self):
        return sum(ref() is not None for ref in self.copies)


@pytest.mark.parametrize("opens", [False, True])
def test_what_was_fetched_is_given_back_once_the_engine_has_cast_it(opens):
    """While tokens are drawn the device holds the policy once."""
    model, params = make("qwen2", dtype=torch.float32)
    lane = CopiesNoted()
    engine = FetchingEngine(engine=engine_of(attrs.evolve(model, compute_dtype=torch.bfloat16)), lane=lane)
    seen = []
    if opens:
        with engine.open(params):
            seen.append(lane.alive)
    else:
        ask = Ask(make_prompts(), Sampling(max_tokens=2), Key(0), on_finished=lambda *_: seen.append(lane.alive))
        engine.generate(params, ask)
    assert len(lane.copies) > 5
    assert set(seen) == {0}


def test_keys_and_values_are_given_back_before_newer_weights_are_loaded():
    model, params = make("qwen2", dtype=torch.float32)
    engine = engine_of(attrs.evolve(model, compute_dtype=torch.bfloat16), max_rows=64)
    held = []

    class NotedParams(UserDict):
        """Parameters that note what is alive when they are first read."""

        def __getitem__(self, name):
            held.append(limited.live)
            return super().__getitem__(name)

    with Limited() as limited, engine.open(params) as requests:
        loaded = limited.live
        requests.add([Request(name=str(i), ids=(3,) * 200, sampling=Sampling(), key=Key(0)) for i in range(9)])
        requests.step()
        assert limited.live > 2 * loaded
        requests.update(NotedParams(params), 1)
    assert held[0] < loaded / 2, "neither keys and values nor the weights before are on the device"
