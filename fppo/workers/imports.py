"""Functions of the user's, named as "module:function"."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from typing import Any


def imported(name: str, kind: str, *, also: type | tuple[type, ...] = ()) -> Any:
    """The function, or the instance that is called as one, of "module:function"; or an instance of `also`.

    The working directory is searched too. `kind` is what errors call it. Raises ValueError if it does not import, or is
    neither.
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
    if isinstance(found, also):
        return found
    if inspect.isclass(found) or not callable(found):
        what = "a class; name a function or an instance" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise ValueError(f"{kind} {name!r} is {what}, not a function")
    return found
