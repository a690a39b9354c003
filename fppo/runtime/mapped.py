"""Tensors in files that are mapped into memory: the system keeps what it has room for, and the disk the rest.

The files have no names, so that none stays behind, however a process ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fppo import tree

T = TypeVar("T")


def to_files(values: T, directory: Path, *, setting: str) -> T:
    """Move the tensors of a tree on the host into files of a directory, each into one; numbers (0-d) stay as they are.

    Raises ValueError that names the `setting` of the directory if it cannot be written, or has too little room.
    """
    needed = sum(x.nbytes for x in tree.tensors(values) if x.dim())
    try:
        return tree.map(lambda x: _empty_like(x, directory).copy_(x) if x.dim() else x, values)
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
    return None if name is None else _empty_like(x, Path(name).parent)


def _empty_like(x: Tensor, directory: Path) -> Tensor:
    """Zeros of the shape, strides and dtype of a tensor in a new file, whose bytes are reserved."""
    size = max(x.nbytes, 1)
    file, name = tempfile.mkstemp(prefix=".fppo-", dir=directory.absolute())
    try:
        os.posix_fallocate(file, 0, size)  # or a disk that is full later would end the process by a signal
        storage = torch.UntypedStorage.from_file(name, shared=True, nbytes=size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(directory)) from error
    finally:
        os.close(file)
        os.unlink(name)
    return torch.empty(0, dtype=x.dtype).set_(storage, 0, x.shape, torch.empty_like(x, device="meta").stride())
