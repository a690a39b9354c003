"""Every setting and option as users know it, in `known.txt`: its default, what it may be, its bounds; and every name.

Runs, files and guides of others build on these lines, so a change of one is seen here, and made there on purpose:
`python -m tests.settings.test_known` writes them anew.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from fppo.commands import options
from fppo.fields import fields_of, kinds_of, name_of
from fppo.settings import tables
from fppo.settings.ablate import AblateSettings
from fppo.settings.bias import BiasSettings
from fppo.settings.check import CheckSettings
from fppo.settings.compare import CompareSettings
from fppo.settings.placement import Pool, RoleSettings
from fppo.settings.plan import PlanSettings
from fppo.settings.train import TrainSettings

KNOWN = Path(__file__).parent / "known.txt"
SECTIONS = {"run": TrainSettings, "plan": PlanSettings, "compare": CompareSettings, "ablate": AblateSettings}
SECTIONS |= {"bias": BiasSettings, "check": CheckSettings, "role": RoleSettings, "pool": Pool}
TABLES = ("POLICY_LOSSES", "ESTIMATORS", "VALUE_HEADS", "OPTIMIZERS", "CORRECTIONS", "CURRICULA", "ENVIRONMENTS")
PROBES: tuple[Any, ...] = (
    -math.inf,
    -7,
    -0.5,
    0,
    0.5,
    1,
    7,
    1e30,
    math.inf,
    math.nan,
    "",
    "x",
    "$X/x",
    (),
    ("x",),
    (-1,),
    ("",),
)


def texts_of(field: attrs.Attribute) -> list[str]:
    """What the checks of a field say of values that do not do; nearly all say of numbers that they be finite."""
    texts = set()
    for check in field.metadata.get("checks", ()):
        for probe in PROBES:
            try:
                texts.add(check(probe))
            except (TypeError, AttributeError):  # no value of this field's type
                continue
    return sorted(filter(None, texts - {"must be finite"}))


def kind_of(kind: Any) -> str:
    """A type's name, written alike by every version of Python."""
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(kind_of, arguments))
    name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    return (
        f"{name}[{', '.join(map(kind_of, arguments))}]" if arguments and isinstance(kind, type | GenericAlias) else name
    )


def lines_of(cls: type, prefix: str) -> Iterator[str]:
    usual, kinds = cls(), kinds_of(cls)
    for field in fields_of(cls):
        name, value = name_of(field), getattr(usual, field.name)
        if attrs.has(type(value)):
            yield from lines_of(type(value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {value!r}: {'; '.join([kind_of(kinds[name]), *texts_of(field)])}"


def options_of() -> Iterator[str]:
    for name, cls in inspect.getmembers(options, attrs.has):
        for field in attrs.fields(cls) if cls.__module__ == options.__name__ else ():
            default = "" if field.default is attrs.NOTHING else f" = {field.default!r}"
            yield f"{name}.{field.name}{default}: {cls.__annotations__[field.name]}"  # as written, resolved or not


def known() -> list[str]:
    lines = [line for name, cls in SECTIONS.items() for line in lines_of(cls, f"{name} ")]
    lines += [f"{table} {name}: {', '.join(at)}" for table in TABLES for name, at in getattr(tables, table).items()]
    return [*lines, *options_of()]


def test_every_setting_is_as_users_know_it():
    assert known() == KNOWN.read_text().splitlines()


if __name__ == "__main__":
    KNOWN.write_text("\n".join([*known(), ""]))
