"""The loop leaves its caller's state alone unless it is told to take it, and says so of a state that was taken."""

from functools import partial
from types import SimpleNamespace

import pytest

from fppo import metrics, tree
from fppo.assembly.run import assemble
from fppo.pipeline import iterate, ppo_step, timing, train
from tests import tiny_run


@pytest.fixture(params=["none", "all"])
def assembly(request, tmp_path):
    tiny_run.write_task(tmp_path)
    with assemble(tiny_run.settings(tmp_path, model__offload=request.param)) as assembly:
        yield assembly


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


def test_steps_without_end_keep_their_states_unless_told(assembly):
    steps = iterate(assembly.run, program=assembly.program, draw=assembly.draw)
    states = [assembly.run, *(next(steps)[0] for _ in range(2))]
    assert len({str(tree.digest(state.actor)) for state in states}) == 3
    gone = iterate(states[1], program=assembly.program, draw=assembly.draw, donate=True)
    assert tree.digest(next(gone)[0]) == tree.digest(states[2])
    with pytest.raises(RuntimeError, match="was donated"):
        tree.digest(states[1])


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
