"""Loggers: what is written survives kills and resuming, and what is missing is left out."""

from __future__ import annotations

import io
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo.commands import actions
from fppo.runs import jsonl, loggers, trackers
from fppo.runs.guards import Guarded, NotStarted, Queued, TrackerRun
from fppo.runs.jsonl import JsonLines
from fppo.runs.loggers import DROPPED, FAILED
from fppo.settings import train
from fppo.workers.imports import imported
from tests import tiny_run

STEP = {
    "critic/score/mean": 0.5,
    "actor/ppo_kl": 0.001,
    "actor/entropy": 1.25,
    "actor/pg_clipfrac": 0.02,
    "critic/vf_loss": 0.125,
    "perf/throughput": 12345.6,
}


def ticking(seconds: float = 2.0):
    times = iter(range(10**6))
    return lambda: next(times) * seconds


def test_each_line_is_on_disk_when_log_returns(tmp_path):
    log = JsonLines(tmp_path / "sub" / "metrics.jsonl")
    log.write({"step": 0, "text": "€ \ud800 \n"})
    assert jsonl.read(tmp_path / "sub" / "metrics.jsonl") == [{"step": 0, "text": "€ \ud800 \n"}]
    log = JsonLines(tmp_path / "sub" / "metrics.jsonl")
    log.log(1, {"a": 0.1, "b": float("nan"), "c": float("inf")})
    text = (tmp_path / "sub" / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "a": 0.1, "b": null, "c": null}\n'
    log.close()
    log.close()


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2"):
        jsonl.read(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="not an object"):
        jsonl.read(path)


def test_a_pipe_gets_one_plain_line_per_step():
    out = io.StringIO()
    log = loggers.PlainConsole(100, file=out, clock=ticking())
    log.log(0, {"val/arithmetic/accuracy/mean@1": 0.25})
    log.log(1, STEP)
    log.log(2, {"critic/score/mean": 0.75, "actor/reward_kl_penalty": 0.5, "actor/ppo_kl": 0.001})
    log.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "step   0/100  held out  accuracy 0.250"
    assert lines[1] == "step   1/100  reward 0.500  kl 0.0010  clip 2.0%  tok/s 12,346  left 3:18"
    assert lines[2] == "step   2/100  reward 0.750  kl 0.5000  left 3:16"
    assert "\x1b" not in out.getvalue()


def test_a_line_has_80_columns_and_an_evaluation_one_line(monkeypatch, capsys):
    """Whatever is logged; what matters most stays."""
    every = {name: -12345.678 for _, names, _ in loggers.LINES for name in names}
    held_out = {
        f"val-{level}/{source}/{name}/mean@1": 0.25 * (source == "b")
        for source in ("a", "b")
        for level, name in (("core", "reward"), *(("aux", f"a_reward_of_ones_own_{i}") for i in range(9)))
    }
    out = io.StringIO()
    log = loggers.PlainConsole(10_000, file=out, clock=ticking())
    log.log(9_999, every | held_out)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("step  9999/10000  reward ")
    assert lines[1].startswith("step  9999/10000  held out  reward 0.125")
    for columns in ("200", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        capsys.readouterr()
        live = loggers.LiveConsole(10_000)
        live.log(9_999, every | held_out)
        live.close()
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" 9999")]
    assert len(shown) == 2
    assert max(map(len, shown)) <= 80
    assert loggers.held_out_summary(held_out | {"val-core/c/reward/mean@1": 0.5})[0] == ("reward", "0.250")


def test_time_left_follows_the_pace_of_the_last_steps():
    now = [0.0]
    left = loggers.TimeLeft(10, first_step=3, clock=lambda: now[0], window=2)
    now[0] = 100.0
    assert left.at(3) == pytest.approx(700.0)
    now[0] = 101.0
    left.at(4)
    now[0] = 104.0
    assert left.at(5) == pytest.approx(5 * (104.0 - 100.0) / 2)
    assert [loggers.duration(s) for s in (7, 750, 3723, -1)] == ["0:07", "12:30", "1:02:03", "0:00"]


def test_the_live_console_shows_the_same_numbers(capsys):
    log = loggers.LiveConsole(3)
    log.log(1, STEP)
    log.close()
    shown = capsys.readouterr().out
    assert "reward" in shown
    assert "0.500" in shown
    assert isinstance(loggers.console(3), loggers.PlainConsole)


def test_a_notebook_gets_a_bar_above_the_same_lines(capsys):
    """Outside of a notebook, IPython shows the bar as text."""
    pytest.importorskip("IPython")
    log = loggers.NotebookConsole(4)
    log.log(1, {"critic/score/mean": 0.5})
    log.close()
    begun, line, bar = capsys.readouterr().out.splitlines()
    assert begun == f"[{' ' * 60}] 0/4"
    assert line.startswith("step 1/4  reward 0.500")
    assert bar == f"[{'=' * 15}{' ' * 45}] 1/4"
    assert not loggers.in_notebook()


def test_wandb_goes_on_in_the_same_run(tmp_path, monkeypatch):
    calls: list[tuple[str, Any]] = []

    def init(**options: Any) -> Any:
        calls.append(("init", options))
        return types.SimpleNamespace(
            id="abc",
            log=lambda metrics, step: calls.append(("log", (metrics, step))),
            finish=lambda: calls.append(("finish", None)),
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for _ in range(2):
        *_, log = loggers.open_loggers(
            ["wandb"], tmp_path / "run", steps=3, project="p", entity="e", group="g", settings={"seed": 1}
        )
        log.log(1, STEP)
        log.close()
    first, second = (options for name, options in calls if name == "init")
    assert (first["project"], first["name"], first["id"], first["config"]) == ("p", "run", None, {"seed": 1})
    assert (first["entity"], first["group"]) == ("e", "g")
    assert (second["id"], second["resume"]) == ("abc", "allow")
    assert ("log", (STEP, 1)) in calls
    assert calls[-1] == ("finish", None)


@pytest.mark.parametrize("names", [[], ["jsonl"], ["console"], ["jsonl", "console"], ["mine:board"]])
def test_console_and_metrics_do_not_depend_on_loggers(tmp_path, capsys, names):
    """Others come in addition; those named twice are there once."""
    own = {"mine:board": lambda run_dir, *, first_step, settings: JsonLines(run_dir / "board")}
    opened = loggers.open_loggers(names, tmp_path, steps=3, own=own)
    for log in opened:
        log.log(1, STEP)
    loggers.close(opened)
    assert capsys.readouterr().out.count("step 1/3") == 1
    assert [line["step"] for line in jsonl.read(tmp_path / "metrics.jsonl")] == [1]
    assert (tmp_path / "board").exists() == ("mine:board" in names)


def test_a_logger_may_be_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_logger.py").write_text(
        "class Log:\n    def __init__(self, path):\n        self.path = path\n"
        "    def log(self, step, metrics):\n        print(step, sorted(metrics), file=self.path.open('a'))\n"
        "    def close(self):\n        print('closed', file=self.path.open('a'))\n"
        "def make(run_dir, *, first_step, settings):\n    return Log(run_dir / f\"{settings['seed']}_{first_step}\")\n"
        "def nothing(run_dir, *, first_step, settings):\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = {f"own_logger:{name}": imported(f"own_logger:{name}", "log.loggers") for name in ("make", "nothing")}
    make = {name: own[name] for name in ["own_logger:make"]}
    opened = loggers.open_loggers([*make], tmp_path, steps=3, first_step=2, settings={"seed": 7}, own=make)
    for log in opened:
        log.log(2, {"a": 1.0})
    loggers.close(opened)
    assert (tmp_path / "7_2").read_text() == "2 ['a']\nclosed\n"
    with pytest.raises(ValueError, match="returned a NoneType without log and close; return an object with log"):
        loggers.open_loggers([*own], tmp_path, steps=3, settings={"seed": 7}, own=own)


def test_the_line_of_a_step_says_turns_and_what_failed_in_them():
    out = io.StringIO()
    log = loggers.PlainConsole(9, file=out)
    log.log(1, STEP | {"response_length/mean": 4.0, "rollout/turns/mean": 2.25, "rollout/tool_failures": 3.0})
    assert "  turns 2.2  " in out.getvalue()
    assert "  tool failed 3  " in out.getvalue()
    assert len(out.getvalue().rstrip()) <= 80
    log.log(2, STEP | {"rollout/turns/mean": 2.25, "rollout/tool_failures": 0.0})
    assert "tool failed" not in out.getvalue().splitlines()[-1]


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"fppo\[{name}\]"):
        loggers.open_loggers(["jsonl", name], tmp_path, steps=3)
    with pytest.raises(ValueError, match=r"unknown logger 'aim'; there are .*'mlflow'"):
        loggers.open_loggers(["aim"], tmp_path, steps=3)


def test_an_observer_writes_metrics(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl")
    observe = loggers.observer([log])
    record = types.SimpleNamespace
    observe(record(run=record(step=0), experience=None, metrics={"val/x/mean": 0.5}))
    observe(record(run=record(step=1), experience=None, metrics=STEP))
    loggers.close([log])
    assert jsonl.read(tmp_path / "metrics.jsonl") == [{"step": 0, "val/x/mean": 0.5}, {"step": 1, **STEP}]


class Failing:
    """A logger of another package that fails at some steps, and at its end."""

    def __init__(self, error: BaseException, steps: Any = range(100)) -> None:
        self.error, self.steps, self.logged = error, steps, []

    def log(self, step: int, metrics: Any) -> None:
        if step in self.steps:
            raise self.error
        self.logged.append((step, metrics.get(FAILED)))

    def close(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [OSError("no network \x1b[2J"), RuntimeError("x" * 10**6), SystemExit(0)])
def test_loggers_fail_alone_are_told_once_and_are_counted(capsys, error):
    failing, other = Failing(error, steps=(1, 2)), Failing(error, steps=())
    guarded = [Guarded("wandb", failing), Guarded("mine", other)]
    observe, record = loggers.observer(guarded), types.SimpleNamespace
    for step in range(4):
        observe(record(run=record(step=step), experience=None, metrics={"a": 1.0}))
    assert failing.logged == [(0, None), (3, 2.0)]
    assert other.logged == [(0, None), (1, None), (2, 1.0), (3, 2.0)]
    loggers.close(guarded)
    said = capsys.readouterr().err
    assert said.count("log.loggers: wandb failed at step 1, and the run goes on: ") == 1
    assert "log.loggers: wandb has failed 3 times" in said
    assert "log.loggers: mine failed at its end" in said
    assert "\x1b" not in said
    assert len(said) < 10_000


def test_a_pipe_that_nobody_reads_ends_a_run_through_the_guard():
    with pytest.raises(BrokenPipeError):
        Guarded("console", Failing(BrokenPipeError())).log(1, {})


@pytest.mark.slow
def test_a_run_whose_logger_fails_ends_with_its_model_and_report(tmp_path, monkeypatch, capsys):
    """They come before the logger is closed."""
    made: list[bool] = []
    run = tmp_path / "run"

    def fails(*_: Any, **__: Any) -> None:
        made.append((run / "model" / "model.safetensors").exists() and (run / "report.html").exists())
        raise BrokenPipeError("the service is away")

    init = lambda **_: types.SimpleNamespace(id="abc", log=fails, finish=fails)  # noqa: E731
    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    tiny_run.write_task(tmp_path)
    changes = {"steps": 2, "eval__before": False, "log__loggers": ["jsonl", "wandb"], "log__table_rows": 0}
    settings = tiny_run.settings(tmp_path, **changes)
    assert actions.train(settings) == 0
    assert len(made) == 3
    assert made[-1]
    said = capsys.readouterr().err
    assert said.count("wandb failed at step 1") == 1
    assert "wandb has failed 3 times" in said
    assert len(jsonl.read(run / "metrics.jsonl")) == 2


class Hasty(Queued):
    """A queue with little room and no patience."""

    def __init__(self, name: str, make: Callable[[], TrackerRun]) -> None:
        super().__init__(name, make, room=2, patience=0.01)


@pytest.mark.slow
def test_a_run_whose_tracker_hangs_and_has_no_room_ends_with_its_model(tmp_path, monkeypatch, capsys):
    never, shown = threading.Event(), list[Any]()

    def hangs(step: int, metrics: Any) -> None:
        never.wait()

    def show(step: int, rows: Any) -> None:
        shown.append((step, rows))

    hanging = lambda run: TrackerRun(log=hangs, log_samples=show, close=never.wait)  # noqa: E731
    showing = lambda run: TrackerRun(log=lambda *_: None, log_samples=show, close=lambda: None)  # noqa: E731
    monkeypatch.setattr(trackers, "TRACKERS", {"mlflow": hanging, "trackio": showing})
    monkeypatch.setattr(loggers, "Queued", Hasty)
    tiny_run.write_task(tmp_path)
    changes = {"steps": 4, "eval__before": False, "log__loggers": ["mlflow", "trackio"]}
    settings = tiny_run.settings(tmp_path, **changes, log__table_rows=2, log__table_every=3)
    assert actions.train(settings) == 0
    never.set()
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    said = capsys.readouterr().err
    assert (
        said.count("mlflow is slower than the run: what comes while its queue is full is dropped, first at step 3") == 1
    )
    assert "mlflow is still busy 0.01 s after the end of the run" in said
    assert [line.get(DROPPED) for line in jsonl.read(tmp_path / "run" / "metrics.jsonl")] == [None, None, None, 1.0]
    assert [(step, len(rows)) for step, rows in shown] == [(1, 2), (3, 2)]
    assert list(shown[0][1][0]) == ["prompt", "response", "score", "score.exact_match", "ground_truth", "finish"]


def gated(log: list[Any], gate: Any) -> TrackerRun:
    """A tracker that waits for the gate at each call, and then notes it with its thread."""

    def note(*call: Any) -> None:
        gate.wait()
        log.append((*call, threading.current_thread() is threading.main_thread()))

    return TrackerRun(log=note, log_samples=note, close=lambda: note("closed"))


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 8), st.integers(1, 3))
def test_a_queue_keeps_order_and_drops_what_has_no_room_alone(calls, room, tables):
    """`calls` are steps with metrics (False) or with samples (True)."""
    log, gate = list[Any](), threading.Event()
    queued = Queued("a", lambda: gated(log, gate), room=room, tables=tables)
    for step, samples in enumerate(calls):
        if samples:
            queued.log_samples(step, lambda step=step: [{"prompt": str(step)}])
        else:
            queued.log(step, {"a": float(step)})
    numbers = [step for step, samples in enumerate(calls) if not samples]
    texts = [step for step, samples in enumerate(calls) if samples]
    kept = {*numbers[:room], *texts[:tables]}
    assert queued.dropped == len(calls) - len(kept)
    gate.set()
    queued.close()
    queued.close()
    shown = [(step, [{"prompt": str(step)}] if samples else {"a": float(step)}) for step, samples in enumerate(calls)]
    assert log == [*((*call, False) for call in shown if call[0] in kept), ("closed", False)]


def test_a_tracker_that_never_answers_is_left_behind(capsys):
    log, gate, begun = list[Any](), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        gate.wait()

    queued = Queued("slow", lambda: gated(log, types.SimpleNamespace(wait=wait)), room=5, patience=0.01)
    for step in range(4):
        queued.log(step, {})
    begun.wait()
    queued.close()
    assert queued.dropped == 3
    assert "slow lacks 3 of the steps" in capsys.readouterr().err
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "log.loggers: slow")
    gate.set()
    thread.join()
    assert [call[0] for call in log] == [0, "closed"]


@pytest.mark.parametrize("error", [RuntimeError("no key"), SystemExit(1)])
def test_a_logger_that_does_not_start_is_named_before_the_run(tmp_path, monkeypatch, error):
    def init(**_: Any) -> Any:
        raise error

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with pytest.raises(ValueError, match=r"log.loggers names wandb, which does not start: "):
        loggers.open_loggers(["wandb"], tmp_path, steps=3)


def test_a_tracker_that_does_not_open_is_given_up_and_closed_if_it_opens_late():
    log, gate = list[Any](), threading.Event()

    def opens() -> TrackerRun:
        gate.wait()
        return TrackerRun(log=lambda *_: None, close=lambda: log.append(threading.current_thread()))

    with pytest.raises(NotStarted, match=r"names a, which has not started in 0\.01 s"):
        Queued("a", opens, opening=0.01)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "log.loggers: a")
    gate.set()
    thread.join()
    assert log == [thread]


def test_a_run_goes_on_without_a_tracker_that_does_not_start_again(tmp_path, monkeypatch, capsys):
    def away(*_: Any, **__: Any) -> Any:
        raise ConnectionError("the service is away")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=away))
    own = {"mine:log": away}
    with pytest.raises(ValueError, match="names wandb, which does not start: ConnectionError: the service is away; "):
        loggers.open_loggers(["wandb"], tmp_path, steps=3)
    opened = loggers.open_loggers(["wandb", "mine:log"], tmp_path, steps=3, first_step=2, own=own)
    loggers.close(opened)
    assert len(opened) == 2
    said = capsys.readouterr().err
    assert said.count("; the run goes on without it") == 2
    assert "mine:log, which does not start" in said


def test_the_names_of_settings_are_those_of_the_table():
    assert tuple(trackers.TRACKERS) == train.TRACKERS
