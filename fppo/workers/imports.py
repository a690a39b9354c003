"""Import user functions named as "module:function", and modules for what they register."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
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
    value: Any = _module(module_name, f"{kind} {name!r}")
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


def import_modules(names: Iterable[str], directories: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Import the modules that `model.import` names, as those that register classes of models with transformers.

    Every process that builds models of a run calls this first. From then on it searches `directories`, too. Raises
    ValueError that names a module whose import fails.
    """
    search(directories)
    for name in names:
        _module(name, f"model.import {name!r}")


def _module(name: str, words: str) -> types.ModuleType:
    """Import a module, also from the working directory. Errors begin with `words`."""
    search([os.getcwd()])
    try:
        return importlib.import_module(name)
    except SystemExit as error:
        raise ValueError(f"{words}: the module {name!r} does not import: {of_exit(error)}") from error
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise ValueError(f"{words}: the module {name!r} does not import: {words_of(error)}") from error
