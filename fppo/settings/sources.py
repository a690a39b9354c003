"""Modules and the files of their source, found without importing anything."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def source_of(module: str) -> Path | None:
    """The file of a module's source; None if it has none, or is not found."""
    try:
        spec = spec_of(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None


def spec_of(module: str) -> ModuleSpec | None:
    """Where a module is, without importing the packages around it."""
    first, *rest = module.split(".")
    spec, name = importlib.util.find_spec(first), first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec
