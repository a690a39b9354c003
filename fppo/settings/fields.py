"""Fields of settings classes with the checks of their own values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs

MOST_TOKENS = 2**24  # of a row: more than any model has positions for
MOST_ROWS = 2**24  # of a batch, or responses to a prompt
MOST_WORKERS = 1024  # processes or threads that one setting starts on a machine
MOST_RANKS = 65536  # of a pool, or of an axis
MOST_SECONDS = 1e7  # that anything waits: four months
_FLOAT32 = (1.1754944e-38, 3.4028234e38)  # the least and the largest size of its normal numbers

Check = Callable[[Any], str | None]  # what is wrong with a value and what to do, or None


Table = dict[str, Any]  # names and values that are another library's: a table in a file, JSON on the command line


def setting(default: Any, *checks: Check, unbounded: bool = False, name: str | None = None) -> Any:
    """A field with the checks of its value; a `default` that is a class makes a section of it.

    A number must be finite, unless the field is `unbounded`: then inf turns a bound off. `name` is what files and the
    command line call a field whose name Python reserves.
    """
    if isinstance(default, type):
        return attrs.field(factory=default)
    metadata = {"checks": (*checks, number_problem if unbounded else _finite), "name": name}
    return attrs.field(default=default, metadata=metadata)


def name_of(field: attrs.Attribute) -> str:
    """What files and the command line call a setting."""
    return field.metadata.get("name") or field.name


def fields_of(cls: type) -> list[attrs.Attribute]:
    """The fields of a section, without the one that holds the keywords of a part (`component`)."""
    return [field for field in attrs.fields(cls) if not field.metadata.get("keywords")]


def kinds_of(cls: type) -> dict[str, Any]:
    """The types of a section's settings and sections, by what files call them."""
    return {name_of(field): field.type for field in fields_of(attrs.resolve_types(cls, include_extras=False))}


def wrong_values(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """The path, the value and what is wrong with it, of what fails a check of its field, through all sections."""
    for field in fields_of(type(section)):
        value, path = getattr(section, field.name), f"{prefix}{name_of(field)}"
        if attrs.has(type(value)):
            yield from wrong_values(value, f"{path}.")
            continue
        wrong = [check(value) for check in field.metadata.get("checks", ())]
        yield from ((path, value, text) for text in wrong if text)


def at_least(low: float) -> Check:
    """The number is `low` or more."""
    return lambda x: None if x is None or x >= low else f"must be {low} or more"


def above(low: float) -> Check:
    """The number is greater than `low`."""
    return lambda x: None if x is None or x > low else f"must be greater than {low}"


def at_most(high: float) -> Check:
    """The number is `high` or less."""
    return lambda x: None if x is None or x <= high else f"must be {high} or less"


def below(high: float) -> Check:
    """The number is less than `high`."""
    return lambda x: None if x is None or x < high else f"must be less than {high}"


def temperature(value: float | None) -> str | None:
    """The number divides logits without an overflow."""
    return None if not value or 1e-6 <= value <= 1e6 else "must be from 1e-06 to 1e+06"


def nonempty(advice: str) -> Check:
    """The text or list is not empty."""
    return lambda x: None if x else f"is not set; {advice}"


def _numbers(value: Any) -> list[float]:
    return [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, float)]


def _finite(value: Any) -> str | None:
    return _in_range(value) if all(map(math.isfinite, _numbers(value))) else "must be finite"


def number_problem(value: Any) -> str | None:
    """What is wrong with a number, or numbers, that may be infinite; None if nothing is."""
    return "must be a number or inf" if any(map(math.isnan, _numbers(value))) else _in_range(value)


def _in_range(value: Any) -> str | None:
    """What is wrong with numbers that float32 and int64 do not hold, which what computes with them does."""
    values = value if isinstance(value, tuple) else (value,)
    whole = [x for x in values if isinstance(x, int) and not isinstance(x, bool)]
    if any(abs(x) >= 2**64 for x in whole):
        return "is larger than 64 bits hold"
    sizes = [abs(x) for x in _numbers(value) if x and math.isfinite(x)]
    low, high = _FLOAT32
    return None if all(low <= x <= high for x in sizes) else f"must be 0, or of a size from {low:g} to {high:g}"
