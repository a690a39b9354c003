"""Guards of loggers over many calls: room comes back, what is handed over stays as it was, each failure counts once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fppo.runs import loggers
from fppo.runs.guards import Failures, Queued, TrackerRun


@settings(max_examples=20, phases=[Phase.generate])  # a failure takes seconds
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12), st.integers(1, 2), st.integers(1, 2))
def test_a_tracker_that_keeps_up_gets_everything_however_little_room_it_has(calls, room, tables):
    """Also after failures. `calls` are of samples or metrics, and fail or not; each begins once there is room."""
    log = list[Any]()

    def note(step: int, what: Any) -> None:
        log.append((step, what, threading.current_thread().name))
        if calls[step][1]:
            raise [RuntimeError, SystemExit][step % 2]("away")

    queued = Queued(
        "mine", lambda: TrackerRun(log=note, log_samples=note, close=lambda: None), room=room, tables=tables
    )
    expected = []
    for step, (samples, _) in enumerate(calls):
        _await_room(queued, samples=samples)
        numbers = {"a": float(step)}
        if samples:
            queued.log_samples(step, lambda step=step: [{"row": step}])
        else:
            queued.log(step, numbers)
            numbers.clear()  # the caller's own
        expected.append((step, [{"row": step}] if samples else {"a": float(step)}, "log.loggers: mine"))
    queued.close()
    assert log == expected
    assert (queued.dropped, queued.failures) == (0, sum(fails for _, fails in calls))


def _await_room(queued: Queued, *, samples: bool) -> None:
    room = queued._tables if samples else queued._room
    assert room.acquire(timeout=5), "a call that is over keeps its room"
    room.release()


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyError("y")])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_failures_are_named_once_and_counted(capsys, error, count):
    calls, failures = [], Failures("mine")

    def fails() -> None:
        calls.append(1)
        raise error

    for step in range(count):
        failures.attempt(f"at step {step}", fails)
        failures.attempt("between", lambda: calls.append(2))
    failures.say()
    said = capsys.readouterr().err.splitlines()
    first = f"log.loggers: mine failed at step 0, and the run goes on: {type(error).__name__}: {error}"
    last = f"log.loggers: mine has failed {count} times; the run is whole"
    assert said == [*([first] if count else []), *([last] if count > 1 else [])]
    assert (failures.count, calls) == (count, [1, 2] * count)
    for ends in (type(error), KeyboardInterrupt):
        with pytest.raises(ends):
            Failures("mine").attempt("now", lambda ends=ends: (_ for _ in ()).throw(ends("z")), ends=(ends,))


def test_drops_are_said_once_and_counted_at_the_end(capsys):
    gate, entered = threading.Event(), threading.Event()

    def waits(*_: Any) -> None:
        entered.set()
        gate.wait()

    queued = Queued("slow", lambda: TrackerRun(log=waits, close=lambda: None), room=1)
    for step in range(4):
        queued.log(step, {})
    assert queued.dropped == 3
    said = capsys.readouterr().err
    assert said.count("slow is slower than the run") == 1
    assert "dropped, first at step 1\n" in said
    gate.set()
    queued.close()
    assert "slow lacks 3 of the steps that it should have got" in capsys.readouterr().err
    assert not queued.takes_samples
    queued.log_samples(9, list)  # a tracker without samples has no room for them to take
    assert queued.dropped == 3


def test_loggers_that_were_opened_are_closed_if_another_does_not_open(tmp_path):
    closed = []

    class Own:
        def __init__(self, name: str) -> None:
            self.name = name

        def log(self, step: int, metrics: Any) -> None:
            del step, metrics

        def close(self) -> None:
            closed.append(self.name)

    asked = []

    def make(run_dir: Any, *, first_step: int, settings: Any) -> Own:
        asked.append((run_dir, first_step, settings))
        return Own("first")

    own = {"a:first": make, "a:second": lambda *_, **__: None}
    with pytest.raises(ValueError, match="a:second returned a NoneType"):
        loggers.open_loggers([*own], tmp_path, steps=5, first_step=2, settings={"seed": {"x": 1}}, own=own)
    assert closed == ["first"]
    assert asked == [(tmp_path, 2, {"seed": {"x": 1}})]
    opened = loggers.open_loggers(["a:first"] * 2, tmp_path, steps=5, own=own)
    loggers.close(opened)
    assert len(opened) == 3
    assert asked[1:] == [(tmp_path, 0, {})]
