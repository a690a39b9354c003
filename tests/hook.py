"""What conftest.py installs under jaxtyping's import hook: the checker of annotations, and how often it checks."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping
from torch import Tensor

CONFIGURATION = beartype.BeartypeConf(is_pep484_tower=True)  # an int is a float


def checked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype.beartype(fn)` without its draws: it picks an item of a list by Python's global generator.

    `fn` is a stand-in by jaxtyping, with the annotations of the function to check and no body.
    """
    check = beartype.beartype(conf=CONFIGURATION)(fn)
    if not any(default == random.getrandbits for default in (check.__kwdefaults__ or {}).values()):
        return check

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        state = random.getstate()
        try:
            return check(*args, **kwargs)
        finally:
            random.setstate(state)

    return call


def _kind(x: Any) -> object:
    """What annotations can tell of a value."""
    if isinstance(x, Tensor):
        return x.dtype, x.shape
    if isinstance(x, tuple | list):
        return type(x), *map(_kind, x)
    return (dict, *((name, _kind(value)) for name, value in x.items())) if isinstance(x, dict) else type(x)


def once(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """`jaxtyped` that checks a function once for arguments of the same types and shapes, and then calls it as it is:
    the checks of every call took half of the time of the laws."""

    def decorator(*, typechecker: Any) -> Callable[[Any], Any]:
        def decorate(fn: Any) -> Any:
            checks = jaxtyped(typechecker=typechecker)(fn)
            if not inspect.isfunction(fn):
                return checks
            known: set[object] = set()

            @functools.wraps(fn)
            def call(*args: Any, **kwargs: Any) -> Any:
                if jaxtyping.config.jaxtyping_disable:
                    return fn(*args, **kwargs)
                kind = _kind((args, kwargs))
                if kind in known:
                    return fn(*args, **kwargs)
                result = checks(*args, **kwargs)
                known.add(kind)
                return result

            return call

        return decorate

    return decorator
