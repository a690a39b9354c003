"""Settings from files and the command line: read, checked as a whole, changed, and written back.

`load` is what `fppo train FILE.toml --actor.optimizer.lr 1e-6` does first. Every problem is named at once.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from fppo._errors import check_depth, nearest
from fppo.settings import checks, texts
from fppo.settings.algorithm import CorrectionSettings
from fppo.settings.critic import CriticSettings
from fppo.settings.fields import name_of
from fppo.settings.modules import own_functions
from fppo.settings.train import ActorSettings, LossSettings, TrainSettings
from fppo.settings.values import converter

DEFAULT_TOKEN_BUDGET = 16384
SETTINGS, STARTS = "settings.toml", "starts"  # in a run's directory: its settings, and those of each of its starts
RESUMES = ("auto", "never", "must")  # what `resume` may be beside a checkpoint
TRUTHS = {"true": True, "yes": True, "false": False, "no": False}  # what may stand behind a flag of a bool
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
    prog: str = "fppo train FILE.toml",
    look: Callable[[TrainSettings, Sequence[str]], Sequence[str]] = lambda settings, problems: (),
    run: str | os.PathLike[str] | None = None,
) -> TrainSettings:
    """The settings of a TOML file (none: the defaults) with command-line `overrides`, checked.

    `look` says what is wrong with them beside the problems that are known, as with the files that they name.
    Those that a run has written are of the run in the directory `run` (none: the file's own directory, if a run has
    written it), wherever that was moved or copied to.
    Raises SettingsError with every problem of the file and of the result. Overrides that are no settings end the
    process with a message, as command lines do; so does `--help`.
    """
    values = {} if path is None else read_toml(path)
    settings, problems = _structure(TrainSettings, values, "")
    if run is not None:
        settings = attrs.evolve(relocated(settings, run), resume="auto")
    elif path is not None and (Path(path).parent / STARTS).is_dir():
        settings = relocated(settings, Path(path).parent)
    settings = _remember_modules(override(settings, overrides, prog=prog), path)
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


def override(settings: TrainSettings, arguments: Sequence[str], *, prog: str) -> TrainSettings:
    """The settings with command-line arguments like ["--actor.optimizer.lr", "1e-6"] applied, unchecked."""
    if not arguments:
        return settings
    import tyro  # here: its help and parser are for the command line alone

    given = tyro.cli(TrainSettings, default=settings, args=_switches(arguments), prog=prog)
    try:
        changes = texts.unescaped(flat(to_dict(settings)), flat(to_dict(given)))
    except ValueError as error:
        raise SettingsError([str(error)]) from error
    return replace(given, changes) if changes else given


def _switches(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--data.shuffle false` and `--data.shuffle=false` as the parser knows it, `--data.no-shuffle`;
    of a setting that may be other than both, with the word as Python writes it."""
    kinds, words = paths(), list(arguments)
    read: list[str] = []
    while words:
        flag, equals, value = words.pop(0).partition("=")
        kind = kinds.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
        behind = value if equals else words[0] if words else ""
        if (truth := TRUTHS.get(behind.lower())) is None or bool not in (kind, *get_args(kind)):
            read.append(f"{flag}{equals}{value}")
            continue
        section, dot, name = flag.removeprefix("--").rpartition(".")
        off = f"--{section}{dot}no-{name}"
        read += [flag, str(truth)] if kind is not bool else [flag if truth else off]
        words = words if equals else words[1:]
    return read


def replace(settings: TrainSettings, changes: Mapping[str, Any]) -> TrainSettings:
    """The settings with some changed, by their paths: {"actor.optimizer.lr": 1e-6}; unchecked."""
    values = to_dict(settings)
    for path, value in changes.items():
        *sections, name = path.split(".")
        table = values
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise SettingsError([f"{path}: {section} is a setting, not a section"])
        table[name] = value
    return from_dict(values)


def to_dict(settings: Any) -> dict[str, Any]:
    """The settings as nested plain values; None stays None."""
    values = {name_of(f): getattr(settings, f.name) for f in attrs.fields(type(settings))}
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
    """The type of every setting by its path, sections left out."""
    kinds: dict[str, Any] = {}
    attrs.resolve_types(cls, include_extras=False)
    for field in attrs.fields(cls):
        if attrs.has(field.type):
            kinds |= paths(field.type, f"{prefix}{field.name}.")
        else:
            kinds[f"{prefix}{name_of(field)}"] = field.type
    return kinds


def is_list(kind: Any) -> bool:
    """Whether a setting of this type holds a list."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return any(get_origin(each) is tuple for each in kinds)


def loss_scalars(loss: LossSettings) -> dict[str, float | None]:
    """The keywords that were given for the policy loss; the rest have the loss's own defaults."""
    return _keywords(loss, checks.LOSS_KEYWORDS.get(loss.name, {}))


def selection_scalars(loss: LossSettings) -> dict[str, float | None]:
    """The keywords that were given for the loss's selection of tokens over the mini-batch (clip_cov, kl_cov)."""
    return _keywords(loss, checks.SELECTION_KEYWORDS.get(loss.name, {}))


def _keywords(loss: LossSettings, names: Mapping[str, str]) -> dict[str, float | None]:
    values = {keyword: getattr(loss, name) for name, keyword in names.items() if getattr(loss, name) is not None}
    return {k: None if k == "dual_clip" and v == 0 else v for k, v in values.items()}


def correction_keywords(correction: CorrectionSettings) -> dict[str, Any] | None:
    """The keywords of `losses.rollout_correction`; None if nothing is to be corrected."""
    if correction.mode == "none" and not correction.rejection:
        return None
    lows = iter(correction.rejection_low)
    pairs = [
        f"{next(lows)}_{high}" if name.endswith("_k1") and correction.rejection_low else str(high)
        for name, high in zip(correction.rejection, correction.rejection_high, strict=True)
    ]
    return {
        "level": None if correction.mode == "none" else correction.mode,
        "threshold": correction.high if correction.low is None else (correction.low, correction.high),
        "batch_normalize": correction.batch_normalize,
        "reject": ",".join(correction.rejection) or None,
        "reject_threshold": ",".join(pairs) or None,
    }


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
    attrs.resolve_types(cls, include_extras=False)
    fields = {name_of(f): f.type for f in attrs.fields(cls)}
    problems = [_unknown(name, values[name], list(fields), prefix) for name in values if name not in fields]
    kept: dict[str, Any] = {}
    for name, kind in fields.items():
        if name not in values:
            continue
        path, value = f"{prefix}{name}", values[name]
        if not attrs.has(kind):
            try:
                kept[name] = converter().structure(_listed(value, kind), kind)
            except Exception:  # cattrs raises a type of its own for each kind of mistake
                problems.append(f"{path} = {value!r}: must be {_describe(kind)}{_nearest_choice(value, kind)}")
        elif isinstance(value, Mapping):
            default = next(f for f in attrs.fields(cls) if f.name == name).default.factory()  # type: ignore[union-attr]
            section, wrong = _structure(kind, value, f"{path}.")
            changes = {f.name: getattr(section, f.name) for f in attrs.fields(kind) if name_of(f) in value}
            kept[name] = attrs.evolve(default, **changes)
            problems += wrong
        else:
            problems.append(f"{path} = {value!r}: is a section; write [{path}] with its settings below")
    return cls(**{f.name: kept[name_of(f)] for f in attrs.fields(cls) if name_of(f) in kept}), problems


def _listed(value: Any, kind: Any) -> Any:
    """One value stands for a list of it."""
    return [value] if is_list(kind) and value is not None and not isinstance(value, list | tuple) else value


def _unknown(name: str, value: Any, siblings: Sequence[str], prefix: str) -> str:
    everywhere = list(paths())
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


def _describe(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        words = ", ".join(map(str, arguments))
        return f"one of {words}" if len(arguments) > 1 else words
    if origin is tuple:
        return f"a list, each {_describe(arguments[0])}"
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(a) for a in arguments if a is not types.NoneType)
    if origin is dict:
        return "a table, as {name = value}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


def _nearest_choice(value: Any, kind: Any) -> str:
    arguments = get_args(get_args(kind)[0]) if get_origin(kind) is tuple else get_args(kind)
    wrong = next((v for v in value if v not in arguments), "") if isinstance(value, list) else value
    near = nearest(str(wrong), [a for a in arguments if isinstance(a, str)])
    return f"; did you mean {near}?" if near else ""


def _toml_lines(table: Mapping[str, Any], prefix: str) -> list[str]:
    plain = paths()  # tables of names that are not ours are among these

    def is_section(name: str) -> bool:
        return f"{prefix}{name}" not in plain

    lines = [f"{name} = {_toml(v)}" for name, v in table.items() if not is_section(name) and v is not None]
    for name, value in table.items():
        if is_section(name):
            inside = _toml_lines(value, f"{prefix}{name}.")
            has_own = any(not is_section(f"{name}.{inner}") and v is not None for inner, v in value.items())
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
