"""Stand-ins of a module's functions, for tests of what is handed to them."""

from __future__ import annotations

import contextlib
from typing import Any


class Log:
    """Stand-ins of a module, which note how they are called and return their own names."""

    def __init__(self, monkeypatch: Any, module: Any) -> None:
        self.every: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.calls: dict[str, list[Any]] = {}
        self._patch, self._module = monkeypatch, module

    def stub(self, name: str, result: Any = None, *, enters: bool = False) -> None:
        """Put a stand-in where the module has `name`; one that `enters` returns a context."""

        def call(*args: Any, **named: Any) -> Any:
            self.every.append((name, args, named))
            self.calls.setdefault(name, []).append((args, named))
            made = f"<{name}>" if result is None else result
            return contextlib.nullcontext(made) if enters else made

        self._patch.setattr(self._module, name, call)

    def of(self, name: str) -> Any:
        """The only call of a stand-in."""
        (call,) = self.calls[name]
        return call
