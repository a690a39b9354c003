"""Tensors in files that are mapped into memory: the system keeps what it has room for, and the disk the rest.

The files have no names, so that none stays behind, however a process ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fppo import tree

T = TypeVar("T")
Reserve = Callable[[int, int, int], None]  # of a file's descriptor, an offset, and a number of bytes
SYSTEMS: Reserve | None = getattr(os, "posix_fallocate", None)  # macOS has none
_WRITTEN = 1 << 20  # bytes of zeros that are written at a time


def to_files(values: T, directory: Path, *, setting: str, reserve: Reserve | None = SYSTEMS) -> T:
    """Move the tensors of a tree on the host into files of a directory, each into one; numbers (0-d) stay as they are.

    `reserve` fills a file with zeros that have room on the disk; without one, as where the system has no such call,
    they are written (`write_zeros`). Raises ValueError that names the `setting` of the directory if it cannot be
    written, or has too little room.
    """
    needed = sum(x.nbytes for x in tree.tensors(values) if x.dim())
    try:
        return tree.map(lambda x: _empty_like(x, directory, reserve).copy_(x) if x.dim() else x, values)
    except OSError as error:
        room = f"{shutil.disk_usage(directory).free / 2**30:.3g}" if directory.is_dir() else "no"
        raise ValueError(
            f"{setting} = {str(directory)!r}: {error.strerror}: {needed / 2**30:.3g} GiB are for files there, beside "
            f"{room} GiB that are free; give a directory with room"
        ) from error


def empty_beside(x: Tensor) -> Tensor | None:
    """Memory for a copy of a tensor, in a file beside the tensor's own; None if the tensor is in no file. Raises
    OSError if the disk has no room."""
    name = x.untyped_storage().filename if x.device.type == "cpu" else None
    return None if name is None else _empty_like(x, Path(name).parent, SYSTEMS)


def _empty_like(x: Tensor, directory: Path, reserve: Reserve | None) -> Tensor:
    """Zeros of the shape, strides and dtype of a tensor in a new file, whose bytes are reserved."""
    count = max(x.numel(), 1)
    file, name = tempfile.mkstemp(prefix=".fppo-", dir=directory.absolute())
    try:
        # a disk that is full later would end the process
        (reserve or write_zeros)(file, 0, count * x.itemsize)
        flat = torch.from_file(name, shared=True, size=count, dtype=x.dtype)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(directory)) from error
    finally:
        os.close(file)
        os.unlink(name)
    strides = torch.empty_like(x, device="meta").stride()
    return torch.empty(0, dtype=x.dtype).set_(flat.untyped_storage(), 0, x.shape, strides)


def write_zeros(file: int, start: int, size: int) -> None:
    """Write `size` bytes of zeros into a file, from `start` on. Raises OSError if the disk has no room."""
    os.lseek(file, start, os.SEEK_SET)
    zeros = memoryview(bytes(min(size, _WRITTEN)))
    while size:
        size -= os.write(file, zeros[:size])
