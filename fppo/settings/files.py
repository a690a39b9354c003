"""Settings from files and the command line: read, checked as a whole, changed, and written back.

`load` is what `fppo train FILE.toml --actor.optimizer.lr 1e-6` does first. Every problem is named at once.
"""

from __future__ import annotations

import codecs
import functools
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from fppo._errors import check_depth
from fppo.fields import Problem, WrongSetting, fields_of, kinds_of, name_of, place, place_settings, table_of
from fppo.settings import checks
from fppo.settings.component import parts, signature_of
from fppo.settings.modules import own_functions
from fppo.settings.train import TrainSettings
from fppo.settings.values import read_section, switched, value_of_words, words_given

SETTINGS, STARTS = "settings.toml", "starts"  # in a run's directory: its settings, and those of each of its starts
RESUMES = ("auto", "never", "must")  # what `resume` may be beside a checkpoint
# settings whose texts are shown to a model, or sought in what it writes: a shell has no easy way to write a new line
ESCAPED = ("data.prompt", "reward.judge.template", "rollout.stop", "eval.stop", "rollout.turns.failure")
_ESCAPE = re.compile(r"\\(\\[nt]|n|t)")
_COMMANDS = (  # of LaTeX, which begin as a new line or a tab is written
    *("nabla", "ne", "neq", "neg", "ni", "nu", "not", "notin", "newline", "newcommand", "nmid", "nonumber", "noindent"),
    *("tan", "tau", "text", "textbf", "textit", "tfrac", "theta", "tilde", "times", "to", "top", "triangle", "tag"),
)
_COMMAND = re.compile(rf"(?<!\\)\\({'|'.join(_COMMANDS)})(?![A-Za-z])")
# settings that may name a file or a directory to read
PATHS = tuple(path for path in place_settings(TrainSettings) if path not in ("output_dir", "resume"))


class SettingsError(ValueError):
    """An error that names every problem with the settings, one line each."""

    def __init__(self, problems: Iterable[Problem | str], *, source: str = "the settings") -> None:
        self.problems = tuple(dict.fromkeys(map(str, problems)))
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{count} in {source}:", *(f"  {p}" for p in self.problems)]))


def load(
    path: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    *,
    look: Callable[[TrainSettings, Sequence[Problem]], Iterable[Problem]] = lambda settings, problems: (),
    run: str | os.PathLike[str] | None = None,
) -> TrainSettings:
    """Load the settings of a TOML file (none: the defaults) with command-line `overrides`, and check them.

    `look` and `run` are those of `examined`. Raises SettingsError with every problem of the file, the overrides and the
    resulting settings.
    """
    settings, problems = examined(path, overrides, look=look, run=run)
    if problems:
        source = "the settings" if path is None else f"{path}, with the flags" if overrides else str(path)
        raise SettingsError(problems, source=source)
    return settings


def examined(
    path: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    *,
    tables: Mapping[str, Any] = MappingProxyType({}),
    look: Callable[[TrainSettings, Sequence[Problem]], Iterable[Problem]] = lambda settings, problems: (),
    run: str | os.PathLike[str] | None = None,
) -> tuple[TrainSettings, list[Problem]]:
    """The settings of a TOML file (none: of `tables`) with command-line `overrides`, and all problems with them.

    `look` finds further problems, such as in the files that settings name. Settings that a run has written are adapted
    to where the run is now: in the directory `run` (none: the file's own directory, if a run has written it).
    A malformed value is a problem, and its setting has the default. Raises SettingsError for a file that is not TOML.
    """
    values = tables if path is None else read_toml(path)
    settings, problems = read_section(TrainSettings, values, paths=list(paths()))
    remembered: tuple[str, ...] = ()  # by a run, and maybe gone since then
    if run is not None:
        settings = attrs.evolve(relocated(settings, run), resume="auto")
        remembered = settings.module_dirs
    elif path is not None and (Path(path).parent / STARTS).is_dir():
        settings = relocated(settings, Path(path).parent)
        remembered = settings.module_dirs
    settings, wrong = override(settings, overrides)
    settings, problems = _remember_modules(settings, path), [*problems, *wrong]
    known = {problem.path for problem in problems}  # a malformed value was replaced by its default
    problems += [p for p in checks.problems(settings) if p.path not in known]
    problems += _absent(settings.module_dirs, remembered)
    if not any(checks.text_problems(settings)):  # else such a path cannot be looked up
        problems += [p for p in look(settings, problems) if p.path not in known]
    return settings, problems


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file in UTF-8, without a byte-order mark. Raises UnicodeDecodeError."""
    content = Path(path).read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UnicodeDecodeError("utf-8", content, 0, 2, "it is UTF-16; save it as UTF-8")
    return content.decode("utf-8-sig").replace("\r\n", "\n")


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a TOML file. Raises SettingsError if there is no such file or it is not TOML."""
    try:
        return check_depth(tomllib.loads(read_text(path)))
    except FileNotFoundError as error:
        wrong = place(str(path)) or f"there is no such file in {Path(os.path.realpath(path)).parent}"
        raise SettingsError([wrong], source=str(path)) from error
    except IsADirectoryError as error:
        own = Path(path) / "settings.toml"
        advice = f"the settings of the run in it are {own}" if own.exists() else "give a TOML file"
        raise SettingsError([f"it is a directory; {advice}"], source=str(path)) from error
    except OSError as error:
        raise SettingsError([f"it cannot be read: {error.strerror}"], source=str(path)) from error
    except RecursionError:
        raise SettingsError(["it is not TOML of settings: it is nested too deep"], source=str(path)) from None
    except ValueError as error:
        raise SettingsError([f"it is not TOML: {error}"], source=str(path)) from error


def by_path(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs of path and value of settings that are given by their paths, in sections, or both."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and path not in paths():
            yield from by_path(value, f"{path}.")
        else:
            yield path, value


def nested(values: Iterable[tuple[str, Any]]) -> tuple[dict[str, Any], list[Problem]]:
    """The tables of settings in pairs of path and value, and the problems of those given twice or in a setting."""
    tables: dict[str, Any] = {}
    problems: list[Problem] = []
    of_parts = {path for path, _, _ in parts(TrainSettings())}
    for path, value in values:
        section, _, name = (f"{path}.name" if path in of_parts else path).rpartition(".")
        try:
            table = _table_at(tables, section)
        except WrongSetting as error:
            problems.append(error.problem)
            continue
        if name in table:
            problems.append(Problem(path, value, "it is given twice; give it once"))
        table[name] = value
    return tables, problems


def from_dict(values: Mapping[str, Any]) -> TrainSettings:
    """The settings of nested tables; what is left out has its default. Raises SettingsError; see also `check`."""
    settings, problems = read_section(TrainSettings, values, paths=list(paths()))
    if problems:
        raise SettingsError(problems)
    return settings


def check(settings: TrainSettings) -> TrainSettings:
    """The settings, if they can run. Raises SettingsError with every problem if not."""
    problems = checks.problems(settings)
    if problems:
        raise SettingsError(problems)
    return settings


def override(settings: TrainSettings, arguments: Sequence[str]) -> tuple[TrainSettings, list[Problem]]:
    """The settings with command-line arguments like ["--actor.optimizer.lr", "1e-6"] applied, and their problems."""
    words, problems = words_given(arguments)
    kinds, of_parts = paths(), {path: (part, table) for path, part, table in parts(settings)}
    words = {f"{path}.name" if path in of_parts else path: behind for path, behind in words.items()}
    given: dict[str, Any] = {}
    for path, behind in switched(words, kinds).items():
        section, _, name = path.rpartition(".")
        kind = kinds.get(path, Any)
        if path not in kinds and section in of_parts:
            part, table = of_parts[section]
            signature = signature_of(" ".join(words.get(f"{section}.name", [part.name])), table)
            known = {} if signature is None else signature.keywords
            kind = known[name].kind if name in known else Any
        try:
            value = value_of_words(behind, kind)
            given[path] = "none" if value is None and path not in kinds else value
        except ValueError as error:
            problems.append(Problem(path, " ".join(behind), str(error)))
    values = flat(to_dict(settings))
    try:
        settings, wrong = read_section(TrainSettings, _changed(settings, given), paths=list(paths()))
        changes = unescaped(values, flat(to_dict(settings)))
    except WrongSetting as error:
        return settings, [*problems, error.problem]
    return replace(settings, changes) if changes else settings, [*problems, *wrong]


def unescaped(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    r"""Values of the settings `ESCAPED` that the command line changed from `before`, by path, with escapes replaced: \n
    by a new line, \t by a tab, and \\n by \n.

    Raises WrongSetting for a command of LaTeX that begins with \n or \t, since it may be meant.
    """
    changed = [path for path in ESCAPED if now[path] != before[path]]
    return {
        path: [_unescaped(path, text) for text in value]
        if isinstance(value := now[path], list)
        else _unescaped(path, value)
        for path in changed
        if now[path] is not None
    }


def _unescaped(path: str, text: str) -> str:
    if (found := _COMMAND.search(text)) is not None:
        kind = {"n": "a new line", "t": "a tab"}[found[1][0]]
        why = f"\\{found[1][0]} is {kind} here, and \\{found[1]} may be meant: write \\\\{found[1]} for that"
        raise WrongSetting(path, text, f"{why}, or the character itself for {kind}")
    characters = {"n": "\n", "t": "\t"}
    return _ESCAPE.sub(lambda match: characters.get(match[1], match[1]), text)


def _changed(settings: TrainSettings, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as nested tables with `changes` by path; a part with a new function loses its old keywords.

    Raises WrongSetting for a path that treats a setting as a section.
    """
    values = to_dict(settings)
    for path, part, _ in parts(settings):
        if changes.get(f"{path}.name", part.name) != part.name:
            table = _table_at(values, path)
            for name in part.keywords:
                del table[name]
    for path, value in changes.items():
        section, _, name = path.rpartition(".")
        _table_at(values, section)[name] = value
    return values


def _table_at(values: dict[str, Any], path: str) -> dict[str, Any]:
    for name in filter(None, path.split(".")):
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise WrongSetting(path, attrs.NOTHING, f"{name} is a setting, not a section")
    return values


def replace(settings: TrainSettings, changes: Mapping[str, Any]) -> TrainSettings:
    """The settings with `changes` by path, such as {"actor.optimizer.lr": 1e-6}; conflicts are not checked."""
    of_parts = {path for path, _, _ in parts(settings)}
    named = {f"{path}.name" if path in of_parts else path: value for path, value in changes.items()}
    try:
        return from_dict(_changed(settings, named))
    except WrongSetting as error:
        raise SettingsError([error.problem]) from error


def to_dict(settings: Any) -> dict[str, Any]:
    """The settings as nested plain values; None stays None."""
    values = {name_of(f): getattr(settings, f.name) for f in fields_of(type(settings))}
    if table_of(type(settings)) is not None:
        values |= settings.keywords
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    return to_dict(value) if attrs.has(type(value)) else list(value) if isinstance(value, tuple) else deepcopy(value)


def to_toml(settings: TrainSettings) -> str:
    """The settings as a TOML file that gives them back; optional settings that are None are left out."""
    return tables(to_dict(settings))


def tables(values: Mapping[str, Any]) -> str:
    """Nested tables of settings, some or all, as TOML; None is left out."""
    return "\n".join(_toml_lines(values, "", paths())).lstrip("\n") + "\n"


def save(settings: TrainSettings, path: str | os.PathLike[str]) -> None:
    """Writes the settings as TOML; `load` reads them back equal."""
    Path(path).write_text(to_toml(settings), encoding="utf-8")


def relocated(settings: TrainSettings, directory: str | os.PathLike[str]) -> TrainSettings:
    """The settings of a run that is in `directory` now: paths inside of its old output_dir are moved there."""
    return replace(settings, _moves(flat(to_dict(settings)), directory))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as values by their paths: {"actor.optimizer.lr": 1e-6}."""
    by_path: dict[str, Any] = {}
    for name, value in values.items():
        by_path |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return by_path


def differing(settings: TrainSettings, defaults: TrainSettings) -> dict[str, Any]:
    """The settings that differ from their defaults, by their paths."""
    values, usual = flat(to_dict(settings)), flat(to_dict(defaults))
    return {path: value for path, value in values.items() if path not in usual or value != usual[path]}


def changes(old: Mapping[str, Any], new: TrainSettings) -> dict[str, tuple[Any, Any]]:
    """The settings that differ between a run's tables in TOML and its settings now, as (old, new) by path.

    Differences in the run's location do not count, nor does `resume`, which belongs to a single start.
    """
    before, now = flat(old), flat(to_dict(new))
    for values in (before, now):
        values |= _moves(values, new.output_dir) | {"resume": None}
    names = [*now, *(name for name in before if name not in now)]
    return {name: (before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)}


def shown(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Write changes, (old, new) by path, as text."""
    return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changes.items())


def _moves(values: Mapping[str, Any], directory: str | os.PathLike[str]) -> dict[str, Any]:
    """New values, by path, of the settings that name files and directories, for a run that has been moved to
    `directory`."""
    new, old = os.fspath(directory), os.path.abspath(values.get("output_dir", directory))

    def moved(path: str) -> str:
        inside = os.path.relpath(os.path.abspath(path), old)
        place = os.path.normpath(os.path.join(new, inside))
        outside = inside.split(os.sep)[0] == os.pardir
        return path if not path or outside or not os.path.exists(place) else place

    moves: dict[str, Any] = {"output_dir": new}
    for name in PATHS:
        if isinstance(value := values.get(name), str):
            moves[name] = moved(value)
        elif value is not None:
            moves[name] = [moved(path) for path in value]
    return moves


@functools.cache
def paths(cls: type = TrainSettings, prefix: str = "") -> Mapping[str, Any]:
    """The type of every setting by its path, without sections and the keywords of parts."""
    kinds: dict[str, Any] = {}
    for name, kind in kinds_of(cls).items():
        kinds |= paths(kind, f"{prefix}{name}.") if attrs.has(kind) else {f"{prefix}{name}": kind}
    return MappingProxyType(kinds)


def _remember_modules(settings: TrainSettings, path: str | os.PathLike[str] | None) -> TrainSettings:
    """Set `module_dirs`, if it is not set and the settings name functions or modules of the user's.

    The directories are that of the file at `path` and the present working directory, so that a run that goes on from
    its output_dir finds the same modules.
    """
    if settings.module_dirs or not (own_functions(settings) or settings.model.import_):
        return settings
    places = [Path.cwd()] if path is None else [Path(os.path.realpath(path)).parent, Path.cwd()]
    return attrs.evolve(settings, module_dirs=tuple(dict.fromkeys(map(str, places))))


def _absent(module_dirs: Sequence[str], remembered: Sequence[str]) -> list[Problem]:
    """A problem if directories of modules do not exist, except those that a run has `remembered`."""
    given = [name for name in module_dirs if name not in remembered and place(name) is None and "\0" not in name]
    absent = [name for name in given if not os.path.isdir(name)]
    text = "there is no such directory; give one that is there, or leave it out"
    return [Problem("module_dirs", absent, text)] if absent else []


def _toml_lines(table: Mapping[str, Any], prefix: str, plain: Mapping[str, Any]) -> list[str]:
    """Lines of TOML for a nested table whose path is `prefix`. Tables at the paths in `plain` are written as values,
    not as sections."""

    def is_section(name: str, value: Any) -> bool:
        return isinstance(value, Mapping) and f"{prefix}{name}" not in plain

    lines = [f"{_key(name)} = {_toml(v)}" for name, v in table.items() if not is_section(name, v) and v is not None]
    for name, value in table.items():
        if is_section(name, value):
            inside = _toml_lines(value, f"{prefix}{name}.", plain)
            has_own = any(not is_section(f"{name}.{inner}", v) and v is not None for inner, v in value.items())
            lines += ["", f"[{prefix}{name}]", *inside] if has_own else inside
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml(v) for v in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(k)} = {_toml(v)}' for k, v in value.items() if v is not None)}}}"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value).lower() if isinstance(value, bool) else repr(value)
