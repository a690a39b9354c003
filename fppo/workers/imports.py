"""Import user functions named as "module:function"."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterable
from typing import Any

from fppo._errors import is_interrupt, nearest, of_exit, words_of


def search(directories: Iterable[str | os.PathLike[str]]) -> None:
    """Append these directories to Python's module search path; workers get the same path."""
    for directory in directories:
        place = os.path.abspath(directory)
        if place not in map(os.path.abspath, sys.path):
            sys.path.append(place)


def imported(name: str, kind: str, *, also: type | tuple[type, ...] = ()) -> Any:
    """Import a function named "module:function": a function, a callable instance, or an instance of `also`.

    The working directory is searched too, which the path of a console script lacks; see also `search`. Errors call the
    function `kind`. Raises ValueError if the import fails, and for another kind of object.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise ValueError(f"{kind} {name!r} is not of the form module:function")
    search([os.getcwd()])
    try:
        value: Any = importlib.import_module(module_name)
    except SystemExit as error:
        raise ValueError(f"{kind} {name!r}: the module {module_name!r} does not import: {of_exit(error)}") from error
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise ValueError(f"{kind} {name!r}: the module {module_name!r} does not import: {words_of(error)}") from error
    for attribute in path.split("."):
        if not hasattr(value, attribute):
            near = nearest(attribute, dir(value))
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(f"{kind} {name!r}: {module_name!r} has no {attribute!r}{hint}")
        value = getattr(value, attribute)
    if isinstance(value, also):
        return value
    if inspect.isclass(value) or not callable(value):
        what = "class" if inspect.isclass(value) else type(value).__name__
        advice = "name a function, or an instance that is called as one"
        raise ValueError(f"{kind} {name!r} is a {what}, not a function; {advice}")
    return value
