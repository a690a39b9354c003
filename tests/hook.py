"""What conftest.py installs under jaxtyping's import hook: the checker of annotations, and how often it checks."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
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


_PLAIN = frozenset({int, float, bool, str, type(None), FunctionType, functools.partial})


def _kind(x: Any) -> object:
    """What annotations can tell of a value."""
    cls = type(x)
    if cls in _PLAIN:  # most values are, or are tensors
        return cls
    if cls is Tensor or isinstance(x, Tensor):
        return x.dtype, x.shape
    if isinstance(x, tuple | list):
        return cls, *[_kind(value) for value in x]
    return (dict, *x, *[_kind(value) for value in x.values()]) if isinstance(x, dict) else cls


def once(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """`jaxtyped` that checks a function once for arguments of the same types and shapes, and then calls it as it is:
    the checks of every call took half of the time of the laws.

    A function that another one makes at each of its calls counts as one function where what it holds is alike, and its
    checks are made when they are due: to make them takes milliseconds.
    """
    met: dict[CodeType, set[object]] = {}  # by functions that others make

    def decorator(*, typechecker: Any) -> Callable[[Any], Any]:
        def decorate(fn: Any) -> Any:
            made = functools.partial(jaxtyped(typechecker=typechecker), fn)
            if not inspect.isfunction(fn):
                return made()
            inner = "<locals>" in fn.__qualname__
            known = met.setdefault(fn.__code__, set()) if inner else set()
            checks = None if inner else made()

            @functools.wraps(fn)
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal checks
                if jaxtyping.config.jaxtyping_disable:
                    return fn(*args, **kwargs)
                kind = (*[_kind(x) for x in args], *kwargs, *[_kind(x) for x in kwargs.values()])
                kind = (_held(fn), kind) if inner else kind
                if kind in known:
                    return fn(*args, **kwargs)
                checks = checks or made()
                result = checks(*args, **kwargs)
                known.add(kind)
                return result

            return call

        return decorate

    return decorator


def _held(fn: FunctionType) -> object:
    """What annotations can tell of the variables of others that a function uses: its result may depend on them."""
    cells = fn.__closure__ or ()
    return tuple(x if isinstance(x, int | str | None) else _kind(x) for x in map(_content, cells))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None
