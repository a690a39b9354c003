"""Modules beside stand-ins for what they import."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest


def imported_anew(patch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """A module as it is imported now; what was there before, if anything, comes back with the end of the patch."""
    parent, _, own = name.rpartition(".")
    patch.setitem(sys.modules, name, None)
    del sys.modules[name]
    patch.setattr(importlib.import_module(parent), own, None, raising=False)  # the import sets it
    return importlib.import_module(name)
