"""The process of a pool, in a thread of this one: what it answers to tasks, in whatever order they come."""

from __future__ import annotations

import contextlib
import pickle
import re
import select
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.workers import process
from fppo.workers.calls import Mode
from fppo.workers.channel import SECRET, Channel
from fppo.workers.sample import Outcome
from tests.workers.test_calls import check, halves, later, one, sample_of

KEY = bytes(range(SECRET))


def together(items):
    return [one(item) for item in items]


class Prepared:
    """A function that is prepared once, or cannot be."""

    made = 0

    def __init__(self, how):
        self.how = how

    def reward_prepare(self):
        Prepared.made += 1
        if self.how == "exit":
            raise SystemExit(3)
        if self.how == "raise":
            raise KeyError("not there")

    def __call__(self, item):
        return one(item)


class Pool:
    """The other end of the channel."""

    def __init__(self, end, functions):
        self.channel = Channel(end, KEY)
        self.channel.send(pickle.dumps([pickle.dumps(fn) for fn in functions]))

    def task(self, place, mode, samples):
        self.channel.send(pickle.dumps((place, tuple(mode), [(each, tuple(sample)) for each, sample in samples])))

    def messages(self, count):
        """So many messages of it."""
        found = []
        while len(found) < count:
            assert select.select([self.channel], [], [], 30.0)[0]
            found += map(pickle.loads, self.channel.receive())
        return found


@contextlib.contextmanager
def started(*functions):
    """The process with these functions, until the context ends."""
    parents, (ours, theirs) = [], socket.socketpair()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "end_with", parents.append)
        given = (str(theirs.detach()), KEY.hex(), "77")
        thread = threading.Thread(target=process.main, args=given, daemon=True)
        thread.start()
        pool = Pool(ours, functions)
        try:
            yield pool
        finally:
            pool.channel.close()
            thread.join(30.0)
        assert not thread.is_alive()
        assert parents == [77]


FUNCTIONS = (one, later, together)
MODES = (Mode("sample", False, 60.0, 60.0, 3), Mode("sample", True, 60.0, 60.0, 3), Mode("batch", False, 60.0, 60.0, 3))
FAULTS = st.lists(st.sampled_from(["", "", "", "raise", "exit", "own limit"]), min_size=1, max_size=5)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), FAULTS), max_size=5))
def test_tasks_are_answered_one_after_the_other(tasks):
    """Coroutines of one function may come together; all samples have their own outcomes, under their numbers."""
    with started(*FUNCTIONS) as pool:
        assert pool.messages(1) == [("ready",)]
        for place, (fn, faults) in enumerate(tasks):
            samples = [(100 * place + 7 * each, sample_of(each, what)) for each, what in enumerate(faults)]
            pool.task(fn, MODES[fn], samples)
        ticks = sum(halves(faults) for fn, faults in tasks if fn == 2)
        said = pool.messages(sum(len(faults) for _, faults in tasks) + ticks)
    assert said.count(("tick",)) == ticks
    outcomes = [message for message in said if message != ("tick",)]
    order = [number // 100 for number, _ in outcomes]
    alike = [0] * len(tasks)
    for place in range(1, len(tasks)):
        same = tasks[place][0] == tasks[place - 1][0] == 1
        alike[place] = alike[place - 1] + (0 if same else 1)
    assert [alike[place] for place in order] == sorted(alike[place] for place in order)
    found = dict(outcomes)
    assert len(found) == len(outcomes)
    for place, (_, faults) in enumerate(tasks):
        check(faults, [Outcome(*found[100 * place + 7 * each]) for each in range(len(faults))])


@pytest.mark.parametrize(
    ("how", "text"), [("fine", None), ("raise", "KeyError: 'not there'"), ("exit", r"sys.exit\(3\)")]
)
def test_functions_are_prepared_before_it_is_ready(how, text, monkeypatch):
    monkeypatch.setattr(Prepared, "made", 0)
    with started(one, Prepared(how)) as pool:
        (said,) = pool.messages(1)
        assert Prepared.made == 1
        if text is None:
            assert said == ("ready",)
            pool.task(1, MODES[0], [(5, sample_of(4))])
            ((number, outcome),) = pool.messages(1)
            assert (number, outcome[:2]) == (5, ("value", 2.0))
        else:
            assert said[0] == "failed"
            assert re.search(text, said[1])
