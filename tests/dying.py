"""A file system that dies in the middle of an operation, as an upload of a process that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from fppo.runtime.remote import Remote


class Dying(LocalFileSystem):
    """Local files until operation number `last`, counted from 0, which is done by half; it and all later ones raise.

    With `kills` that operation kills the process.
    """

    cachable = False

    def __init__(self, last: int, *, kills: bool = False) -> None:
        super().__init__()
        self.last, self.count, self.kills = last, 0, kills

    def _count(self, half: Callable[[], None] = lambda: None) -> None:
        if self.count >= self.last:
            if self.count == self.last:
                half()
                if self.kills:
                    os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            raise OSError("the network is gone")
        self.count += 1

    def ls(self, path: str, detail: bool = False, **how: Any) -> Any:
        self._count()
        return super().ls(path, detail=detail, **how)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **how: Any) -> Any:
        self._count()
        return super().cat_file(path, start, end, **how)

    def put_file(self, path1: str, path2: str, callback: Any = None, **how: Any) -> None:
        self._count(lambda: _half(path2, Path(path1).read_bytes()))
        super().put_file(path1, path2, callback, **how)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **how: Any) -> None:
        self._count(lambda: _half(path, value))
        super().pipe_file(path, value, mode, **how)

    def get_file(self, path1: str, path2: Any, callback: Any = None, **how: Any) -> None:
        self._count(lambda: _half(path2, Path(path1).read_bytes()))
        super().get_file(path1, path2, callback, **how)

    def rm_file(self, path: str) -> None:
        self._count()
        super().rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._count(lambda: _half_of_them(Path(path)))
        super().rm(path, recursive=recursive, maxdepth=maxdepth)


def _half(path: str, content: bytes) -> None:
    if Path(path).parent.exists():
        Path(path).write_bytes(content[: len(content) // 2])


def _half_of_them(directory: Path) -> None:
    files = sorted(directory.rglob("*")) if directory.is_dir() else []
    for file in files[::2]:
        if file.is_file():
            file.unlink()


def remote(directory: Path, last: int = 10**9, *, kills: bool = False) -> Remote:
    """The place in a directory, whose operation number `last` dies."""
    return Remote(f"dying://{directory}", Dying(last, kills=kills), str(directory), pauses=())
