"""Arguments of commands: what each takes, the number of processes, and the file or run before the flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import tyro

from fppo._errors import UsageError
from fppo.fields import flag_problems
from fppo.settings.files import SettingsError

LAUNCH = {"--nproc": 1, "--max-restarts": 0}  # flags for launching processes, each with its least value


Asked = Callable[[], int] | int | None  # what a command that was read is to do yet, or its exit status


class LaunchOptions(NamedTuple):
    """The number of a command's processes on this machine (None: as many as its mesh needs), and of restarts."""

    nproc: int | None = None
    max_restarts: int = 0


class Arguments(NamedTuple):
    """The arguments of one call of a command."""

    own: list[str]  # all but the launch options, as other processes are started with
    processes: LaunchOptions
    file: str | None = None  # or the run, before the flags of settings
    flags: Sequence[str] = ()  # of a run's settings
    options: Any = None  # an instance of the command's class of options


@attrs.frozen
class Command:
    """A command's action, and all the arguments that it takes: the source of its reading, help and completion."""

    act: Callable[[Arguments], Asked]  # its docstring begins with the help in one line
    usage: str  # behind "fppo COMMAND"
    options: type | None = None  # the class of its own flags and positional arguments
    settings: bool = False  # takes a file or a run, and flags of a run's settings
    launch: tuple[str, ...] = ()  # its flags for processes
    example: bool = False  # without arguments it shows an example of a file
    more: str = ""  # the last line of its help
    problems: Callable[[Any], list[str]] | None = flag_problems  # of its options; None: `act` reads these itself

    @property
    def text(self) -> str:
        """One line on the command, the first of its action's docstring."""
        return (self.act.__doc__ or "").splitlines()[0]

    def read(self, name: str, rest: Sequence[str]) -> Arguments | None:
        """Read the arguments behind the command's name; None for none where an example is due. Raises UsageError, and
        SettingsError for options that are out of their bounds."""
        rest = printed(rest)
        number, own = processes(rest) if self.launch else (LaunchOptions(), rest)
        if self.example and not own:
            return None
        file, flags = file_and_overrides(own, name) if self.settings else (None, own)
        if self.options is None or self.problems is None:
            return Arguments(own, number, file, flags)
        if self.settings:
            prog = f"fppo {name} {self.usage}"
            options, flags = tyro.cli(self.options, args=flags, prog=prog, return_unknown_args=True)
        else:
            options = tyro.cli(self.options, args=flags, prog=f"fppo {name}")
        if wrong := self.problems(options):
            raise SettingsError(wrong)
        return Arguments(own, number, file, flags, options)


def printed(rest: Sequence[str]) -> list[str]:
    """The arguments with the file "-", standard output, behind a `--json` that has none."""
    pairs = zip(rest, [*rest[1:], "--"], strict=False)
    return [x for word, then in pairs for x in ([word, "-"] if word == "--json" and then.startswith("--") else [word])]


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
