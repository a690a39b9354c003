"""Fields of settings classes with checks of their values, and the wording of problems with settings."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs

MOST_TOKENS = 2**24  # of a row: more than any model has positions for
MOST_ROWS = 2**24  # of a batch, or responses to a prompt
MOST_WORKERS = 1024  # processes or threads that one setting starts on a machine
MOST_RANKS = 65536  # of a pool, or of an axis
MOST_SECONDS = 1e7  # that anything waits: four months
_FLOAT32 = (1.1754944e-38, 3.4028234e38)  # the least and the largest size of its normal numbers
FUNCTION = re.compile(r"[\w.]+:[\w.]+")
_ADDRESS = re.compile(r"(ray://)?[^\s:/]+:\d+")
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\}?|\([^)]*\)?)")  # a variable or a command, as shells write them

Check = Callable[[Any], str | None]  # what is wrong with a value and what to do, or None
Table = dict[str, Any]  # another library's settings by name: a table in a file, JSON on the command line


class Problem(NamedTuple):
    """A problem of one setting, and what to do: as text "section.setting = value: text"."""

    path: str
    value: Any  # NOTHING where no single value is wrong
    text: str

    def __str__(self) -> str:
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return f"{self.path}: {self.text}" if value is attrs.NOTHING else f"{self.path} = {value!r}: {self.text}"


Problems = Iterator[Problem]


class WrongSetting(ValueError):
    """An error for one problem, raised where work cannot go on to look for others."""

    def __init__(self, path: str, value: Any, text: str) -> None:
        self.problem = Problem(path, value, text)
        super().__init__(str(self.problem))


def problem_of(error: ValueError) -> Problem:
    """The problem of a WrongSetting, or that which another ValueError describes by its text "setting: text"."""
    path, _, text = str(error).partition(": ")
    return error.problem if isinstance(error, WrongSetting) else Problem(path, attrs.NOTHING, text)


def setting(default: Any, *checks: Check, unbounded: bool = False, name: str | None = None) -> Any:
    """A field with checks of its value. A class as `default` makes the field a section; NOTHING means no default.

    A number must be finite, unless the field is `unbounded`: then inf turns a bound off. `name` is the field's name in
    files and on the command line, where Python reserves that word.
    """
    if isinstance(default, type):
        return attrs.field(factory=default)
    metadata = {"checks": (*checks, number_problem if unbounded else _finite), "name": name}
    return attrs.field(default=default, metadata=metadata)


def kept(default: Any) -> Any:
    """A field that is not a setting: neither a file nor a flag can give it."""
    return attrs.field(default=default, metadata={"kept": True})


def name_of(field: attrs.Attribute) -> str:
    """Name of a setting in files and on the command line."""
    return field.metadata.get("name") or field.name


def fields_of(cls: type) -> list[attrs.Attribute]:
    """The settings of a section: its fields, except `kept` ones, and except the field that holds the keywords for a
    component's function (`settings.component`)."""
    return [field for field in attrs.fields(cls) if not {"keywords", "kept"} & field.metadata.keys()]


def table_of(cls: type) -> Mapping[str, tuple[str, ...]] | None:
    """The functions that a section's `name` chooses from: each name with its functions as "module:function"
    (`settings.component`). None for a section that chooses no function."""
    field = attrs.fields_dict(cls).get("name")
    return None if field is None else field.metadata.get("table")


@functools.cache
def kinds_of(cls: type) -> Mapping[str, Any]:
    """The types of a section's settings and sections, by their names in files."""
    fields = fields_of(attrs.resolve_types(cls, include_extras=False))
    return MappingProxyType({name_of(field): field.type for field in fields})


def only(section: Any, *names: str) -> dict[str, Any]:
    """Selected settings of a section, as keyword arguments of the same names."""
    return {name: getattr(section, name) for name in names}


def shared(section: Any, cls: type) -> dict[str, Any]:
    """The settings of a section that are fields of `cls` too, as keyword arguments of the same names."""
    return only(section, *(name for name in attrs.fields_dict(type(section)) if name in attrs.fields_dict(cls)))


def value_at(settings: Any, path: str) -> Any:
    """The value of a setting, or the section, at a path."""
    for name in filter(None, path.split(".")):
        settings = next(getattr(settings, x.name) for x in attrs.fields(type(settings)) if name_of(x) == name)
    return settings


def problem_at(settings: Any, path: str, text: str) -> Problem:
    """The problem that `text` describes with the value at a path."""
    return Problem(path, value_at(settings, path), text)


def hinder(settings: Any, known: Iterable[tuple[str, bool, str]]) -> list[tuple[str, Any, str]]:
    """The settings that hinder something, of those `known` as (path, whether it does, why): each as (path, value,
    why)."""
    return [(path, value_at(settings, path), why) for path, hinders, why in known if hinders]


def unread_problems(settings: Any, paths: Iterable[str], reader: str) -> Problems:
    """Yield a problem for each setting at or below these paths that is not at its default, though nothing reads it
    here. `reader` says in words what would read it."""
    for path in paths:
        section, _, name = path.rpartition(".")
        of = value_at(settings, section)
        field = next(x for x in attrs.fields(type(of)) if name_of(x) == name)
        value = getattr(of, field.name)
        if attrs.has(type(value)):
            yield from unread_problems(settings, (f"{path}.{name_of(x)}" for x in attrs.fields(type(value))), reader)
        elif value != getattr(type(of)(), field.name):
            yield Problem(path, value, f"nothing reads it here: it is for {reader}; leave it out")


def cluster_problems(settings: Any, path: str, words: tuple[str, ...]) -> Problems:
    """Yield a problem if the setting of a cluster is neither one of the `words` nor an address."""
    value = value_at(settings, path)
    if value not in words and not _ADDRESS.fullmatch(value):
        yield Problem(path, value, f"it is {', '.join(words)}, or the HOST:PORT of a Ray cluster that runs")


def wrong_values(section: Any, prefix: str = "") -> Problems:
    """Yield a problem for each value in a section, and in the sections inside it, that fails the check of its field.
    `prefix` precedes the paths."""
    for field in fields_of(type(section)):
        value, path = getattr(section, field.name), f"{prefix}{name_of(field)}"
        if attrs.has(type(value)):
            yield from wrong_values(value, f"{path}.")
            continue
        texts = [check(value) for check in field.metadata.get("checks", ())]
        yield from (Problem(path, value, text) for text in texts if text)


def flag_problems(options: Any) -> list[str]:
    """A line for each failed check of a command's own options. They are written as flags, or as positional arguments if
    they have no default."""
    lines, defaults = [], {name_of(field): field.default for field in attrs.fields(type(options))}
    for path, value, text in wrong_values(options):
        flag = path.upper() if defaults[path] is attrs.NOTHING else f"--{path.replace('_', '-')}"
        words = " ".join([flag, *map(repr, value if isinstance(value, tuple) else [value])])
        lines.append(f"{words}: {text}")
    return lines


def at_least(low: float) -> Check:
    """Make the check that a number is `low` or more."""
    return lambda x: None if x is None or x >= low else f"must be {low} or more"


def word_or(word: str, check: Check) -> Check:
    """Make the check that a setting is this word, or passes `check`."""
    return lambda x: None if x == word else check(x)


def none_or(check: Check) -> Check:
    """Make the check that a setting is None, or passes `check`."""
    return lambda x: None if x is None else check(x)


def above(low: float) -> Check:
    """Make the check that a number is greater than `low`."""
    return lambda x: None if x is None or x > low else f"must be greater than {low}"


def at_most(high: float) -> Check:
    """Make the check that a number is `high` or less."""
    return lambda x: None if x is None or x <= high else f"must be {high} or less"


def below(high: float) -> Check:
    """Make the check that a number is less than `high`."""
    return lambda x: None if x is None or x < high else f"must be less than {high}"


def temperature(value: float | None) -> str | None:
    """Check that logits can be divided by a number without an overflow; returns the problem, or None."""
    return None if not value or 1e-6 <= value <= 1e6 else "must be from 1e-06 to 1e+06"


def nonempty(advice: str) -> Check:
    """Make the check that a text or list is not empty; `advice` says how to set it."""
    return lambda x: None if x else f"is not set; {advice}"


def place(value: str | tuple[str, ...] | None) -> str | None:
    """Check that a path, or each of several, is written out, since only a shell replaces ~ and variables; returns the
    problem, or None. Fields with this check are the ones for paths (`place_settings`)."""
    names = () if value is None else value if isinstance(value, tuple) else (value,)
    return next((text for text in map(_not_written_out, names) if text is not None), None)


def _not_written_out(name: str) -> str | None:
    if name.startswith("~"):
        home = os.path.expanduser(name)
        return f"~ is not replaced here; give {home if home != name else f'./{name}'}"
    variable = _VARIABLE.search(name)
    if variable is None or os.path.lexists(name):
        return None
    return f"{variable[0]} is not replaced here; write out what it stands for"


def place_settings(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield "section.setting" of each setting that names a file or a directory, through all sections."""
    kinds = kinds_of(cls)
    for field in fields_of(cls):
        path = f"{prefix}{name_of(field)}"
        if attrs.has(kinds[name_of(field)]):
            yield from place_settings(kinds[name_of(field)], f"{path}.")
        elif place in field.metadata.get("checks", ()):
            yield path


def module_function(value: str | None) -> str | None:
    """Check that a text has the form module:function; returns the problem, or None."""
    return None if value is None or FUNCTION.fullmatch(value) else "must be module:function"


def output_file(value: str | None) -> str | None:
    """Check that a name is of a file that can be written, or "-", standard output; returns the problem, or None."""
    if value in (None, "-"):
        return None
    path = Path(value)
    there = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if path.is_dir():
        return "is a directory; give the name of a file"
    if there != path and not there.is_dir():
        return f"{there} is no directory"
    return None if os.access(there, os.W_OK) else f"{there} may not be written to"


def _numbers(value: Any) -> list[float]:
    return [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, float)]


def _finite(value: Any) -> str | None:
    return _in_range(value) if all(map(math.isfinite, _numbers(value))) else "must be finite"


def number_problem(value: Any) -> str | None:
    """The problem of a number, or numbers, that may be infinite; None if there is none."""
    return "must be a number or inf" if any(map(math.isnan, _numbers(value))) else _in_range(value)


def _in_range(value: Any) -> str | None:
    """The problem of numbers that do not fit float32 or 64 bits, as computations need; None if there is none."""
    values = value if isinstance(value, tuple) else (value,)
    whole = [x for x in values if isinstance(x, int) and not isinstance(x, bool)]
    if any(abs(x) >= 2**64 for x in whole):
        return "is larger than 64 bits hold"
    sizes = [abs(x) for x in _numbers(value) if x and math.isfinite(x)]
    low, high = _FLOAT32
    return None if all(low <= x <= high for x in sizes) else f"must be 0, or of a size from {low:g} to {high:g}"
