"""Everything that trackers are called with, by packages that note it: what stands in for each needs no installation."""

from __future__ import annotations

import json
import secrets
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from fppo.runs import trackers
from fppo.runs.guards import NotStarted
from fppo.runs.trackers import Tracked

SETTINGS = {"seed": 7, "actor": {"loss": {"name": "ppo_clip"}}, "long": "x" * 7000}
ROWS = [{"prompt": "1+2=", "score": 1.0}, {"prompt": "4+5=", "score": None}]
NUMBERS = {"critic/score/mean": 0.5, "val/a@1": 0.25}


class Noted:
    """A function or object whose calls, and whose attributes' calls, are noted with their arguments."""

    def __init__(self, calls: list[Any], name: str, result: Callable[..., Any] = lambda *_, **__: None) -> None:
        self.calls, self.name, self.result = calls, name, result

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls.append((self.name, given, named))
        return self.result(*given, **named)


def package(name: str, monkeypatch: pytest.MonkeyPatch, **members: Any) -> None:
    module = types.ModuleType(name)
    for member, value in members.items():
        setattr(module, member, value)
    monkeypatch.setitem(sys.modules, name, module)


def a_run(directory: Path, first_step: int = 0, **changes: Any) -> Tracked:
    given = {"project": "sums", "entity": "us", "group": "g", "settings": SETTINGS}
    return Tracked(run_dir=directory / "mine", first_step=first_step, **(given | changes))


def of_package(name: str, calls: list[Any]) -> dict[str, Any]:
    """wandb, trackio or swanlab: `init` returns a run whose methods are noted."""
    opened = types.SimpleNamespace(id="id-1", name="named-1", log=Noted(calls, "log"), finish=Noted(calls, "finish"))
    add = lambda *given: ("chart", given)  # noqa: E731
    echarts = types.SimpleNamespace(Table=lambda: types.SimpleNamespace(add=add))
    return {
        "init": Noted(calls, "init", lambda **_: opened),
        "Table": lambda **named: (
            "table",
            {k: x if isinstance(x, list) else x.to_dict("list") for k, x in named.items()},
        ),
        **({"echarts": echarts} if name == "swanlab" else {}),
    }


TABLES = {
    "wandb": ("table", {"columns": ["prompt", "score"], "data": [["1+2=", 1.0], ["4+5=", None]]}),
    "trackio": (
        "table",
        {"dataframe": {"prompt": ["1+2=", "4+5="], "score": [1.0, pytest.approx(float("nan"), nan_ok=True)]}},
    ),
    "swanlab": ("chart", (["prompt", "score"], [["1+2=", 1.0], ["4+5=", None]])),
}


def opened_with(name: str, run: Tracked, previous: bool) -> dict[str, Any]:
    """What `init` is called with: for a new run, and for one that goes on."""
    common = {"project": "sums", "group": "g", "config": SETTINGS}
    match name:
        case "wandb":
            own = {"entity": "us", "name": "mine", "dir": str(run.run_dir)}
            return common | own | {"id": "id-1" if previous else None, "resume": "allow" if previous else None}
        case "swanlab":
            own = {"workspace": "us", "name": "mine", "logdir": str(run.run_dir / "swanlog")}
            return common | own | {"id": "id-1" if previous else None, "resume": "allow" if previous else None}
        case _:
            name = "named-1" if previous else "mine-abc123"
            return common | {"name": name, "resume": "allow" if previous else "never", "embed": False}


@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab"])
def test_a_service_gets_the_run_its_numbers_and_its_samples(tmp_path, monkeypatch, name):
    calls: list[Any] = []
    package(name, monkeypatch, **of_package(name, calls))
    monkeypatch.setattr(secrets, "token_hex", lambda count: "abc123"[: 2 * count])
    run = a_run(tmp_path)
    for previous in (False, True):
        calls.clear()
        opened = trackers.start(name, run)
        opened.log(3, NUMBERS)
        assert opened.log_samples is not None
        opened.log_samples(4, ROWS)
        opened.close()
        assert calls == [
            ("init", (), opened_with(name, run, previous)),
            ("log", (NUMBERS,), {"step": 3}),
            ("log", ({"samples": TABLES[name]},), {"step": 4}),
            ("finish", (), {}),
        ]
        assert (run.run_dir / f"{name}_id").read_text() == ("named-1" if name == "trackio" else "id-1")


def test_a_name_for_trackio_has_no_characters_of_its_own(tmp_path, monkeypatch):
    calls: list[Any] = []
    package("trackio", monkeypatch, **of_package("trackio", calls))
    trackers.start("trackio", attrs.evolve(a_run(tmp_path), run_dir=tmp_path / "a b(c)"))
    assert calls[0][2]["name"].startswith("a-b-c--")


class MlflowError(Exception):
    """An error with a code, as the package has them."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.error_code = code


@attrs.define
class Store:
    """The state of a server of MLflow: its experiments and runs, and its history of steps."""

    experiments: dict[str, str] = attrs.field(factory=dict)
    history: list[int] = attrs.field(factory=list)
    shown: list[str] = attrs.field(factory=list)
    gone: str | None = None
    calls: list[Any] = attrs.field(factory=list)

    def client(self) -> Any:
        simple = types.SimpleNamespace
        results: dict[str, Callable[..., Any]] = {
            "log_dict": lambda *_: None,
            "get_metric_history": lambda run, name: [simple(step=step) for step in self.history],
            "list_artifacts": lambda run, place: [simple(path=path) for path in self.shown],
            "log_batch": lambda *_, **__: None,
            "log_table": lambda *_: None,
            "set_terminated": lambda *_: None,
            "update_run": self._updated,
            "get_experiment_by_name": lambda name: (
                simple(experiment_id=self.experiments[name]) if name in self.experiments else None
            ),
            "create_experiment": lambda name: f"new {name}",
            "create_run": lambda *_, **__: simple(info=simple(run_id="r1")),
        }
        return simple(**{name: Noted(self.calls, name, result) for name, result in results.items()})

    def _updated(self, run: str, status: str) -> None:
        if self.gone is not None:
            raise MlflowError(self.gone)


@pytest.fixture
def store(monkeypatch):
    made = Store()
    package("mlflow", monkeypatch, MlflowClient=made.client)
    package("mlflow.entities", monkeypatch, Metric=lambda *given: given, Param=lambda *given: given)
    package("mlflow.exceptions", monkeypatch, MlflowException=MlflowError)
    monkeypatch.setattr(time, "time", lambda: 12.5)
    return made


PARAMS = [("seed", "7"), ("actor.loss.name", "ppo_clip"), ("long", "x" * 6000)]


def test_mlflow_gets_an_experiment_a_run_and_its_parameters(tmp_path, store):
    opened = trackers.start("mlflow", a_run(tmp_path))
    began = list(store.calls)
    batch = began[3][2]
    assert began == [
        ("get_experiment_by_name", ("sums",), {}),
        ("create_experiment", ("sums",), {}),
        ("create_run", ("new sums",), {"run_name": "mine", "tags": {"group": "g"}}),
        ("log_batch", ("r1",), batch),
        ("log_dict", ("r1", SETTINGS, "settings/000000.json"), {}),
        ("get_metric_history", ("r1", "training/global_step"), {}),
        ("list_artifacts", ("r1", "samples"), {}),
    ]
    assert batch == {"params": PARAMS}
    store.calls.clear()
    opened.log(0, NUMBERS)
    assert opened.log_samples is not None
    opened.log_samples(2, ROWS)
    opened.close()
    table = {"prompt": ["1+2=", "4+5="], "score": [1.0, None]}
    metrics = [("critic/score/mean", 0.5, 12500, 0), ("val/a_at_1", 0.25, 12500, 0)]
    assert store.calls == [
        ("log_batch", ("r1",), {"metrics": metrics}),
        ("log_table", ("r1", table, "samples/000002.json"), {}),
        ("set_terminated", ("r1",), {}),
    ]
    assert (tmp_path / "mine" / "mlflow_id").read_text() == "r1"


def test_mlflow_goes_on_with_its_run_and_has_no_step_twice(tmp_path, store):
    run = a_run(tmp_path, first_step=3)
    run.note("mlflow", "r0")
    store.history, store.shown = [1, 2, 4], ["samples/000004.json"]
    opened = trackers.start("mlflow", run)
    assert [name for name, _, _ in store.calls] == ["update_run", "log_dict", "get_metric_history", "list_artifacts"]
    assert store.calls[0] == ("update_run", ("r0",), {"status": "RUNNING"})
    assert store.calls[1] == ("log_dict", ("r0", SETTINGS, "settings/000003.json"), {})
    store.calls.clear()
    for step in (3, 4, 5):
        opened.log(step, {f"n{i}": float(i) for i in range(1001)})
        opened.log_samples(step, ROWS)
    batches = [(given, len(named["metrics"])) for name, given, named in store.calls if name == "log_batch"]
    assert batches == [(("r0",), 1000), (("r0",), 1)]
    assert [given[2] for name, given, _ in store.calls if name == "log_table"] == [
        "samples/000003.json",
        "samples/000005.json",
    ]


def test_mlflow_begins_a_new_run_where_its_store_has_lost_the_old_one(tmp_path, store):
    run = a_run(tmp_path, group=None)
    run.note("mlflow", "r0")
    store.gone, store.experiments = "RESOURCE_DOES_NOT_EXIST", {"sums": "e7"}
    trackers.start("mlflow", run)
    created = next(call for call in store.calls if call[0] == "create_run")
    assert created == ("create_run", ("e7",), {"run_name": "mine", "tags": {}})
    assert not any(name == "create_experiment" for name, _, _ in store.calls)
    assert (tmp_path / "mine" / "mlflow_id").read_text() == "r1"
    store.gone = "PERMISSION_DENIED"
    with pytest.raises(NotStarted, match="PERMISSION_DENIED"):
        trackers.start("mlflow", run)


def test_mlflow_takes_a_hundred_parameters_at_once(tmp_path, store):
    trackers.start("mlflow", a_run(tmp_path, settings={f"s{i}": i for i in range(201)}))
    sizes = [len(named["params"]) for name, _, named in store.calls if name == "log_batch"]
    assert sizes == [100, 100, 1]


def test_a_name_for_mlflow_is_the_metrics_but_for_what_it_refuses():
    name = trackers.mlflow_name
    assert name("val-core/a b/reward/mean@4") == "val-core/a b/reward/mean_at_4"
    assert name("a(b)/c.d:e") == "a_b_/c.d:e"
    assert name("a/../b//c/.") == "a/__/b/_/c/_"
    assert name("x" * 300) == "x" * 250
    assert name("x" * 249 + "/y") == "x" * 249


def test_what_does_not_start_says_how_it_may(tmp_path, monkeypatch):
    def away(**_: Any) -> None:
        raise ConnectionError("away")

    for name, offline in (("wandb", True), ("swanlab", True), ("trackio", False)):
        package(name, monkeypatch, init=away)
        with pytest.raises(
            NotStarted, match=f"log.loggers names {name}, which does not start: ConnectionError: away"
        ) as e:
            trackers.start(name, a_run(tmp_path))
        assert (f"{name.upper()}_MODE=offline" in str(e.value)) == offline
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(ValueError, match=r"swanlab is not installed; pip install 'fppo\[swanlab\]'"):
        trackers.start("swanlab", a_run(tmp_path))


@pytest.mark.parametrize("first_step", [0, 1, 5])
def test_tensorboard_hides_events_from_the_first_step_on(tmp_path, monkeypatch, first_step):
    calls: list[Any] = []
    methods = ("add_scalar", "add_text", "flush", "close")
    writer = types.SimpleNamespace(**{name: Noted(calls, name) for name in methods})
    package("torch.utils.tensorboard", monkeypatch, SummaryWriter=Noted(calls, "writer", lambda *_, **__: writer))
    opened = trackers.start("tensorboard", a_run(tmp_path, first_step=first_step))
    opened.log(3, NUMBERS)
    opened.log_samples(4, ROWS)
    opened.close()
    table = "| prompt | score |\n| --- | --- |\n| 1&#43;2&#61; | 1 |\n| 4&#43;5&#61; |  |"
    assert calls == [
        ("writer", (str(tmp_path / "mine" / "tensorboard"),), {"purge_step": first_step or None}),
        *(("add_scalar", (name, value, 3), {}) for name, value in NUMBERS.items()),
        ("flush", (), {}),
        ("add_text", ("samples", table, 4), {}),
        ("flush", (), {}),
        ("close", (), {}),
    ]


def test_an_id_is_kept_as_text_beside_the_run(tmp_path):
    run = a_run(tmp_path)
    run.note("any", "a.b-c")
    assert json.dumps((run.run_dir / "any_id").read_text()) == '"a.b-c"'
    assert attrs.evolve(run, run_dir=run.run_dir / ".." / "mine").name == "mine"
