"""What errors say of a name that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RunFailed(ValueError):
    """What ends a run that had begun and can come to nothing: a command that raises it has the exit status 1."""


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `names` that is most like `name`; None if none is so much like it as `cutoff`, from 0 to 1."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The hint "did you mean NEAREST? there are A, B"; the question only where a name is near."""
    choices = list(names)
    near = nearest(name, choices, cutoff)
    return f"{f'did you mean {near}? ' if near else ''}there are {', '.join(choices)}"
