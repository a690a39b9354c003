"""Weights that are kept for what is generated ahead, and batches that are taken as they come, by stand-ins."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from fppo import metrics
from fppo.data.cursor import DataCursor
from fppo.key import Key
from fppo.pipeline import ahead
from fppo.pipeline.ahead import (
    AheadSampler,
    NewestWeights,
    PendingBatches,
    Sampled,
    check_interrupts,
    keep,
    sample_ahead,
)
from fppo.pipeline.program import RunState
from fppo.steps.train_state import TrainState
from tests.pipeline.test_step import BATCH, Stages


def run_of(version: int, step: int = 2, **changes: Any) -> RunState:
    actor = TrainState(params={"w": torch.full((1,), float(version))}, opt=None, step=version)
    return RunState(actor=actor, key=Key(0), step=step, **changes)


def keeping(log: list[Any]) -> Any:
    """A program that notes what it keeps and where it brings it."""

    def hold(params):
        log.append(("hold", params["w"].item()))
        return {"w": params["w"] + 100}

    return SimpleNamespace(hold=hold, bring=lambda params: log.append(("bring", params["w"].item())))


def test_weights_are_kept_once_for_each_version_and_given_before_they_are_sent():
    log: list[Any] = []
    program, newest = keeping(log), NewestWeights()
    assert keep(run_of(3), program=program)["w"].item() == 103
    assert log == [("hold", 3.0), ("bring", 103.0)]
    log.clear()
    given = []

    def bring(params):
        given.append(newest())
        log.append("bring")

    program.bring = bring
    assert newest() is None
    kept = keep(run_of(3), program=program, newest=newest)
    assert (kept["w"].item(), newest()[1], newest()[0] is kept) == (103.0, 3, True)
    assert given[0] == (kept, 3)
    assert keep(run_of(3), program=program, newest=newest) is kept
    assert log == [("hold", 3.0), "bring"]
    later = keep(run_of(5), program=program, newest=newest)
    assert (later["w"].item(), newest()) == (105.0, (later, 5))
    assert log == [("hold", 3.0), "bring", ("hold", 5.0), "bring"]
    newest.end()
    with pytest.raises(ahead.Ended):
        newest()


def part(number: int) -> Sampled:
    timings = {"timing_s/gen": metrics.spent((float(number), 1.0))}
    batch: Any = f"batch {number}"
    return Sampled((batch,), DataCursor(position=number), timings)


def under_way(count: int, done: tuple[int, ...]) -> tuple[PendingBatches, list[Any]]:
    results = [Future[Sampled]() for _ in range(count)]
    for number in done:
        results[number].set_result(part(number))
    return PendingBatches(deque(results)), results


@pytest.mark.parametrize(
    ("least", "done", "taken"),
    [
        (0, (), []),
        (0, (0, 1), [0, 1]),
        (0, (0, 2), [0]),  # in order
        (1, (0,), [0]),
        (1, (0, 1), [0, 1]),
        (2, (0, 1), [0, 1]),
        (None, (0, 1, 2), [0, 1, 2]),
    ],
)
def test_batches_are_taken_in_order_as_many_as_are_wanted_and_those_that_are_there(least, done, taken):
    way, results = under_way(3, done)
    assert way.done is (len(done) == 3)
    found = way(least)
    assert list(found.batches) == [f"batch {number}" for number in taken]
    assert (found.cursor.epoch, found.cursor.position) == (0, taken[-1] if taken else 0)
    numbers = metrics.report(found.timings)
    assert numbers.pop("timing_s/wait") >= 0
    assert numbers == ({"timing_s/gen": float(len(taken))} if taken else {})
    assert list(way.results) == results[len(taken) :]
    run = run_of(0, ahead=("first",), cursor=DataCursor(position=7))
    joined = found.joined(run)
    assert joined.ahead == ("first", *found.batches)
    assert joined.cursor.position == (taken[-1] if taken else 7)
    assert found.batches or joined is run


def test_batches_of_further_steps_are_sampled_behind_those_that_wait():
    """By each step's own number, from where the last one has drawn, with the weights as they are."""
    seen = []

    def sample(run, *, draw, rollout, score):
        seen.append((run.step, run.cursor.position, run.actor.step))
        report = {"own": metrics.mean(float(run.step)), "timing_s/gen": metrics.spent((0.0, 2.0))}
        return BATCH, DataCursor(position=run.cursor.position + 4), report

    program = Stages().program(sample=sample)
    run = run_of(9, step=5, ahead=("waits", "waits"), cursor=DataCursor(position=10))
    found = sample_ahead(run, 3, program=program, draw="draw")
    assert seen == [(7, 10, 9), (8, 14, 9), (9, 18, 9)]
    assert found.cursor.position == 22
    assert [metrics.report(waiting.metrics) for waiting in found.batches] == [{"own": float(x)} for x in (7, 8, 9)]
    assert metrics.report(found.timings) == {"timing_s/gen": 6.0}


class Steps:
    """The calls of a sampler ahead of steps, whose batches are numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.ready: deque[Sampled] = deque()
        monkeypatch.setattr(ahead, "sample_ahead", self.now)
        monkeypatch.setattr(ahead, "start_sampling", self.start)
        monkeypatch.setattr(ahead, "keep", lambda run, **named: self.log.append(("keep", run.actor.step)))

    def now(self, run: RunState, count: int, **_: Any) -> Sampled:
        first = run.step + len(run.ahead)
        self.log.append(("now", first, count))
        return Sampled(tuple(range(first, first + count)), DataCursor(position=first), {})

    def start(self, run: RunState, count: int, **_: Any) -> PendingBatches:
        first = run.step + len(run.ahead)
        self.log.append(("start", first, count))
        results = [Future[Sampled]() for _ in range(count)]
        for number, result in enumerate(results):
            result.set_result(Sampled((first + number,), DataCursor(position=first + number), {}))
        return PendingBatches(deque(results))


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_step_begins_with_its_batch_and_with_as_many_behind_it_under_way(monkeypatch, lag):
    steps = Steps(monkeypatch)
    sampler = AheadSampler(lag, program=Stages().program(), draw="draw")
    run, used = run_of(0, step=0), []
    for step in range(4):
        run, own, made = sampler.before(run)
        if not lag:
            assert (run.ahead, own, made) == ((), {}, {})
            used.append(step)
        else:
            assert run.ahead[0] == step
            used.append(run.ahead[0])
        run = attrs.evolve(run, step=step + 1, ahead=run.ahead[1:])
        run, waited, made = sampler.after(run)
        assert len(run.ahead) == lag
        assert ("timing_s/wait" in waited) is (lag > 0)
        assert "timing_s/wait" not in made
    assert used == [0, 1, 2, 3]
    first = [("now", 0, 1), ("start", 1, lag)]
    assert steps.log == ([] if not lag else first + [("start", lag + step, 1) for step in (1, 2, 3)])


def test_newer_weights_are_kept_after_a_step_only_while_something_is_generated(monkeypatch):
    steps = Steps(monkeypatch)
    sampler = AheadSampler(2, program=Stages().program(rollout=print, interrupts=True), draw="draw")
    open_, _ = under_way(2, ())
    sampler._under_way = open_
    run, own, made = sampler.after(run_of(4))
    assert steps.log == [("keep", 4)]
    assert {"timing_s/renew", "timing_s/wait"} == own.keys()
    assert (run.ahead, made) == ((), {})
    assert sampler._under_way is open_
    whole, _ = under_way(2, (0, 1))
    sampler._under_way = whole
    run, own, _ = sampler.after(run_of(5))
    assert steps.log == [("keep", 4)]  # nothing goes on
    assert (own.keys(), run.ahead) == ({"timing_s/wait"}, ("batch 0", "batch 1"))
    assert sampler._under_way is None


@pytest.mark.parametrize(
    ("lag", "ranks", "text"),
    [(1, 1, None), (0, 1, "nothing is generated while weights change"), (1, 2, "rollout.interrupt on 2 ranks")],
)
def test_interrupts_need_batches_ahead_and_one_clock(lag, ranks, text):
    if text is None:
        check_interrupts(lag, ranks)
        return
    with pytest.raises(ValueError, match=text):
        check_interrupts(lag, ranks)
