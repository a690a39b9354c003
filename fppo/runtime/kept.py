"""Cached directories, each made from a file once on a machine, and then reused. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


def cache_directory(file: Path, kind: str, *made_by: str) -> Path:
    """The directory for the `kind` of things made from a file, below XDG_CACHE_HOME or ~/.cache.

    Its name has a digest of the file's path, size and time of change, and of `made_by`, the versions of the code that
    makes it. Raises OSError for a file that is not there.
    """
    stat = file.stat()
    own = [os.path.realpath(file), str(stat.st_size), str(stat.st_mtime_ns), *made_by]
    digest = hashlib.sha256("\0".join(own).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "fppo" / kind / f"{file.stem}-{digest}"


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """A context in which no other process uses `directory`, made if needed: others wait for it to end."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
