"""A user's observers: they see every step's record, their numbers are logged, and their errors end nothing."""

from __future__ import annotations

import json
import math
import types
from pathlib import Path
from typing import Any

import pytest

from fppo.commands import actions
from fppo.runs import jsonl, observers
from fppo.runs.observers import FAILURES, OwnObserver, traffic_since
from fppo.runtime.watch import Traffic
from fppo.settings import files
from tests import tiny_run


def lengths(record: Any) -> dict[str, float] | None:
    """Numbers of a batch, and of the state."""
    if record.experience is None:
        return None
    whole = float(record.experience.response_mask.sum())
    return {"own/tokens": whole, "own/updates": float(record.run.actor.step), "own/mean": whole / 8}


def failing(record: Any) -> None:
    if record.run.step in (2, 3):
        raise RuntimeError(f"no such thing at {record.run.step} \x1b[2J")


def after(record: Any) -> dict[str, float]:
    """Negated numbers of an earlier observer, which they replace."""
    return {name: -x for name, x in record.metrics.items() if name == "own/updates"}


def wrong(record: Any) -> list[float]:
    del record
    return [1.0]


@pytest.mark.slow
def test_a_run_logs_their_numbers_and_outlives_their_errors(tmp_path, capsys):
    tiny_run.write_task(tmp_path)
    names = [f"{__name__}:{fn.__name__}" for fn in (lengths, failing, wrong, after)]
    assert actions.train(tiny_run.settings(tmp_path, log__observers=names)) == 0
    lines = list(jsonl.read(tmp_path / "run" / "metrics.jsonl"))
    assert "own/tokens" not in lines[0]
    for line in lines[1:]:
        assert line["own/mean"] == line["response_length/mean"]
        assert line["own/updates"] == -4 * line["step"]  # two mini-batches, two epochs
    assert [line.get(FAILURES) for line in lines] == [1.0, 2.0, 4.0, 6.0, 7.0]
    said = capsys.readouterr().err
    assert said.count(f"log.observers: {names[1]} failed at step 2, and the run goes on: RuntimeError: no such") == 1
    assert "\x1b" not in said
    assert f"{names[1]} has failed 2 times" in said
    assert f"{names[2]} failed at step 0" in said


@pytest.mark.parametrize("error", [SystemExit(3), KeyError("x"), ValueError("y" * 10**6)])
def test_an_error_is_counted_and_named_once(capsys, error):
    def fails(record: Any) -> None:
        raise error

    observer, record = OwnObserver("mine:fails", fails), types.SimpleNamespace
    for step in range(3):
        seen = observer(record(run=record(step=step), metrics={FAILURES: 2.0}))  # type: ignore[arg-type]
        assert seen == {FAILURES: 3.0 + step}
    observer.close()
    said = capsys.readouterr().err
    assert said.count("mine:fails failed at step 0") == 1
    assert len(said) < 10_000


def test_numbers_may_be_anything_that_is_one():
    record = types.SimpleNamespace
    observer = OwnObserver("mine:f", lambda record: {"a": 3, "b": math.nan})
    seen = observer(record(run=record(step=1), metrics={}))  # type: ignore[arg-type]
    assert seen["a"] == 3.0
    assert math.isnan(seen["b"])


def test_a_reader_that_is_gone_ends_the_run():
    def fails(record: Any) -> None:
        raise BrokenPipeError

    record = types.SimpleNamespace
    with pytest.raises(BrokenPipeError):
        OwnObserver("mine:f", fails)(record(run=record(step=1), metrics={}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "text"),
    [(["watch"], "must be module:function"), (["a:b", "a:b"], "names an observer twice")],
)
def test_names_that_are_none_are_refused(tmp_path, names, text):
    settings = files.replace(tiny_run.settings(tmp_path), {"log.observers": names})
    with pytest.raises(ValueError, match=text):
        files.check(settings)


def test_traffic_of_each_axis_is_its_own():
    watch = types.SimpleNamespace(step=None, totals={"shard": Traffic(), "replicate": Traffic()})
    watch.traffic = lambda: dict(watch.totals)
    since = traffic_since(watch, 0)
    assert watch.step == 0
    for step, (a, b) in enumerate(((1, 10), (0, 3), (5, 0)), start=1):
        before = watch.totals
        watch.totals = {
            axis: Traffic(calls=before[axis].calls + 1, bytes=before[axis].bytes + more)
            for axis, more in (("shard", a), ("replicate", b))
        }
        found = since()
        assert {axis: (x.calls, x.bytes) for axis, x in found.items()} == {"shard": (1, a), "replicate": (1, b)}
        assert watch.step == step
    assert traffic_since(None, 3)() == {}


def test_a_profile_counts_what_its_own_step_compiled(tmp_path, monkeypatch):
    """And is of the steps that were asked for, from one to the next: none of an evaluation."""
    compiled, started = [3], []
    monkeypatch.setattr(observers, "_compiled", lambda: compiled[0])

    class Profile:
        def __init__(self) -> None:
            self.state = "made"

        def start(self) -> None:
            self.state = "started"
            started.append(self)

        def stop(self) -> None:
            self.state = "stopped"

        def export_chrome_trace(self, path: str) -> None:
            assert self.state == "stopped"
            events = [{"cat": "gpu_memcpy", "name": "Memcpy DtoH (x)", "args": {"bytes": observers.GIB // 2}}]
            Path(path).write_text(json.dumps({"traceEvents": events}))

        def events(self) -> list[Any]:
            return [types.SimpleNamespace(name=name) for name in ("cudaLaunchKernel", "cudaMemcpy", "x")]

    monkeypatch.setattr(observers, "profile", Profile)
    simple = types.SimpleNamespace
    profiles = observers.Profiles(directory=tmp_path, steps=(1, 3))
    profiles.begin(1)
    found = []
    for step in range(5):
        compiled[0] += 2
        record = simple(run=simple(step=step), experience="rows" if step else None)
        found.append(profiles(record))  # type: ignore[arg-type]
    gpu = {"perf/launches": 1.0, "perf/host_syncs": 1.0, "perf/to_device_gb": 0.0, "perf/to_host_gb": 0.5}
    assert found == [{}, gpu | {"perf/recompiles": 2.0}, {}, gpu | {"perf/recompiles": 2.0}, {}]
    assert sorted(path.name for path in (tmp_path / "profiles").iterdir()) == [
        *("step_00000001.json.gz", "step_00000003.json.gz")
    ]
    assert [each.state for each in started] == ["stopped"] * len(started)
