"""The checker of annotations that conftest.py installs under jaxtyping's import hook."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import beartype

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
