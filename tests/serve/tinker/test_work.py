"""The worker: each run's requests in order, no run before another, and gaps that end."""

from __future__ import annotations

import itertools
import threading

import pytest

from fppo.serve.tinker.decode import LoadVerb, RefusedVerb
from fppo.serve.tinker.futures import FailedRequest, Futures, Payload
from fppo.serve.tinker.work import Worker, request_name


class Actions:
    """Notes what is done; a request of run r takes `costs[r]` seconds of the clock."""

    def __init__(self, costs):
        self.costs, self.order, self.given_up, self.now = costs, [], [], 0.0
        self.kinds, self.joined, self.seconds = {}, [], []
        self.free = threading.Event()
        self.free.set()

    def do(self, run, number, verb):
        self.free.wait()
        self.order.append((run, number))
        self.now += self.costs.get(run, 1.0)
        return FailedRequest(verb.error) if isinstance(verb, RefusedVerb) else Payload(b"")

    def joins(self, run, verb):
        return self.kinds.get(run)

    def join(self, asked):
        self.joined.append([(run, number) for run, number, _ in asked])
        self.now += 6.0

    def done(self, run, number, seconds):
        self.seconds.append(seconds)

    def give_up(self, run, numbers, error):
        self.given_up.append((run, tuple(numbers)))


VERB = LoadVerb(path="", optimizer=False)


def worker_of(costs=None, **changes):
    actions = Actions(costs or {})
    futures = Futures(lambda: 0.0)
    return actions, futures, Worker(actions, futures, lambda: actions.now, look_seconds=0.01, **changes)


def put(worker, futures, run, number, verb=VERB):
    futures.open(request_name(run, number), "me")
    worker.put(run, number, verb)


def finished(worker, runs):
    for _ in range(2000):
        if all(worker.idle(run) for run in runs):
            return
        threading.Event().wait(0.005)
    raise AssertionError("the worker did not finish")


def _pass_time(actions):
    """Let the clock go on until requests are given up."""
    for _ in range(1000):
        if actions.given_up:
            break
        actions.now += 10.0
        threading.Event().wait(0.01)


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3]))[::2])
def test_a_runs_requests_are_done_by_their_numbers_whatever_the_order_of_arrival(order):
    actions, futures, worker = worker_of()
    worker.add_run("a", 1)
    for number in order:
        put(worker, futures, "a", number)
    worker.start()
    finished(worker, ["a"])
    worker.stop()
    assert actions.order == [("a", 1), ("a", 2), ("a", 3)]
    assert futures.state("a:3", "me").outcome == Payload(b"")
    put(worker, futures, "a", 5)
    assert [worker.knows("a", number) for number in (0, 3, 4, 5, 6)] == [True, True, False, True, False]


def test_a_run_with_dear_requests_does_not_hold_up_another():
    """Of two runs, one with requests ten times as dear, each gets half of the time."""
    actions, futures, worker = worker_of({"dear": 10.0, "cheap": 1.0})
    for run in ("dear", "cheap"):
        worker.add_run(run, 1)
        for number in range(1, 31):
            put(worker, futures, run, number)
    worker.start()
    finished(worker, ["dear", "cheap"])
    worker.stop()
    first = actions.order[:22]
    assert sum(run == "cheap" for run, _ in first) == 20


def test_a_run_that_was_idle_has_saved_up_no_time():
    actions, futures, worker = worker_of({"old": 1.0, "new": 1.0})
    actions.free.clear()
    worker.add_run("old", 1)
    for number in range(1, 21):
        put(worker, futures, "old", number)
    worker.start()
    actions.free.set()
    finished(worker, ["old"])
    actions.free.clear()
    worker.add_run("new", 1)
    for run, numbers in (("new", range(1, 11)), ("old", range(21, 31))):
        for number in numbers:
            put(worker, futures, run, number)
    actions.free.set()
    finished(worker, ["old", "new"])
    worker.stop()
    assert sum(run == "new" for run, _ in actions.order[20:30]) <= 6


def test_a_gap_waits_and_then_fails_what_is_behind_it():
    actions, futures, worker = worker_of(gap_seconds=5.0)
    worker.add_run("a", 1)
    put(worker, futures, "a", 2)
    put(worker, futures, "a", 3)
    worker.start()
    threading.Event().wait(0.05)
    assert actions.order == []
    actions.now = 100.0
    _pass_time(actions)
    assert actions.given_up == [("a", (2, 3))]
    put(worker, futures, "a", 1)
    finished(worker, ["a"])
    worker.stop()
    assert actions.order == [("a", 1), ("a", 2), ("a", 3)]
    outcome = futures.state("a:2", "me").outcome
    assert isinstance(outcome, FailedRequest)
    assert "request 1 of a did not come" in outcome.error
    assert futures.state("a:1", "me").outcome == Payload(b"")


def test_a_run_is_at_work_until_its_state_is_saved():
    """Whoever finds it idle may let go of it, and what is being saved would be gone."""
    actions, futures, worker = worker_of()
    seen = []
    actions.done = lambda run, number, seconds: seen.append((number, worker.idle(run)))
    worker.add_run("a", 1)
    put(worker, futures, "a", 1)
    worker.start()
    finished(worker, ["a"])
    worker.stop()
    assert seen == [(1, False)]


def test_what_cannot_be_given_up_for_good_is_tried_again():
    actions, futures, worker = worker_of(gap_seconds=5.0)
    give_up, full = actions.give_up, [OSError("the disk is full")]

    def given_up(run, numbers, error):
        if full:
            raise full.pop()
        give_up(run, numbers, error)

    actions.give_up = given_up
    worker.add_run("a", 1)
    put(worker, futures, "a", 2)
    worker.start()
    with pytest.warns(RuntimeWarning, match="a: requests were not given up: OSError: the disk is full"):
        _pass_time(actions)
    worker.stop()
    assert actions.given_up == [("a", (2,))]


def test_a_request_that_met_a_full_disk_is_done_again():
    actions, futures, worker = worker_of()
    do, full = actions.do, [OSError("the disk is full")]

    def done(run, number, verb):
        if full:
            raise full.pop()
        return do(run, number, verb)

    actions.do = done
    worker.add_run("a", 1)
    put(worker, futures, "a", 1)

    def play():
        worker.start()
        finished(worker, ["a"])

    with pytest.warns(RuntimeWarning, match="a:1 is tried again: OSError: the disk is full"):
        play()
    worker.stop()
    assert futures.state("a:1", "me").outcome == Payload(b"")


def test_requests_that_can_be_computed_in_one_pass_are_and_each_is_done_in_its_own_turn():
    actions, futures, worker = worker_of()
    actions.kinds = {"a": "base", "b": "base", "c": "base", "other": "another"}
    for run in ("a", "b", "c", "other", "alone"):
        worker.add_run(run, 1)
        put(worker, futures, run, 1)
    put(worker, futures, "a", 2)
    put(worker, futures, "c", 3)  # whose request 2 is missing
    worker.start()
    finished(worker, ["a", "b", "other", "alone"])
    worker.stop()
    assert actions.joined == [[("a", 1), ("b", 1), ("c", 1)]]
    assert sorted(actions.order) == [("a", 1), ("a", 2), ("alone", 1), ("b", 1), ("c", 1), ("other", 1)]
    assert actions.seconds[:3] == [3.0, 3.0, 3.0]  # each a third of the six, and its own
    assert futures.state("c:1", "me").outcome == Payload(b"")
