"""Resolve rewards by name, as in settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from fppo._errors import nearest
from fppo.rewards.builtin import _prepare_math_verify, builtins, length_penalty
from fppo.rewards.functions import Reward, RewardFn, WeightedSum, weighted_sum
from fppo.workers.imports import imported
from fppo.workers.sample import name_of

GIVEN = "fppo.train"  # in place of a module, in the names of functions that this function was given


def resolve(
    name: str, keywords: Mapping[str, Any] | None = None, own: Mapping[str, Reward] = MappingProxyType({})
) -> Reward:
    """The reward of a name: one of this process's `own`, a built-in one, or "module:function", found in the working
    directory too.

    `keywords` are bound to it; a function of keywords alone is a factory of the reward. Raises ValueError for an
    unknown name, for a function that another program gave to `fppo.train`, and for unknown or missing keywords.
    """
    known, keywords = {**builtins(), **own}, dict(keywords or {})
    if name.partition(":")[0] == GIVEN and name not in own:
        advice = "call fppo.train there again, or move the function to a module and name it module:function"
        raise ValueError(f"the reward {name!r} is a function of the program that called fppo.train; {advice}")
    if ":" in name and name not in own:
        fn = imported(name, "reward", also=WeightedSum)
    elif name in known:
        fn = known[name]
    else:
        near = nearest(name, known)
        hint = f"did you mean {near!r}? " if near else ""
        raise ValueError(f"there is no reward {name!r}; {hint}there are {sorted(known)} and module:function")
    if name == "math_verify":
        _prepare_math_verify()
    if isinstance(fn, WeightedSum):
        if keywords:
            raise ValueError(f"the reward {name!r} is a sum, which takes no keywords, not {sorted(keywords)}")
        return fn
    signature = inspect.signature(fn)
    makes = all(x.kind is x.KEYWORD_ONLY for x in signature.parameters.values())
    if not (makes or keywords):
        return fn
    try:
        signature.bind(*([] if makes else [None]), **keywords)
    except TypeError as error:
        raise ValueError(f"the reward {name}{signature} was given {keywords}: {error}") from error
    return fn(**keywords) if makes else _bound(fn, keywords)


def _bound(fn: RewardFn, keywords: Mapping[str, Any]) -> RewardFn:
    """The function with keywords bound, and with its marks."""
    own = partial(fn, **keywords)
    for name in (name for name in dir(fn) if name.startswith("reward_")):
        setattr(own, name, getattr(fn, name))
    return own


def combine(
    names: Sequence[str],
    weights: Sequence[float] = (),
    *,
    arguments: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    max_tokens: int | None = None,
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
    extra: Mapping[str, tuple[RewardFn, float]] | None = None,
    own: Mapping[str, Reward] = MappingProxyType({}),
) -> WeightedSum:
    """The weighted sum of rewards by name; no weights: 1 for each.

    `arguments` are keywords of the functions, by their names. An `overlong_buffer` above 0 adds a `length_penalty` of
    that buffer with the weight `overlong_penalty`, a term of its own for estimators that read named scores. `extra`
    adds functions by name, such as a reward model, each with its weight; `own` has functions that are not imported by
    their names. Raises ValueError for duplicate names, and as `resolve` does.
    """
    if weights and len(weights) != len(names):
        raise ValueError(f"{len(weights)} weights for {len(names)} rewards; give one for each, or none")
    functions: dict[str, Reward] = {}
    factors: dict[str, float] = {}
    for number, name in enumerate(names):
        fn = resolve(name, arguments.get(name), own)
        label = name if isinstance(fn, WeightedSum) else name_of(fn)
        label = label.rpartition(":")[2]
        if label in functions:
            label = name
        if label in functions or name in names[:number]:
            raise ValueError(f"the reward {name!r} is given twice")
        functions[label] = fn
        factors[label] = weights[number] if weights else 1.0
    if overlong_buffer > 0:
        if max_tokens is None:
            raise ValueError("overlong_buffer needs max_tokens, the longest response")
        penalty = length_penalty(max_tokens=max_tokens, buffer=overlong_buffer)
        extra = {"length_penalty": (penalty, overlong_penalty), **(extra or {})}
    for name, (fn, factor) in (extra or {}).items():
        if name in functions:
            raise ValueError(
                f"the reward {name!r} is given twice: the run's own {name} has this name too; rename yours"
            )
        functions[name], factors[name] = fn, factor
    return weighted_sum(functions, factors)
