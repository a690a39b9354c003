"""Trackers against their own packages, offline: what a run that stops and goes on leaves in each."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fppo.runs import trackers
from fppo.runs.guards import Queued
from fppo.runs.trackers import Tracked
from fppo.settings import files
from tests.runs.test_markdown import NASTY

REWARD, HELD_OUT = "critic/score/mean", "val-core/a b/reward/mean@1"
SETTINGS = {
    "seed": 7,
    "actor": {"optimizer": {"lr": 1e-6}, "loss": {"name": "ppo_clip"}},
    "data": {"path": ["a"], "x": None},
}
ROWS = [
    {"prompt": "1+2=", "response": NASTY, "score": 1.0, "ground_truth": "3", "finish": "stop"},
    {"prompt": "4+5=", "response": "\u202e \x1b[2J مرحبا", "score": None, "ground_truth": None, "finish": "length"},
]


@attrs.frozen(kw_only=True)
class Left:
    """What a tracker has of a run."""

    runs: int
    rewards: Mapping[int, list[float]]  # by step
    settings: Mapping[str, str]  # as text, by path
    texts: str  # the samples of step 1, somewhere inside


def leave(name: str, run_dir: Path) -> None:
    """Steps 0 to 2, a stop, and steps 2 to 3 again from the checkpoint of step 1."""
    for first, steps in ((0, (0, 1, 2)), (2, (2, 3))):
        run = Tracked(run_dir=run_dir, first_step=first, project="sums", group="g", settings=SETTINGS)
        queued = Queued(name, partial(trackers.start, name, run))
        for step in steps:
            numbers = {REWARD: step / 4, HELD_OUT: 0.5, "training/global_step": float(step)}
            queued.log(step, numbers | {"odd": math.nan if step % 2 else math.inf})
            queued.log_samples(step, lambda: ROWS)
        queued.close()
        assert (queued.failures, queued.dropped) == (0, 0)
        if name == "wandb":  # as a process ends: its service loses the first steps of a run whose id it had
            pytest.importorskip(name).teardown()


def in_tensorboard(run_dir: Path) -> Left:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    rewards = {event.step: [event.value] for event in events.Scalars(REWARD)}
    texts = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/text_summary")}
    assert not re.search(r"<(?!br>)|\[", texts[1])
    return Left(runs=1, rewards=rewards, settings={}, texts=texts[1])


def in_mlflow(run_dir: Path) -> Left:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("sums")
    runs = client.search_runs([experiment.experiment_id])
    run = runs[0]
    assert (run.info.status, run.data.tags["group"], run.info.run_name) == ("FINISHED", "g", "run")
    assert len(client.get_metric_history(run.info.run_id, "val-core/a b/reward/mean_at_1")) == 4
    history = client.get_metric_history(run.info.run_id, REWARD)
    rewards = by_step((each.step, each.value) for each in history)
    table = json.loads(
        Path(client.download_artifacts(run.info.run_id, "samples/000001.json", str(run_dir))).read_text()
    )
    assert table["columns"] == list(ROWS[0])
    assert len(table["data"]) == 2
    return Left(runs=len(runs), rewards=rewards, settings=run.data.params, texts=table["data"][0][1])


def in_trackio(run_dir: Path) -> Left:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("sums")
    assert re.fullmatch(r"run-[0-9a-f]{6}", name)
    logs = SQLiteStorage.get_logs("sums", name)
    config = SQLiteStorage.get_run_config("sums", name)
    assert config["_Group"] == "g"
    (table,) = [log["samples"]["_value"] for log in logs if log["step"] == 1 and "samples" in log]
    rewards = by_step((log["step"], log[REWARD]) for log in logs if REWARD in log)
    return Left(runs=1, rewards=rewards, settings=as_params(config), texts=table[0]["response"])


def records(path: Path, *, block: int = 32768) -> Iterator[bytes]:
    """The records of a file in the form of LevelDB's logs, behind a header of 7 bytes."""
    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := block - place % block) < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def in_wandb(run_dir: Path) -> Left:
    from wandb.proto import wandb_internal_pb2

    ids, rewards, settings = set[str](), list[tuple[int, float]](), dict[str, Any]()
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        for text in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(text)
            if record.WhichOneof("record_type") == "run":
                run = record.run
                ids.add(run.run_id)
                assert (run.project, run.run_group, run.display_name) == ("sums", "g", "run")
                settings |= {each.key: json.loads(each.value_json) for each in run.config.update}
            if record.WhichOneof("record_type") == "history":
                items = {x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in record.history.item}
                rewards.append((items["_step"], items[REWARD]))
    table = json.loads(next(run_dir.glob("wandb/*/files/media/table/samples_1_*.json")).read_text())
    assert table["columns"] == list(ROWS[0])
    return Left(runs=len(ids), rewards=by_step(rewards), settings=as_params(settings), texts=table["data"][0][1])


def in_swanlab(run_dir: Path) -> Left:
    from swanlab.proto.swanlab.record.v1 import record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    ids, rewards = set[str](), list[tuple[int, float]]()
    for path in sorted(run_dir.glob("swanlog/*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(path)
        for text in reader:
            record = record_pb2.Record()
            record.ParseFromString(text)
            if record.HasField("start"):
                ids.add(record.start.id)
                assert (record.start.project, record.start.group, record.start.name) == ("sums", "g", "run")
            if record.HasField("scalar") and record.scalar.key == REWARD:
                rewards.append((record.scalar.step, record.scalar.value.number))
        reader.close()
    config = yaml.safe_load(next(run_dir.glob("swanlog/*/files/config.yaml")).read_text())
    settings = as_params({name: entry["value"] for name, entry in config.items()})
    table = json.loads(next(run_dir.glob("swanlog/*/media/echarts/001-*.json")).read_text())
    return Left(runs=len(ids), rewards=by_step(rewards), settings=settings, texts=table["rowData"][0]["response"])


def by_step(numbers: Iterable[tuple[int, float]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for step, number in numbers:
        found.setdefault(step, []).append(number)
    return found


def as_params(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in files.flat(settings).items()}


READERS: dict[str, Callable[[Path], Left]] = {
    "tensorboard": in_tensorboard,
    "wandb": in_wandb,
    "trackio": in_trackio,
    "mlflow": in_mlflow,
    "swanlab": in_swanlab,
}
TWICE = ("trackio", "wandb", "swanlab")  # have steps that are made again twice; W&B until a server has them


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """No network, and every tracker's files here."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "SWANLAB_MODE": "offline",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_run_that_goes_on_is_one_run(tmp_path, name):
    pytest.importorskip(name)
    leave(name, tmp_path / "run")
    left = READERS[name](tmp_path / "run")
    assert left.runs == 1
    again = 2 if name in TWICE else 1
    assert left.rewards == {step: [step / 4] * (again if step == 2 else 1) for step in range(4)}
    if name == "tensorboard":  # it has no settings, and its texts are Markdown
        assert left.texts.count("| stop |") == 1
        return
    assert as_params(SETTINGS).items() <= left.settings.items()
    assert left.texts == NASTY


@given(st.text(max_size=300))
def test_names_for_mlflow_are_those_that_it_takes(text):
    name = trackers.mlflow_name(text)
    assert re.fullmatch(r"[\w.\- :/]{1,250}", name)
    assert all(part.strip(".") for part in name.split("/"))


def test_an_id_is_that_of_an_earlier_start_and_none_of_a_run_that_begins_anew(tmp_path):
    run = Tracked(run_dir=tmp_path)
    assert run.noted("any") is None
    run.note("any", "a-1.b")
    assert run.noted("any") == "a-1.b"
    assert attrs.evolve(run, settings={"resume": "never"}).noted("any") is None
    run.note("any", "damaged \x00")
    assert run.noted("any") is None
