"""Arguments of several commands: the number of processes, and the file or run before the flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fppo._errors import UsageError

LAUNCH = {"--nproc": 1, "--max-restarts": 0}  # flags for launching processes, each with its least value


class LaunchOptions(NamedTuple):
    """The number of a command's processes on this machine (None: as many as its mesh needs), and of restarts."""

    nproc: int | None = None
    max_restarts: int = 0


def processes(rest: Sequence[str]) -> tuple[LaunchOptions, list[str]]:
    """Split off the launch options from the arguments. Raises ValueError for an invalid number."""
    numbers: dict[str, int] = {}
    left: list[str] = []
    arguments = iter(rest)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in LAUNCH:
            left.append(argument)
            continue
        value = value if equals else next(arguments, "")
        if not value.isdecimal() or int(value) < LAUNCH[name]:
            raise UsageError(f"{name} {value}: give a whole number, {LAUNCH[name]} or more")
        numbers[name.removeprefix("--").replace("-", "_")] = int(value)
    return LaunchOptions(**numbers), left


def file_and_overrides(rest: Sequence[str], command: str) -> tuple[str | None, list[str]]:
    """The argument before the first flag, if any, and the rest. Raises ValueError for a file after flags."""
    if rest and not rest[0].startswith("-"):
        return rest[0], list(rest[1:])
    # a run's directory right after a flag is its value, such as of --output-dir
    runs = {word for before, word in zip(["", *rest], rest) if not before.startswith("--") or "=" in before}
    late = next((x for x in rest if x.endswith(".toml") or (x in runs and (Path(x) / "settings.toml").exists())), None)
    if late is not None:
        others = " ".join(word for word in rest if word != late)
        raise UsageError(f"{late} comes after flags; give it first: fppo {command} {late} {others}")
    return None, list(rest)
