"""CUDA graphs by a stand-in for torch.cuda: what is run, recorded and replayed, on which stream, and in what order."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

from fppo.runtime.graphs import as_graphs

DEVICE = torch.device("cuda", 1)


class Stand:
    """What torch.cuda was asked for, in order. A replay runs again what was recorded."""

    def __init__(self):
        self.said, self.streams, self.graphs, self.pools = [], ["the caller's"], weakref.WeakSet(), 0
        self.at_work = None
        stand = self

        class Graph:
            def __init__(self):
                stand.graphs.add(self)
                self.number = len(stand.graphs)

            def capture_begin(self, *, pool, capture_error_mode):
                stand.said.append(("begin", stand.streams[-1], pool, capture_error_mode))
                stand.at_work = self

            def capture_end(self):
                stand.said.append(("end", stand.streams[-1]))
                stand.at_work = None

            def replay(self):
                stand.said.append(("replay", self.number))

        class Stream:
            def __init__(self, name):
                self.name = name

            def wait_stream(self, other):
                stand.said.append((self.name, "waits for", other.name))

        @contextlib.contextmanager
        def stream(other):
            self.streams.append(other.name)
            try:
                yield
            finally:
                self.streams.pop()

        def pool():
            self.pools += 1
            return f"pool {self.pools}"

        self.fakes = {
            "CUDAGraph": Graph,
            "graph_pool_handle": pool,
            "Stream": lambda device: Stream(f"beside on {device.index}"),
            "current_stream": lambda device: Stream(f"the caller's on {device.index}"),
            "stream": stream,
            "empty_cache": lambda: self.said.append("empty"),
        }

    def run(self, name, fails=False):
        def call():
            self.said.append((name, self.streams[-1], self.at_work is not None))
            if fails and self.at_work is not None:
                raise KeyError(name)
            return [name, len(self.said)]

        return call


@pytest.fixture
def stand(monkeypatch):
    made = Stand()
    for name, fake in made.fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return made


CAPTURED = [
    ("beside on 1", "waits for", "the caller's on 1"),
    ("begin", "beside on 1", "pool 1", "thread_local"),
    ("a", "beside on 1", True),
    ("end", "beside on 1"),
    ("the caller's on 1", "waits for", "beside on 1"),
    ("replay", 1),
]


@pytest.mark.parametrize("tidy", [False, True])
def test_the_first_call_runs_plainly_the_second_is_recorded_and_all_from_it_on_are_replayed(stand, tidy):
    record = as_graphs(DEVICE, tidy=tidy)
    call = record(stand.run("a"))
    assert (call(), stand.said) == (["a", 1], [("a", "the caller's", False)])
    stand.said.clear()
    second = call()
    assert stand.said == ["empty"] * tidy + CAPTURED
    assert second[0] == "a"
    stand.said.clear()
    assert call() is call() is second  # the same tensors, with the replay's numbers
    assert stand.said == [("replay", 1)] * 2


def test_functions_of_one_recorder_share_a_pool_and_have_a_graph_each(stand):
    record = as_graphs(DEVICE)
    calls = [record(stand.run(name)) for name in "ab"]
    found = [[call()[0] for call in calls] for _ in range(3)]
    assert found == [["a", "b"]] * 3
    assert [words[2] for words in stand.said if words[0] == "begin"] == ["pool 1"] * 2
    assert [words for words in stand.said if words[0] == "replay"] == [("replay", 1), ("replay", 2)] * 2
    del calls
    gc.collect()
    assert len(stand.graphs) == 2  # while one of them may be replayed, the pool is kept
    del record
    gc.collect()
    assert len(stand.graphs) == 0


def test_a_recording_that_fails_ends(stand):
    call = as_graphs(DEVICE)(stand.run("a", fails=True))
    call()
    with pytest.raises(KeyError):
        call()
    assert stand.at_work is None
    assert stand.streams == ["the caller's"]
    assert ("replay", 1) not in stand.said
