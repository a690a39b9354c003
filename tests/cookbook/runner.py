"""A server in a directory of stand-ins, and recipes that are run against it, each in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from tests.cookbook import stand_ins
from tests.cookbook.recipes import Metrics, Recipe

COOKBOOK, KEY = "tinker_cookbook", "tml-cookbook"
PATIENCE = 600.0  # seconds until a recipe that does not end is ended


@attrs.frozen
class Served:
    """A running server, its working directory, and the environment in which recipes find both."""

    place: Path
    environment: Mapping[str, str]


@attrs.frozen
class Outcome:
    """What a recipe logged, and the processor seconds that its own process took."""

    metrics: Metrics
    seconds: float


class RecipeError(Exception):
    """A recipe failed; the message has the end of what it printed."""


def missing(recipe: Recipe | None = None) -> str | None:
    """Why recipes, or this one, cannot run here; None if they can."""
    for package in (
        COOKBOOK,
        "fastapi",
        "uvicorn",
        *([] if recipe is None or not recipe.package else [recipe.package]),
    ):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None


def version() -> str:
    """The version of the cookbook that is installed."""
    return importlib.metadata.version(COOKBOOK)


@contextlib.contextmanager
def serving(place: Path) -> Iterator[Served]:
    """Write the stand-ins to a directory, and serve its models for as long as the context lasts."""
    stand_ins.write_models(place)
    stand_ins.write_data(place)
    environment = os.environ | {
        "FPPO_API_KEY": KEY,
        "TINKER_API_KEY": KEY,
        "TINKER_TELEMETRY": "0",
        "TINKER_COOKBOOK_RUNS_DIR": str(place / "runs"),
        "HF_HOME": str(place / "hub"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    arguments = [*stand_ins.MODELS, "--tinker", "--store", str(place / "store"), "--port", "0"]
    command = [sys.executable, "-m", "fppo", "serve", *arguments]
    printed = place / "server.txt"
    with (
        printed.open("w") as out,
        subprocess.Popen(command, cwd=place, env=environment, stdout=out, stderr=out) as server,
    ):
        try:
            yield Served(place, environment | {"TINKER_BASE_URL": _address(server, printed)})
        finally:
            server.terminate()


def _address(server: subprocess.Popen[bytes], printed: Path) -> str:
    """The server's URL, once it has printed it."""
    while (found := re.search(r"http://[\w.]+:\d+", printed.read_text())) is None:
        if server.poll() is not None:
            raise RecipeError(f"the server ended:\n{printed.read_text()[-4000:]}")
        time.sleep(0.1)
    return found[0]


def run(recipe: Recipe, at: Served) -> Outcome:
    """Run a recipe to its end, and check what it logged. Raises RecipeError, and AssertionError for wrong numbers."""
    log = at.place / "runs" / recipe.name.replace(", ", "-").replace(" ", "-")
    began = os.times()
    if recipe.before is not None:
        _call(at, recipe.before)
    steps = [recipe.steps - 1, recipe.steps] if recipe.resumes else [recipe.steps]
    for number in steps:
        _call(at, recipe.module, *recipe.arguments, f"max_steps={number}", f"log_path={log}")
    ended = os.times()
    lines = map(json.loads, (log / "metrics.jsonl").read_text().splitlines())
    rows = [row for row in lines if any(name.startswith("progress") for name in row)]  # the others are sums of a run
    assert len(rows) == recipe.steps, f"{len(rows)} steps in place of {recipe.steps}"
    saved = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    assert {"state_path", "sampler_path"} <= set(saved[-1]), saved[-1]
    recipe.holds(rows)
    used = ended.children_user + ended.children_system - began.children_user - began.children_system
    return Outcome(rows, used)


def _call(at: Served, module: str, *arguments: str) -> None:
    command = [sys.executable, "-m", f"{COOKBOOK}.recipes.{module}", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=at.place,
            env=at.environment,
            input="resume\n",  # what a recipe asks where there is a log already
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired as late:
        raise RecipeError(f"{module} did not end in {PATIENCE:.0f} seconds") from late
    if done.returncode:
        raise RecipeError(f"{module}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
