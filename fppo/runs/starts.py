"""The settings of a run on disk: those it has now, and those of each of its starts, by the step that it went on from.

`settings.toml` holds the ones of the last start that took steps. A start with the settings of the one before leaves no
file of its own.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from fppo.settings import files
from fppo.settings.train import TrainSettings

SETTINGS = files.SETTINGS
KEPT = f"{SETTINGS}.kept"  # what stood under that name before the run's first start: somebody's own file
NAME = re.compile(r"step_(\d{8})\.toml")


def load(directory: Path, step: int | None = None) -> TrainSettings:
    """The settings of the run in a directory, wherever that was moved to: those that made `step`, or the last ones.

    Raises ValueError if no run has written any there.
    """
    before = [file for start, file in _recorded(directory).items() if step is not None and start < step]
    path = before[-1] if before else directory / SETTINGS
    if not path.exists():
        raise ValueError(f"{path}: there is no such file; give the output_dir of a run")
    return files.load(path, run=directory)


def spans(directory: Path, first: int, last: int) -> list[tuple[TrainSettings, int]]:
    """The settings that made the steps `first` to `last` of a run, in order, each with the last step of theirs."""
    turns = [start for start in _recorded(directory) if first <= start < last]
    return [(load(directory, until), until) for until in [*turns, last]]


def first(directory: Path) -> int:
    """The step that the run began from: 0, or that of another's checkpoint."""
    return 0 if source(directory) is None else next(iter(_recorded(directory)))


def last(directory: Path) -> dict[str, Any]:
    """The settings of the run's last start by their paths, as they were written; none if there was none."""
    recorded = list(_recorded(directory).values())
    return files.flat(files.read_toml(recorded[-1])) if recorded else {}


def source(directory: Path) -> str | None:
    """The checkpoint that the run began from, if it was another's."""
    first = next(iter(_recorded(directory).values()), None)
    asked = None if first is None else files.read_toml(first).get("resume")
    return asked if asked not in (None, *files.RESUMES) else None


def record(settings: TrainSettings, step: int) -> dict[str, tuple[Any, Any]]:
    """Writes the settings of a start that goes on from `step`; old and new of those that differ from the last start's.

    What a start from a later step left is dropped: its steps are made again.
    """
    directory = Path(settings.output_dir)
    recorded = _recorded(directory)
    changes: Mapping[str, tuple[Any, Any]] = {}
    if not recorded and (directory / SETTINGS).exists():
        shutil.copy(directory / SETTINGS, directory / KEPT)
    if recorded:
        changes = files.changes(files.read_toml(list(recorded.values())[-1]), settings)
    for start, file in recorded.items():
        if start > step:
            file.unlink()
    kept = [file for start, file in recorded.items() if start <= step]
    if not kept or files.changes(files.read_toml(kept[-1]), settings):
        asked = settings.resume if settings.resume in files.RESUMES else os.path.abspath(settings.resume)
        if step == first(directory):
            asked = source(directory) or asked
        (directory / files.STARTS).mkdir(exist_ok=True)
        _write(attrs.evolve(settings, resume=asked), directory / files.STARTS / f"step_{step:08d}.toml")
    _write(attrs.evolve(settings, resume="auto"), directory / SETTINGS)
    return dict(changes)


def _recorded(directory: Path) -> dict[int, Path]:
    """The files of the starts, by the steps that they went on from, ascending."""
    places = (directory / files.STARTS).glob("*.toml")
    return {int(match[1]): path for path in sorted(places) if (match := NAME.fullmatch(path.name))}


def _write(settings: TrainSettings, path: Path) -> None:
    """Replaces a file as a whole; what is inside output_dir is named as inside of it."""
    draft = path.with_name(f".{path.name}.new")
    files.save(files.relocated(settings, settings.output_dir), draft)
    os.replace(draft, path)
