"""Trackers of runs, a function for each: TensorBoard, W&B, trackio, MLflow, SwanLab.

Each opens a run with its settings, or goes on with the one that this run's directory names in the file NAME_id. The
trackers' own environment variables decide on keys, addresses and modes, and on where files go.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from fppo._errors import words_of
from fppo.runs import markdown
from fppo.runs.guards import NotStarted, Rows, TrackerRun
from fppo.runtime.exports import write_whole
from fppo.settings import files

SAMPLES = "samples"  # the name of the samples in a tracker
STEP = "training/global_step"
_PARAMS, _VALUE, _NAME = 100, 6000, 250  # MLflow's most parameters of a call, and characters of a value and a name


@attrs.frozen(kw_only=True)
class Tracked:
    """A run as trackers see it."""

    run_dir: Path
    first_step: int = 0  # the first step to be logged
    project: str = "fppo"
    entity: str | None = None
    group: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})  # nested tables

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return Path(os.path.realpath(self.run_dir)).name

    def noted(self, tracker: str) -> str | None:
        """The id of this run in a tracker, from an earlier start; None without one, and for a run that begins anew."""
        place = self.run_dir / f"{tracker}_id"
        text = place.read_text(errors="replace").strip() if place.exists() else ""
        anew = self.settings.get("resume") == "never"
        return text if re.fullmatch(r"[\w.-]+", text) and not anew else None  # None for a damaged id

    def note(self, tracker: str, run_id: str) -> None:
        """Keep the id of this run in a tracker."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(self.run_dir / f"{tracker}_id", run_id.encode())


def tensorboard(run: Tracked) -> TrackerRun:
    """Event files in the run's directory; TensorBoard hides earlier events from the first step on."""
    from torch.utils.tensorboard import SummaryWriter

    purged = run.first_step if run.first_step > 0 else None
    writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=purged)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_samples(step: int, rows: Rows) -> None:
        writer.add_text(SAMPLES, markdown.table(*_cells(rows)), step)
        writer.flush()

    return TrackerRun(log=log, log_samples=log_samples, close=writer.close)


def _cells(rows: Rows) -> tuple[list[str], list[list[Any]]]:
    """The names of the columns, and the cells row by row."""
    head = list(rows[0])
    return head, [[row[name] for name in head] for row in rows]


def _logging(opened: Any, table: Callable[[Rows], Any]) -> TrackerRun:
    """A run that takes numbers and tables by its method `log`; `table` makes a table of rows."""

    def log(step: int, metrics: Mapping[str, Any]) -> None:
        opened.log(dict(metrics), step=step)

    return TrackerRun(log=log, log_samples=lambda step, rows: log(step, {SAMPLES: table(rows)}), close=opened.finish)


def wandb(run: Tracked) -> TrackerRun:
    """A run of Weights & Biases, named after the run's directory. Steps that W&B has already keep their numbers."""
    import wandb as package  # pyright: ignore[reportMissingImports]

    previous = run.noted("wandb")
    run.run_dir.mkdir(parents=True, exist_ok=True)
    opened = package.init(
        project=run.project,
        entity=run.entity,
        group=run.group,
        name=run.name,
        id=previous,
        dir=str(run.run_dir),
        config=dict(run.settings),
        resume="allow" if previous else None,
    )
    run.note("wandb", opened.id)

    def table(rows: Rows) -> Any:
        head, data = _cells(rows)
        return package.Table(columns=head, data=data)

    return _logging(opened, table)


def mlflow(run: Tracked) -> TrackerRun:
    """A run of MLflow in the experiment of the project's name. Steps that MLflow has already keep their numbers.

    Settings are parameters, which MLflow never changes; those of each start are the artifact settings/STEP.json, too.
    """
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
    from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

    client = MlflowClient()
    run_id = _mlflow_run(client, run)
    client.log_dict(run_id, dict(run.settings), f"settings/{run.first_step:06d}.json")
    last = max((each.step for each in client.get_metric_history(run_id, STEP)), default=-1)
    shown = {each.path for each in client.list_artifacts(run_id, SAMPLES)}

    def log(step: int, metrics: Mapping[str, float]) -> None:
        if step > last:
            now = int(1000 * time.time())
            values = [Metric(mlflow_name(name), float(x), now, step) for name, x in metrics.items()]
            for start in range(0, len(values), 1000):
                client.log_batch(run_id, metrics=values[start : start + 1000])

    def log_samples(step: int, rows: Rows) -> None:
        place = f"{SAMPLES}/{step:06d}.json"
        if place not in shown:
            client.log_table(run_id, {name: [row[name] for row in rows] for name in rows[0]}, place)

    return TrackerRun(log=log, log_samples=log_samples, close=partial(client.set_terminated, run_id))


def _mlflow_run(client: Any, run: Tracked) -> str:
    """The id of the run in MLflow: that of an earlier start if MLflow has it, or that of a new run with the
    settings."""
    from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
    from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

    if (noted := run.noted("mlflow")) is not None:
        try:
            client.update_run(noted, status="RUNNING")
            return noted
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    known = client.get_experiment_by_name(run.project)
    experiment = client.create_experiment(run.project) if known is None else known.experiment_id
    tags = {"group": run.group} if run.group is not None else {}
    run_id: str = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
    params = [Param(mlflow_name(k), str(v)[:_VALUE]) for k, v in files.flat(run.settings).items()]
    for start in range(0, len(params), _PARAMS):
        client.log_batch(run_id, params=params[start : start + _PARAMS])
    run.note("mlflow", run_id)
    return run_id


def trackio(run: Tracked) -> TrackerRun:
    """A run of trackio, in its database of the project. Steps that are made again are recorded twice.

    trackio goes on with the newest run of a name, so names end with some random digits.
    """
    import pandas as pd
    import trackio as package  # pyright: ignore[reportMissingImports]

    previous, plain = run.noted("trackio"), re.sub(r"[^\w.-]+", "-", run.name)
    opened = package.init(
        project=run.project,
        name=previous or f"{plain}-{secrets.token_hex(3)}",
        group=run.group,
        config=dict(run.settings),
        resume="allow" if previous else "never",
        embed=False,
    )
    run.note("trackio", opened.name)
    return _logging(opened, lambda rows: package.Table(dataframe=pd.DataFrame(rows)))


def swanlab(run: Tracked) -> TrackerRun:
    """A run of SwanLab, with its files in the run's directory."""
    import swanlab as package  # pyright: ignore[reportMissingImports]

    previous = run.noted("swanlab")
    opened = package.init(
        project=run.project,
        workspace=run.entity,
        name=run.name,
        group=run.group,
        id=previous,
        resume="allow" if previous else None,
        config=dict(run.settings),
        logdir=str(run.run_dir / "swanlog"),
    )
    run.note("swanlab", opened.id)
    return _logging(opened, lambda rows: package.echarts.Table().add(*_cells(rows)))


def mlflow_name(name: str) -> str:
    """A metric's name as MLflow takes it: @ becomes _at_; other characters, and parts of paths that are dots alone,
    become _."""
    text = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
    whole = "/".join(part if part.strip(".") else "_" * max(len(part), 1) for part in text.split("/"))
    return whole if len(whole) <= _NAME else whole[:_NAME].rstrip("/.")


def start(name: str, run: Tracked) -> TrackerRun:
    """The tracker of that name, opened for a run. Raises ValueError, which names it, if its package is not installed,
    and NotStarted if it does not start."""
    try:
        return TRACKERS[name](run)
    except ImportError as error:
        text = f"{name} is not installed; pip install 'fppo[{name}]'"
        raise ValueError(f"log.loggers names {name}: {text}") from error
    except (Exception, SystemExit) as error:
        advice = f"leave it out, or see that it can log in and write here{_OFFLINE.get(name, '')}"
        raise NotStarted(f"log.loggers names {name}, which does not start: {words_of(error)}; {advice}") from error


TRACKERS: Mapping[str, Callable[[Tracked], TrackerRun]] = MappingProxyType(
    {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio, "mlflow": mlflow, "swanlab": swanlab}
)
_OFFLINE = MappingProxyType({"wandb": " (WANDB_MODE=offline)", "swanlab": " (SWANLAB_MODE=offline)"})
