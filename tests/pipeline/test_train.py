"""The loop leaves its caller's state alone unless it is told to take it, and says so of a state that was taken."""

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fppo import metrics, tree
from fppo._errors import RunFailed
from fppo.assembly.run import assemble
from fppo.key import Key
from fppo.pipeline import iterate, ppo_step, timing, train
from fppo.pipeline.program import RunState
from fppo.pipeline.replay import Difference, DifferingLeaf, first_difference
from fppo.pipeline.step import check_updates
from fppo.pipeline.train import Evaluation, Watching, repeated
from fppo.steps.loss_scale import LEAST
from fppo.steps.train_state import TrainState
from fppo.tree import replace
from tests import tiny_run


@pytest.fixture(params=["none", "all"])
def assembly(request, tmp_path):
    tiny_run.write_task(tmp_path)
    with assemble(tiny_run.settings(tmp_path, model__offload=request.param)) as assembly:
        yield assembly


@pytest.mark.slow
def test_a_state_that_is_handed_in_stays_or_is_said_to_be_donated(assembly):
    run = assembly.run
    before = tree.digest(run)
    go = partial(train, program=assembly.program, draw=assembly.draw, steps=2)
    first, second = go(run), go(run)
    assert tree.digest(run) == before
    assert tree.digest(first) == tree.digest(second) != before
    assert go(run, steps=0) is run
    third = go(run, donate=True)
    assert tree.digest(third) == tree.digest(first)
    for again in (go, partial(ppo_step, program=assembly.program, draw=assembly.draw), tree.copy):
        with pytest.raises(
            RuntimeError, match="was donated: its memory belongs to the state that the call with donate"
        ):
            again(run)


@pytest.mark.slow
def test_steps_without_end_keep_their_states_unless_told(assembly):
    steps = iterate(assembly.run, program=assembly.program, draw=assembly.draw)
    states = [assembly.run, *(next(steps)[0] for _ in range(2))]
    assert len({str(tree.digest(state.actor)) for state in states}) == 3
    gone = iterate(states[1], program=assembly.program, draw=assembly.draw, donate=True)
    assert tree.digest(next(gone)[0]) == tree.digest(states[2])
    with pytest.raises(RuntimeError, match="was donated"):
        tree.digest(states[1])


@pytest.mark.slow
def test_all_the_time_of_a_run_is_some_steps(tmp_path, monkeypatch):
    """A clock that only drawing prompts and observers turn on, by 5, 10 (in a stage of its own), and 100; and each
    reading by next to nothing."""
    tiny_run.write_task(tmp_path)
    clock, records = SimpleNamespace(seconds=0.0), []

    def passing(seconds, result=None):
        clock.seconds += seconds
        return result

    def log(record):
        records.append(record.metrics)
        return passing(100, {"timing_s/save": 60.0})

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: passing(1e-6, clock.seconds)))
    with assemble(tiny_run.settings(tmp_path)) as assembly:

        def draw(cursor):
            return passing(5, assembly.draw(cursor))

        observers = [lambda record: passing(10, {"timing_s/digests": 10.0}), log]
        train(assembly.run, program=assembly.program, draw=draw, steps=3, observers=observers)
    assert [numbers["timing_s/step"] for numbers in records] == pytest.approx([15, 115, 115], abs=0.01)
    assert [numbers["timing_s/outside"] for numbers in records] == pytest.approx([5, 45, 45], abs=0.01)
    assert [numbers.get("timing_s/save") for numbers in records] == [None, 60, 60]
    for numbers in records:
        assert numbers["timing_s/digests"] == 10
        assert numbers["perf/throughput"] == numbers["perf/total_num_tokens"] / numbers["timing_s/step"]


def test_stages_say_when_they_ran_and_their_seconds_add_up():
    merged = metrics.merge(
        {"timing_s/a": metrics.spent()},
        {"timing_s/a": metrics.spent((7.0, 2.0))},
        {"timing_s/b": metrics.spent((5.0, 4.0)), "timing_s/a": metrics.spent((1.0, 0.5)), "x": metrics.total(1)},
    )
    assert metrics.report(merged) == {"timing_s/a": 2.5, "timing_s/b": 4.0, "x": 1.0}
    ran = timing.spans(merged)
    assert ran == [("a", 1.0, 0.5), ("b", 5.0, 4.0), ("a", 7.0, 2.0)]
    assert timing.covered(ran) == 4.5
    assert timing.covered([*ran, timing.StageSpan("c", 8.0, 3.0), timing.StageSpan("d", 0.0, 1.0)]) == 7.5
    assert timing.covered([]) == 0.0


def test_the_first_leaf_that_differs_is_named_also_one_that_is_gone_or_new():
    old = {"batch": {".a": "1", ".b": "2"}, "result": {".c": "3"}}
    for part, leaf, value in (
        ("batch", ".b", "x"),
        ("batch", ".b", None),
        ("result", ".c", None),
        ("result", ".d", "4"),
    ):
        new = {name: dict(digests) for name, digests in old.items()}
        new[part][leaf] = value
        new = {name: {x: y for x, y in digests.items() if y is not None} for name, digests in new.items()}
        assert first_difference(3, old, new) == Difference(3, (DifferingLeaf(part, leaf),))
    assert first_difference(3, old, old) is None


@pytest.mark.parametrize(
    ("before", "scale", "ends"), [(0, None, True), (1, None, False), (5, LEAST, True), (5, 2 * LEAST, False)]
)
def test_updates_that_were_all_skipped_end_a_run_at_its_first_or_at_the_least_scale(before, scale, ends):
    after = RunState(actor=TrainState(params={}, opt=None, step=before + 2), key=Key(0), step=1)
    report = {"actor/skipped": metrics.mean(2.0, 2.0)}
    report |= {} if scale is None else {"actor/loss_scale": metrics.mean(2 * scale, 2.0)}
    with pytest.raises(RunFailed, match="the actor cannot learn") if ends else contextlib.nullcontext():
        check_updates("actor", before, after, report)
    check_updates("actor", before, after, report | {"actor/skipped": metrics.mean(1.0, 2.0)})


@pytest.mark.parametrize(
    ("first", "every", "before", "expected"),
    [
        (0, 2, True, [0, 2, 4, 5]),
        (0, 2, False, [2, 4, 5]),
        (0, 0, True, [0, 5]),
        (0, 5, False, [5]),
        (3, 2, True, [4, 5]),  # a run that goes on has been evaluated
    ],
)
def test_evaluations_are_made_before_the_first_step_at_every_so_many_and_at_the_last(first, every, before, expected):
    evaluated, shown = [], {}
    start = RunState(actor=TrainState(params={"w": torch.zeros(1)}, opt=None, step=0), key=Key(0), step=first)

    def step(run):
        return replace(run, step=run.step + 1), "batch", {"perf/total_num_tokens": metrics.mean(4.0)}

    def evaluate(run):
        evaluated.append(run.step)
        return {"val-core/a/reward/mean@1": metrics.mean(float(run.step))}

    def observe(record):
        if "val-core/a/reward/mean@1" in record.metrics:
            shown[record.run.step] = record.metrics["val-core/a/reward/mean@1"]

    evaluation = Evaluation(evaluate, every=every, before=before)
    list(repeated(step, start, watching=Watching(steps=5, observers=[observe], evaluation=evaluation)))
    assert evaluated == expected
    assert shown == {step: float(step) for step in expected}
