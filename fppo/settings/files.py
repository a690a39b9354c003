"""Settings from files and the command line: read, checked as a whole, changed, and written back.

`load` is what `fppo train FILE.toml --actor.optimizer.lr 1e-6` does first. Every problem is named at once.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import attrs

from fppo._errors import check_depth, nearest
from fppo.settings import checks, flags, texts
from fppo.settings.component import RENAMED, parts, signature_of, table_of
from fppo.settings.critic import CriticSettings
from fppo.settings.fields import fields_of, kinds_of, name_of
from fppo.settings.modules import own_functions
from fppo.settings.train import ActorSettings, TrainSettings
from fppo.settings.values import converter, described

DEFAULT_TOKEN_BUDGET = 16384
SETTINGS, STARTS = "settings.toml", "starts"  # in a run's directory: its settings, and those of each of its starts
RESUMES = ("auto", "never", "must")  # what `resume` may be beside a checkpoint
PATHS = (
    *("model.path", "model.critic_path", "model.ref_path", "data.path", "data.eval_path", "module_dirs"),
    *("model.lora.path", "rollout.from", "reward.model.path", "reward.model.tokenizer", "reward.judge.path"),
)  # settings that may name a file or a directory


class SettingsError(ValueError):
    """All that is wrong with the settings, one line for each thing."""

    def __init__(self, problems: Sequence[str], *, where: str = "the settings") -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{count} in {where}:", *(f"  {p}" for p in self.problems)]))


def load(
    path: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    *,
    look: Callable[[TrainSettings, Sequence[str]], Sequence[str]] = lambda settings, problems: (),
    run: str | os.PathLike[str] | None = None,
) -> TrainSettings:
    """The settings of a TOML file (none: the defaults) with command-line `overrides`, checked.

    `look` says what is wrong with them beside the problems that are known, as with the files that they name.
    Those that a run has written are of the run in the directory `run` (none: the file's own directory, if a run has
    written it), wherever that was moved or copied to.
    Raises SettingsError with every problem of the file, of the overrides and of the result.
    """
    values = {} if path is None else read_toml(path)
    settings, problems = _structure(TrainSettings, values, "")
    if run is not None:
        settings = attrs.evolve(relocated(settings, run), resume="auto")
    elif path is not None and (Path(path).parent / STARTS).is_dir():
        settings = relocated(settings, Path(path).parent)
    settings, wrong = override(settings, overrides)
    settings, problems = _remember_modules(settings, path), [*problems, *wrong]
    known = {problem.split(" = ")[0] for problem in problems}  # a malformed value was replaced by its default
    problems += [p for p in checks.problems(settings) if p.split(" = ")[0] not in known]
    if not any(texts.text_problems(settings)):  # else nothing can be asked about such a path
        problems += [p for p in look(settings, problems) if p.split(" = ")[0] not in known]
    problems = list(dict.fromkeys(problems))
    if problems:
        raise SettingsError(problems, where="the settings" if path is None else str(path))
    return settings


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a TOML file. Raises SettingsError if there is no such file or it is not TOML."""
    try:
        return check_depth(tomllib.loads(texts.read_text(path)))
    except FileNotFoundError as error:
        raise SettingsError(
            [f"there is no such file in {Path(os.path.realpath(path)).parent}"], where=str(path)
        ) from error
    except IsADirectoryError as error:
        own = Path(path) / "settings.toml"
        advice = f"the settings of the run in it are {own}" if own.exists() else "give a TOML file"
        raise SettingsError([f"it is a directory; {advice}"], where=str(path)) from error
    except OSError as error:
        raise SettingsError([f"it cannot be read: {error.strerror}"], where=str(path)) from error
    except RecursionError:
        raise SettingsError(["it is not TOML of settings: it is nested too deep"], where=str(path)) from None
    except ValueError as error:
        raise SettingsError([f"it is not TOML: {error}"], where=str(path)) from error


def from_dict(values: Mapping[str, Any]) -> TrainSettings:
    """The settings of nested tables; what is left out has its default. Raises SettingsError; see also `check`."""
    settings, problems = _structure(TrainSettings, values, "")
    if problems:
        raise SettingsError(problems)
    return settings


def check(settings: TrainSettings) -> TrainSettings:
    """The settings, if they can run. Raises SettingsError with every problem if not."""
    problems = checks.problems(settings)
    if problems:
        raise SettingsError(problems)
    return settings


def override(settings: TrainSettings, arguments: Sequence[str]) -> tuple[TrainSettings, list[str]]:
    """The settings with command-line arguments like ["--actor.optimizer.lr", "1e-6"] applied, and their problems."""
    words, problems = flags.given(arguments)
    kinds, of_parts = paths(), {path: (part, table) for path, part, table in parts(settings)}
    words = {f"{path}.name" if path in of_parts else path: behind for path, behind in words.items()}
    given: dict[str, Any] = {}
    for path, behind in flags.switched(words, kinds).items():
        section, _, name = path.rpartition(".")
        kind = kinds.get(path, Any)
        if path not in kinds and section in of_parts:
            part, table = of_parts[section]
            signature = signature_of(" ".join(words.get(f"{section}.name", [part.name])), table)
            known = {} if signature is None else signature.keywords
            kind = known[name].kind if name in known else Any
        try:
            value = flags.value_of(behind, kind)
            given[path] = "none" if value is None and path not in kinds else value
        except ValueError as error:
            problems.append(f"{path} = {' '.join(behind)!r}: {error}")
    values = flat(to_dict(settings))
    try:
        settings, wrong = _structure(TrainSettings, _changed(settings, given), "")
        changes = texts.unescaped(values, flat(to_dict(settings)))
    except ValueError as error:
        return settings, [*problems, str(error)]
    return replace(settings, changes) if changes else settings, [*problems, *wrong]


def _changed(settings: TrainSettings, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as nested tables with some changed, by their paths; a part by another name has no old keywords.

    Raises ValueError for a path through a value.
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
            raise ValueError(f"{path}: {name} is a setting, not a section")
    return values


def replace(settings: TrainSettings, changes: Mapping[str, Any]) -> TrainSettings:
    """The settings with some changed, by their paths: {"actor.optimizer.lr": 1e-6}; unchecked."""
    of_parts = {path for path, _, _ in parts(settings)}
    named = {f"{path}.name" if path in of_parts else path: value for path, value in changes.items()}
    try:
        values = _changed(settings, named)
    except ValueError as error:
        raise SettingsError([str(error)]) from error
    return from_dict(values)


def to_dict(settings: Any) -> dict[str, Any]:
    """The settings as nested plain values; None stays None."""
    values = {name_of(f): getattr(settings, f.name) for f in fields_of(type(settings))}
    if table_of(type(settings)) is not None:
        values |= settings.keywords
    return {
        name: to_dict(value) if attrs.has(type(value)) else list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
    }


def to_toml(settings: TrainSettings) -> str:
    """The settings as a TOML file that gives them back; optional settings that are None are left out."""
    return "\n".join(_toml_lines(to_dict(settings), "")).lstrip("\n") + "\n"


def save(settings: TrainSettings, path: str | os.PathLike[str]) -> None:
    """Writes the settings as TOML; `load` reads them back equal."""
    Path(path).write_text(to_toml(settings), encoding="utf-8")


def relocated(settings: TrainSettings, directory: str | os.PathLike[str]) -> TrainSettings:
    """The settings of a run whose output_dir is `directory` now: what they name inside of it is there too."""
    return replace(settings, _moves(flat(to_dict(settings)), directory))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as values by their paths: {"actor.optimizer.lr": 1e-6}."""
    by_path: dict[str, Any] = {}
    for name, value in values.items():
        by_path |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return by_path


def changes(old: Mapping[str, Any], new: TrainSettings) -> dict[str, tuple[Any, Any]]:
    """Old and new value, by their paths, of what differs between a run's tables in TOML and its settings now.

    Where the run stands, and `resume`, which says how one start of it was asked for, are none of its settings.
    """
    before, now = flat(old), flat(to_dict(new))
    for values in (before, now):
        values |= _moves(values, new.output_dir) | {"resume": None}
    names = [*now, *(name for name in before if name not in now)]
    return {name: (before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)}


def _moves(values: Mapping[str, Any], directory: str | os.PathLike[str]) -> dict[str, Any]:
    """What changes in the values, by their paths, of a run that stands in `directory` now."""
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


def paths(cls: type = TrainSettings, prefix: str = "") -> dict[str, Any]:
    """The type of every setting by its path, without sections and the keywords of parts."""
    kinds: dict[str, Any] = {}
    for name, kind in kinds_of(cls).items():
        kinds |= paths(kind, f"{prefix}{name}.") if attrs.has(kind) else {f"{prefix}{name}": kind}
    return kinds


def micro_batching(section: ActorSettings | CriticSettings) -> tuple[int | None, int | None]:
    """(sequences, tokens) per forward and backward pass; one of them is None."""
    if section.micro_batch_size:
        return section.micro_batch_size, None
    return None, DEFAULT_TOKEN_BUDGET if section.token_budget is None else section.token_budget


def mini_batch_size(section: ActorSettings | CriticSettings, batch_size: int) -> int:
    """Sequences per optimizer update."""
    return batch_size if section.mini_batch_size is None else section.mini_batch_size


def _remember_modules(settings: TrainSettings, path: str | os.PathLike[str] | None) -> TrainSettings:
    """The settings with where their own functions are sought, if they name any and do not say it.

    That is beside the file at `path` and in the working directory as they are now, so that a run which goes on from its
    output_dir finds what it began with.
    """
    if settings.module_dirs or not own_functions(settings):
        return settings
    places = [Path.cwd()] if path is None else [Path(os.path.realpath(path)).parent, Path.cwd()]
    return attrs.evolve(settings, module_dirs=tuple(dict.fromkeys(map(str, places))))


# reading: our own walk over sections, so that one bad value hides no other


def _structure(cls: type, values: Mapping[str, Any], prefix: str) -> tuple[Any, list[str]]:
    """An instance of the section `cls`, with defaults in place of what is wrong, and the problems."""
    fields = kinds_of(cls)
    others = {name: value for name, value in values.items() if name not in fields}
    is_part = table_of(cls) is not None
    problems = [] if is_part else [_unknown(name, value, list(fields), prefix) for name, value in others.items()]
    kept: dict[str, Any] = {"keywords": others} if is_part else {}
    for name, kind in fields.items():
        if name not in values:
            continue
        path, value = f"{prefix}{name}", values[name]
        if attrs.has(kind) and table_of(kind) is not None and isinstance(value, str):
            value = {"name": value}
        if not attrs.has(kind):
            try:
                kept[name] = converter().structure(_listed(value, kind), kind)
            except Exception:  # cattrs raises a type of its own for each kind of mistake
                problems.append(f"{path} = {value!r}: must be {described(kind)}{_nearest_choice(value, kind)}")
        elif isinstance(value, Mapping):
            default = next(f for f in attrs.fields(cls) if f.name == name).default.factory()  # type: ignore[union-attr]
            section, wrong = _structure(kind, value, f"{path}.")
            changes = {f.name: getattr(section, f.name) for f in attrs.fields(kind) if name_of(f) in value}
            changes |= {"keywords": section.keywords} if table_of(kind) is not None else {}
            kept[name] = attrs.evolve(default, **changes)
            problems += wrong
        else:
            problems.append(f"{path} = {value!r}: is a section; write [{path}] with its settings below")
    return cls(**{f.name: kept[name_of(f)] for f in attrs.fields(cls) if name_of(f) in kept}), problems


def _listed(value: Any, kind: Any) -> Any:
    """One value stands for a list of it."""
    return [value] if flags.is_list(kind) and value is not None and not isinstance(value, list | tuple) else value


def _unknown(name: str, value: Any, siblings: Sequence[str], prefix: str) -> str:
    everywhere = list(paths())
    if (renamed := RENAMED.get(f"{prefix}{name}")) is not None:
        return f"{prefix}{name} = {value!r}: it is called {renamed} now"
    if near := nearest(name, siblings, cutoff=0.5):
        hint = f"did you mean {prefix}{near}?"
    elif same := [p for p in everywhere if p.rsplit(".", 1)[-1] == name]:
        same.sort(key=lambda p: p.split(".")[0] != prefix.split(".")[0])
        hint = f"did you mean {' or '.join(same[:3])}?"
    elif far := nearest(name, [p.rsplit(".", 1)[-1] for p in everywhere]):
        hint = f"did you mean {' or '.join(p for p in everywhere if p.rsplit('.', 1)[-1] == far)}?"
    else:
        hint = f"there are {', '.join(siblings)}"
    shown = f"[{prefix}{name}]" if isinstance(value, Mapping) else f"{prefix}{name} = {value!r}"
    return f"{shown}: there is no such setting; {hint}"


def _nearest_choice(value: Any, kind: Any) -> str:
    arguments = get_args(get_args(kind)[0]) if get_origin(kind) is tuple else get_args(kind)
    wrong = next((v for v in value if v not in arguments), "") if isinstance(value, list) else value
    near = nearest(str(wrong), [a for a in arguments if isinstance(a, str)])
    return f"; did you mean {near}?" if near else ""


def _toml_lines(table: Mapping[str, Any], prefix: str) -> list[str]:
    plain = paths()  # tables of names that are not ours are among these

    def is_section(name: str, value: Any) -> bool:
        return isinstance(value, Mapping) and f"{prefix}{name}" not in plain

    lines = [f"{_key(name)} = {_toml(v)}" for name, v in table.items() if not is_section(name, v) and v is not None]
    for name, value in table.items():
        if is_section(name, value):
            inside = _toml_lines(value, f"{prefix}{name}.")
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
