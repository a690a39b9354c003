"""Rewards by name, as settings give them."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fppo.rewards.builtin import MADE, _prepare_math_verify, builtins, length_penalty
from fppo.rewards.sample import Reward, RewardFn, WeightedSum, name_of, weighted_sum


def resolve(name: str, arguments: Mapping[str, Any] | None = None) -> Reward:
    """The reward of that name: a built-in one, or "module:function", where the working directory is searched too.

    `arguments` are those of a built-in reward that takes some. Raises ValueError for a name that does not stand for a
    function, saying why.
    """
    given = dict(arguments or {})
    if ":" in name:
        if given:
            raise ValueError(f"reward {name!r}: only built-in rewards take arguments, not {sorted(given)}")
        return imported(name)
    known = builtins()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no reward {name!r}; {hint}there are {sorted(known)} and module:function")
    if name == "math_verify":
        _prepare_math_verify()
    if name not in MADE:
        if given:
            raise ValueError(f"the reward {name!r} takes no arguments, not {sorted(given)}")
        return known[name]
    signature = inspect.signature(known[name])
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ValueError(f"the reward {name}{signature} was given {given}: {error}") from error
    return known[name](**given)


def imported(name: str, kind: str = "reward") -> Any:
    """The function, or the instance that is called as one, of "module:function"; a reward may be a sum of them.

    `kind` is what errors call it. Raises ValueError if it does not import, or is not one.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise ValueError(f"{kind} {name!r} is not of the form module:function")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # a console script's path lacks it; workers get the same path
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"{kind} {name!r}: the module {module_name!r} does not import: {type(error).__name__}: {error}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{kind} {name!r}: {module_name!r} has no {part!r}{hint}")
        found = getattr(found, part)
    if isinstance(found, WeightedSum) and kind == "reward":
        return found
    if inspect.isclass(found) or not callable(found):
        what = "a class; name a function or an instance" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise ValueError(f"{kind} {name!r} is {what}, not a function")
    return found


def combine(
    names: Sequence[str],
    weights: Sequence[float] = (),
    *,
    pattern: str | None = None,
    max_tokens: int | None = None,
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
    extra: Mapping[str, tuple[RewardFn, float]] | None = None,
) -> WeightedSum:
    """The weighted sum of rewards by name; no weights: 1 for each.

    `pattern` is regular_expression's. An `overlong_buffer` above 0 adds length_penalty(max_tokens, overlong_buffer,
    overlong_penalty). `extra` adds functions by name, as a reward model, each with its weight.
    """
    if weights and len(weights) != len(names):
        raise ValueError(f"{len(weights)} weights for {len(names)} rewards; give one for each, or none")
    functions: dict[str, Reward] = {}
    factors: dict[str, float] = {}
    for number, name in enumerate(names):
        arguments = {"pattern": pattern} if name == "regular_expression" and pattern is not None else None
        fn = resolve(name, arguments)
        label = name if isinstance(fn, WeightedSum) else name_of(fn)
        label = label.rpartition(":")[2]
        if label in functions:
            label = name
        if label in functions:
            raise ValueError(f"the reward {name!r} is given twice")
        functions[label] = fn
        factors[label] = weights[number] if weights else 1.0
    if overlong_buffer > 0:
        if max_tokens is None:
            raise ValueError("overlong_buffer needs max_tokens, the longest response")
        functions["length_penalty"] = length_penalty(max_tokens, overlong_buffer, overlong_penalty)
    for name, (fn, factor) in (extra or {}).items():
        if name in functions:
            raise ValueError(
                f"the reward {name!r} is given twice: the run's own {name} has this name too; rename yours"
            )
        functions[name], factors[name] = fn, factor
    return weighted_sum(functions, factors)
