"""Import the names of a package at first use."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def lazily(package: str, file: str) -> Callable[[str], Any]:
    """Make a package's `__getattr__`, which imports at first use what `file` imports under TYPE_CHECKING.

    So the imports under TYPE_CHECKING alone say where each name is defined. Python does not call `__getattr__` for
    names that `file` imports at once.
    """

    @cache
    def homes() -> dict[str, str]:
        nodes = ast.walk(ast.parse(Path(file).read_text("utf-8")))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module for node in imports if node.module for alias in node.names}

    def getattribute(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes()[name]), name)

    return getattribute
