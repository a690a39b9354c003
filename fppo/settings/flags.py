"""Words of a command line as values of settings."""

from __future__ import annotations

import json
import math
import tomllib
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from fppo._errors import json_of

TRUTHS = {"true": True, "yes": True, "false": False, "no": False}
NONE = ("none", "None")


def is_list(kind: Any) -> bool:
    """Whether a setting of this type holds a list."""
    return any(get_origin(each) is tuple for each in _kinds(kind))


def given(arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The words behind each flag, by its path, and the problems: `--data.path a b` gives {"data.path": ["a", "b"]}."""
    words: dict[str, list[str]] = {}
    problems: list[str] = []
    behind: list[str] | None = None
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            behind = words[name.replace("-", "_")] = [value] if equals else []
        elif behind is None:
            problems.append(f"{word}: settings are given as --SECTION.SETTING VALUE")
        else:
            behind.append(word)
    return words, problems


def switched(words: Mapping[str, list[str]], kinds: Mapping[str, Any]) -> dict[str, list[str]]:
    """The words with `--data.no-shuffle` as `--data.shuffle false`, and a flag alone as true."""
    found: dict[str, list[str]] = {}
    for path, behind in words.items():
        section, dot, name = path.rpartition(".")
        whole = f"{section}{dot}{name.removeprefix('no_')}"
        off = name.startswith("no_") and path not in kinds and kinds.get(whole) is bool and not behind
        alone = kinds.get(path) is bool and not behind
        found[whole if off else path] = ["false"] if off else ["true"] if alone else behind
    return found


def value_of(words: Sequence[str], kind: Any) -> Any:
    """The value of a setting of this type that words stand for; Any: as TOML has it, else a text.

    Raises ValueError, whose text completes "SETTING WORDS: ", for a number of words that is none of the type's.
    """
    if kind is Any:
        values = [read(word) for word in words]
        return values[0] if len(values) == 1 else values or True
    if is_list(kind):
        each = next(get_args(k)[0] for k in _kinds(kind) if get_origin(k) is tuple)
        whole = read(words[0]) if len(words) == 1 else None
        if isinstance(whole, list) or (words in (["none"], ["None"]) and types.NoneType in _kinds(kind)):
            return whole if isinstance(whole, list) else None
        return [value_of([word], each) for word in words]
    if not words:
        raise ValueError("give a value")
    if len(words) > 1:
        raise ValueError(f"takes one value, and {len(words)} are given")
    return _one(words[0], kind)


def _one(word: str, kind: Any) -> Any:
    kinds = _kinds(kind)
    if types.NoneType in kinds and word in NONE:
        return None
    for each in kinds:
        if get_origin(each) is Literal and word in get_args(each):
            return word
    if bool in kinds and word.lower() in TRUTHS:
        return TRUTHS[word.lower()]
    if any((get_origin(each) or each) is dict for each in kinds):
        return _table(word)
    if str in kinds:
        return word
    value = read(word)
    return value if not isinstance(value, float) or float in kinds or not value.is_integer() else word


def _table(word: str) -> Any:
    try:
        return json_of(word)
    except json.JSONDecodeError:
        return read(word)


def read(word: str) -> Any:
    """A value as TOML has it, also a number such as 1e-6 or .5; else the text itself."""
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        pass
    try:
        number = float(word)
    except ValueError:
        return word
    return number if math.isfinite(number) or word.strip("+-").lower() in ("inf", "nan") else word


def _kinds(kind: Any) -> Sequence[Any]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
