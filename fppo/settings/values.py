"""Values of settings as files hold them, taken as they are."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

import cattrs


@functools.cache
def converter() -> cattrs.Converter:
    """Takes values as they are: no text for a number, no fraction for an integer, as plain conversion would."""
    own = cattrs.Converter()

    def exactly(*kinds: type) -> Callable[[Any, Any], Any]:
        def structure(value: Any, wanted: Any) -> Any:
            if isinstance(value, bool) != (wanted is bool) or not isinstance(value, kinds):
                raise TypeError
            return wanted(value)

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
        return f"a list, each {described(arguments[0])}"
    if origin in (Union, types.UnionType):
        return " or ".join(described(a) for a in arguments if a is not types.NoneType)
    if origin is dict:
        return "a table, as {name = value}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


def _is_choice_or(kind: Any) -> bool:
    """Whether it is a choice of words beside another type, as in Literal["auto"] | int, which may be None, too."""
    kinds = _kinds(kind) if get_origin(kind) in (Union, types.UnionType) else []
    return len(kinds) == 2 and get_origin(kinds[0]) is Literal


def _kinds(kind: Any) -> list[Any]:
    return [each for each in get_args(kind) if each is not types.NoneType]


def _chosen_or(converter: cattrs.Converter, value: Any, kind: Any) -> Any:
    words, other = _kinds(kind)
    if value is None and types.NoneType in get_args(kind):
        return None
    return converter.structure(value, words if value in get_args(words) else other)
