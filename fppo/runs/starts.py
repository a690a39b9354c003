"""The settings of a run on disk: the current ones, and those of each start, by the step that it resumed from.

`settings.toml` holds those of the last start that took steps. A start with unchanged settings writes no file of its
own.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from fppo.assembly.run import MADE_BY
from fppo.runs import origins
from fppo.runtime import checkpoint
from fppo.runtime.exports import write_whole
from fppo.settings import files
from fppo.settings.sft import is_read
from fppo.settings.train import TrainSettings

SETTINGS, CHECKPOINTS = files.SETTINGS, "checkpoints"
KEPT = f"{SETTINGS}.kept"  # copy of a user's own file of that name from before the run's first start
_DIGEST = "# digest of what follows: "
NAME = re.compile(r"step_(\d{8})\.toml")


def load(directory: Path, step: int | None = None) -> TrainSettings:
    """The settings of the run in a directory, which may have been moved: those that made `step`, or the last ones.

    Raises ValueError if no run has written any, and for a damaged record of `step`.
    """
    before = [file for start, file in _recorded(directory).items() if step is not None and start < step]
    path = before[-1] if before else directory / SETTINGS
    if before and _values(path) is None:
        raise ValueError(f"{path} is damaged: the settings that made step {step} are unknown")
    if not path.exists():
        raise ValueError(f"{path}: no such file; give the output_dir of a run")
    settings, problems = files.examined(path, run=directory)
    if made_by(directory) is not None:
        problems = [problem for problem in problems if is_read(problem)]
    if problems:
        raise files.SettingsError(problems, source=str(path))
    return settings


def made_by(directory: Path) -> str | None:
    """The command that made the run's checkpoints; None if it is fppo train, or there is no checkpoint."""
    steps = checkpoint.steps(directory / CHECKPOINTS)
    return checkpoint.notes_of(checkpoint.place_of(directory / CHECKPOINTS, steps[-1])).get(MADE_BY) if steps else None


def spans(directory: Path, first: int, last: int) -> list[tuple[TrainSettings, int]]:
    """The settings that made the steps `first` to `last` of a run, in order, each with its last step. Neighbours may be
    equal, where a start changed only the origin."""
    turns = sorted(start for start in {*_recorded(directory), *origins.recorded(directory)} if first <= start < last)
    return [(load(directory, until), until) for until in [*turns, last]]


def first(directory: Path) -> int:
    """The step that the run began from: 0, or that of another run's checkpoint."""
    return 0 if source(directory) is None else next(iter(_recorded(directory)))


def last(directory: Path) -> dict[str, Any]:
    """The settings of the run's last start by their paths, as written; empty without a start, or if damaged."""
    recorded = list(_recorded(directory).values())
    return files.flat(_values(recorded[-1]) or {}) if recorded else {}


def before(settings: TrainSettings) -> TrainSettings | None:
    """The settings of the last start in output_dir; in a directory without one, those of the run whose checkpoint
    `resume` names. None if there are none, or if they are damaged."""
    directory = Path(settings.output_dir)
    if settings.resume not in files.RESUMES and not _recorded(directory):
        directory = Path(settings.resume).parent.parent
    recorded = list(_recorded(directory).values())
    values = _values(recorded[-1]) if recorded else None
    return None if values is None else files.from_dict(values)


def source(directory: Path) -> str | None:
    """The checkpoint of another run that the run began from; None if there is none, "" if the record of it is
    damaged."""
    first = next(iter(_recorded(directory).items()), None)
    if first is None:
        return None
    values = _values(first[1])
    if values is None:
        return "" if first[0] else None
    asked = values.get("resume")
    return asked if asked not in (None, *files.RESUMES) else None


def record(settings: TrainSettings, step: int) -> dict[str, tuple[Any, Any]]:
    """Write the settings of a start that resumes from `step`, and return (old, new) of each setting that has changed
    since the last start.

    Records of starts from later steps are dropped: these steps are made again. A damaged record is reported on stderr
    and kept.
    """
    directory = Path(settings.output_dir)
    recorded = _recorded(directory)
    if not recorded and (directory / SETTINGS).exists():
        shutil.copy(directory / SETTINGS, directory / KEPT)
    _say_damaged(recorded)
    begun = [_values(file) for file in recorded.values()]
    changes = files.changes(begun[-1], settings) if begun and begun[-1] is not None else {}
    for start, file in recorded.items():
        if start > step:
            file.unlink()
    kept = [values for start, values in zip(recorded, begun, strict=True) if start <= step]
    if not kept or kept[-1] is None or files.changes(kept[-1], settings):
        asked = settings.resume if settings.resume in files.RESUMES else os.path.abspath(settings.resume)
        if step == first(directory):
            asked = source(directory) or asked
        (directory / files.STARTS).mkdir(exist_ok=True)
        place = directory / files.STARTS / f"step_{step:08d}.toml"
        if place.exists() and _values(place) is None:
            os.replace(place, place.with_name(f"{place.name}.damaged"))
        _write(attrs.evolve(settings, resume=asked), place, digest=True)
    _write(attrs.evolve(settings, resume="auto"), directory / SETTINGS)
    return dict(changes)


def _say_damaged(recorded: Mapping[int, Path]) -> None:
    begun = list(recorded)
    for start, file, end in zip(begun, recorded.values(), [*begun[1:], None]):
        if _values(file) is None:
            until = "" if end is None else f" to {end}"
            text = f"the settings of the steps from {start + 1}{until} are unknown, and fppo replay refuses them"
            print(f"{file} is damaged: {text}", file=sys.stderr)


def _read(path: Path) -> dict[str, Any] | None:
    """The tables of a file of settings; None if it is damaged or empty."""
    try:
        values = files.read_toml(path)
        files.from_dict(values)
    except (OSError, ValueError):
        return None
    return values or None


def _values(path: Path) -> dict[str, Any] | None:
    """The tables of a start's record, checked by the digest in its first line; None if it is damaged."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    line, _, rest = text.partition("\n")
    if line.startswith(_DIGEST) and text.encode() != _digested(rest):
        return None
    return _read(path)


def _digested(text: str) -> bytes:
    return f"{_DIGEST}{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}\n{text}".encode()


def _recorded(directory: Path) -> dict[int, Path]:
    """The files of the starts, by the steps that they resumed from, ascending."""
    places = (directory / files.STARTS).glob("*.toml")
    return {int(match[1]): path for path in sorted(places) if (match := NAME.fullmatch(path.name))}


def _write(settings: TrainSettings, path: Path, *, digest: bool = False) -> None:
    """Write settings to a file atomically; paths inside output_dir become relative to it."""
    text = files.to_toml(files.relocated(settings, settings.output_dir))
    write_whole(path, _digested(text) if digest else text.encode())
