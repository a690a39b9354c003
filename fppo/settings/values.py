"""Values of settings, read from files and from words of a command line, without conversion between types."""

from __future__ import annotations

import functools
import json
import math
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import cattrs

from fppo._errors import json_of, nearest
from fppo.fields import Problem, kinds_of, name_of, table_of

_TRUTHS = {"true": True, "yes": True, "false": False, "no": False}
_CORRECTION = "algorithm.correction"
# settings that have become keywords of a part, by what they were called
RENAMED = {
    **{f"algorithm.{name}": f"algorithm.advantage.{name}" for name in ("gamma", "lam", "critic_lam", "lam_alpha")},
    **{f"algorithm.{name}": f"algorithm.advantage.{name}" for name in ("scale", "leave_one_out")},
    "algorithm.td_steps": "algorithm.advantage.steps",
    "algorithm.trace_cut": "algorithm.advantage.cut",
    f"{_CORRECTION}.mode": f'{_CORRECTION}.level, beside {_CORRECTION}.name = "rollout",',
    f"{_CORRECTION}.high": f"{_CORRECTION}.threshold",
    f"{_CORRECTION}.low": f"{_CORRECTION}.threshold, two numbers,",
    f"{_CORRECTION}.rejection": f"{_CORRECTION}.reject, as token_k1,seq_max_k3",
    f"{_CORRECTION}.rejection_high": f"{_CORRECTION}.reject_threshold",
    f"{_CORRECTION}.rejection_low": f'{_CORRECTION}.reject_threshold, as "0.5_2.0,1.0",',
    "log.samples_per_step": "log.samples",
    "reward.pattern": "reward.arguments.regular_expression.pattern",
    "critic.value_clip": "critic.loss.clip",
    "critic.huber_delta": "critic.loss.delta",
    "critic.bins": "critic.loss.bins",
    "critic.range": "critic.loss.low and critic.loss.high",
    "critic.sigma": "critic.loss.sigma",
    "actor.loss.select_ratio": "actor.loss.ratio",
    "actor.loss.cov_low": "actor.loss.low",
    "actor.loss.cov_high": "actor.loss.high",
    "actor.loss.cov_kl_coef": "actor.loss.kl_coef",
    **{
        f"{role}.optimizer.beta{i}": f"{role}.optimizer.betas, two numbers"
        for role in ("actor", "critic")
        for i in (1, 2)
    },
}


def read_section(
    cls: type, values: Mapping[str, Any], prefix: str = "", *, paths: Sequence[str] = ()
) -> tuple[Any, list[Problem]]:
    """Make an instance of the section `cls` from `values`, with defaults in place of wrong ones; returns it, and all
    problems. `prefix` is the section's path with a dot; `paths` are the paths of all settings, for hints."""
    fields = kinds_of(cls)
    others = {name: value for name, value in values.items() if name not in fields}
    is_part = table_of(cls) is not None
    problems = [] if is_part else [_unknown(name, value, list(fields), prefix, paths) for name, value in others.items()]
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
                problems.append(Problem(path, value, f"must be {described(kind)}{_nearest_choice(value, kind)}"))
        elif isinstance(value, Mapping):
            default = next(f for f in attrs.fields(cls) if f.name == name).default.factory()  # type: ignore[union-attr]
            section, wrong = read_section(kind, value, f"{path}.", paths=paths)
            changes = {f.name: getattr(section, f.name) for f in attrs.fields(kind) if name_of(f) in value}
            changes |= {"keywords": section.keywords} if table_of(kind) is not None else {}
            kept[name] = attrs.evolve(default, **changes)
            problems += wrong
        else:
            problems.append(Problem(path, value, f"is a section; write [{path}] with its settings below"))
    return cls(**{f.name: kept[name_of(f)] for f in attrs.fields(cls) if name_of(f) in kept}), problems


def _listed(value: Any, kind: Any) -> Any:
    """Put a single value into a list, if the setting holds a list."""
    return [value] if is_list(kind) and value is not None and not isinstance(value, list | tuple) else value


def _unknown(name: str, value: Any, siblings: Sequence[str], prefix: str, everywhere: Sequence[str]) -> Problem:
    if (renamed := RENAMED.get(f"{prefix}{name}")) is not None:
        return Problem(f"{prefix}{name}", value, f"it is called {renamed} now")
    if near := nearest(name, siblings, cutoff=0.5):
        hint = f"did you mean {prefix}{near}?"
    elif same := [p for p in everywhere if p.rsplit(".", 1)[-1] == name]:
        same.sort(key=lambda p: p.split(".")[0] != prefix.split(".")[0])
        hint = f"did you mean {' or '.join(same[:3])}?"
    elif far := nearest(name, [p.rsplit(".", 1)[-1] for p in everywhere]):
        hint = f"did you mean {' or '.join(p for p in everywhere if p.rsplit('.', 1)[-1] == far)}?"
    else:
        hint = f"there are {', '.join(siblings)}"
    text = f"there is no such setting; {hint}"
    if isinstance(value, Mapping):
        return Problem(f"[{prefix}{name}]", attrs.NOTHING, text)
    return Problem(f"{prefix}{name}", value, text)


def _nearest_choice(value: Any, kind: Any) -> str:
    arguments = get_args(get_args(kind)[0]) if get_origin(kind) is tuple else get_args(kind)
    wrong = next((v for v in value if v not in arguments), "") if isinstance(value, list) else value
    near = nearest(str(wrong), [a for a in arguments if isinstance(a, str)])
    return f"; did you mean {near}?" if near else ""


@functools.cache
def converter() -> cattrs.Converter:
    """A converter that takes values as they are: no text for a number, and no fraction for an integer."""
    own = cattrs.Converter()

    def exactly(*kinds: type) -> Callable[[Any, Any], Any]:
        def structure(value: Any, kind: Any) -> Any:
            if isinstance(value, bool) != (kind is bool) or not isinstance(value, kinds):
                raise TypeError
            return kind(value)

        return structure

    own.register_structure_hook(bool, exactly(bool))
    own.register_structure_hook(int, exactly(int))
    own.register_structure_hook(float, exactly(int, float))
    own.register_structure_hook(str, exactly(str))
    own.register_structure_hook_func(_is_choice_or, lambda value, kind: _chosen_or(own, value, kind))
    return own


def described(kind: Any) -> str:
    """A type of settings in words, as in "must be a number"."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        words = ", ".join(map(str, arguments))
        return f"one of {words}" if len(arguments) > 1 else words
    if origin is tuple:
        size = "" if Ellipsis in arguments else f" of {len(arguments)}"
        return f"a list{size}, each {described(arguments[0])}"
    if origin in (Union, types.UnionType):
        return " or ".join(described(a) for a in arguments if a is not types.NoneType)
    if origin is dict:
        return "a table, as {name = value}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


def _is_choice_or(kind: Any) -> bool:
    """Whether a type joins a choice of words with another type, such as Literal["auto"] | int, with or without None."""
    kinds = _without_none(kind)
    return len(kinds) == 2 and get_origin(kinds[0]) is Literal


def _without_none(kind: Any) -> list[Any]:
    return [each for each in _kinds(kind) if each is not types.NoneType]


def _chosen_or(converter: cattrs.Converter, value: Any, kind: Any) -> Any:
    words, other = _without_none(kind)
    if value is None and types.NoneType in get_args(kind):
        return None
    return converter.structure(value, words if value in get_args(words) else other)


def is_list(kind: Any) -> bool:
    """Whether a setting of this type holds a list."""
    return any(get_origin(each) is tuple for each in _kinds(kind))


def words_given(arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[Problem]]:
    """Collect the words after each flag, by the setting's path: `--data.path a b` gives {"data.path": ["a", "b"]}. Also
    returns the problems of words before any flag."""
    words: dict[str, list[str]] = {}
    problems: list[Problem] = []
    behind: list[str] | None = None
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            behind = words[name.replace("-", "_")] = [value] if equals else []
        elif behind is None:
            problems.append(Problem(word, attrs.NOTHING, "settings are given as --SECTION.SETTING VALUE"))
        else:
            behind.append(word)
    return words, problems


def switched(words: Mapping[str, list[str]], kinds: Mapping[str, Any]) -> dict[str, list[str]]:
    """Rewrite flags of bool settings: `--data.no-shuffle` as `--data.shuffle false`, and a flag without words as true.
    `kinds` has the type of every setting."""
    found: dict[str, list[str]] = {}
    for path, behind in words.items():
        section, dot, name = path.rpartition(".")
        whole = f"{section}{dot}{name.removeprefix('no_')}"
        off = name.startswith("no_") and path not in kinds and kinds.get(whole) is bool and not behind
        alone = kinds.get(path) is bool and not behind
        found[whole if off else path] = ["false"] if off else ["true"] if alone else behind
    return found


def value_of_words(words: Sequence[str], kind: Any) -> Any:
    """Parse words as the value of a setting of type `kind`; for Any as TOML, or else as text.

    Raises ValueError, whose text completes "SETTING WORDS: ", for a wrong number of words.
    """
    if kind is Any:
        values = [read(word) for word in words]
        return values[0] if len(values) == 1 else values or True
    if is_list(kind):
        each = next(get_args(k)[0] for k in _kinds(kind) if get_origin(k) is tuple)
        whole = read(words[0]) if len(words) == 1 else None
        if isinstance(whole, list) or (words in (["none"], ["None"]) and types.NoneType in _kinds(kind)):
            return whole if isinstance(whole, list) else None
        return [value_of_words([word], each) for word in words]
    if not words:
        raise ValueError("give a value")
    if len(words) > 1:
        raise ValueError(f"takes one value, and {len(words)} are given")
    return _one(words[0], kind)


def _one(word: str, kind: Any) -> Any:
    kinds = _kinds(kind)
    for each in kinds:
        if get_origin(each) is Literal and word in get_args(each):
            return word
    if types.NoneType in kinds and word in ("none", "None"):
        return None
    if bool in kinds and word.lower() in _TRUTHS:
        return _TRUTHS[word.lower()]
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
    """Parse a word as a TOML value, or as a number that TOML lacks, such as .5; else return the word itself."""
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
