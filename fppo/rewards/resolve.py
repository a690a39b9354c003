"""Rewards by name, as settings give them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from fppo._errors import nearest
from fppo.rewards.builtin import FACTORIES, _prepare_math_verify, builtins, length_penalty
from fppo.rewards.functions import Reward, RewardFn, WeightedSum, weighted_sum
from fppo.workers.imports import imported
from fppo.workers.sample import name_of


def resolve(name: str, arguments: Mapping[str, Any] | None = None) -> Reward:
    """The reward of that name: a built-in one, or "module:function", where the working directory is searched too.

    `arguments` are those of a built-in reward that takes some. Raises ValueError for a name that does not stand for a
    function, saying why.
    """
    keywords = dict(arguments or {})
    if ":" in name:
        if keywords:
            raise ValueError(f"reward {name!r}: only built-in rewards take arguments, not {sorted(keywords)}")
        return imported(name, "reward", also=WeightedSum)
    known = builtins()
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near!r}? " if near else ""
        raise ValueError(f"there is no reward {name!r}; {hint}there are {sorted(known)} and module:function")
    if name == "math_verify":
        _prepare_math_verify()
    if name not in FACTORIES:
        if keywords:
            raise ValueError(f"the reward {name!r} takes no arguments, not {sorted(keywords)}")
        return known[name]
    signature = inspect.signature(known[name])
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise ValueError(f"the reward {name}{signature} was given {keywords}: {error}") from error
    return known[name](**keywords)


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

    `pattern` is regular_expression's. An `overlong_buffer` above 0 adds length_penalty(max_tokens, overlong_buffer)
    with the weight `overlong_penalty`, which estimators that look at each function by itself see as they see the
    others'. `extra` adds functions by name, as a reward model, each with its weight.
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
        extra = {"length_penalty": (length_penalty(max_tokens, overlong_buffer), overlong_penalty), **(extra or {})}
    for name, (fn, factor) in (extra or {}).items():
        if name in functions:
            raise ValueError(
                f"the reward {name!r} is given twice: the run's own {name} has this name too; rename yours"
            )
        functions[name], factors[name] = fn, factor
    return weighted_sum(functions, factors)
