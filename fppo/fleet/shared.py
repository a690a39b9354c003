"""Messages between processes of one machine whose large arrays stand in memory that both have: who sends them writes
them once, and all read them without a copy.

The memory is a file without a name (memfd_create). It is in no directory, no size of /dev/shm limits it, and it goes
when the last process that has it open or mapped is done or dies. It is filled by write(2), which says so where there is
no room, while a store through a mapping would be a bus error. Where none is to be had arrays go through the pipe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import socket
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch

_ALIGNED = 64
MOST = 250  # pieces of memory that go with a message: Linux hands over 253 files at once


class Memory:
    """A file in memory, which is closed with this."""

    def __init__(self, file: int) -> None:
        self.file = file
        weakref.finalize(self, os.close, file)


class Place(NamedTuple):
    """Where the bytes of an array are."""

    memory: Memory
    start: int
    size: int


@attrs.frozen
class Parcel:
    """A message, pickled, and its arrays: where they are, or themselves."""

    data: bytes
    arrays: Sequence[Place] | Sequence[np.ndarray]


def put(arrays: Sequence[np.ndarray]) -> list[Place] | None:
    """Copies arrays of bytes to memory of their own; None where there is none to be had."""
    if not arrays:
        return []
    try:
        memory = Memory(os.memfd_create("fppo-fleet", os.MFD_CLOEXEC))
    except (AttributeError, OSError):  # a system without it, or that has no file left
        return None
    places: list[Place] = []
    start = 0
    for array in arrays:
        places.append(Place(memory, start, array.nbytes))
        rest = array.data
        try:
            while rest:
                rest = rest[os.pwrite(memory.file, rest, start + array.nbytes - len(rest)) :]
        except OSError:
            return None
        start += -(-array.nbytes // _ALIGNED) * _ALIGNED
    return places


class Lane:
    """One end of a pipe (`multiprocessing.Pipe`) that carries parcels."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._socket = socket.socket(fileno=os.dup(line.fileno()))

    def send(self, parcel: Parcel) -> None:
        """Sends it. Raises OSError if the other end is gone."""
        places = [x for x in parcel.arrays if isinstance(x, Place)]
        memories = list(dict.fromkeys(place.memory for place in places))
        if not memories or not self._handed_over(memories):
            self._socket.sendall(b"\0")
            beside = [_read(x.memory.file, x.start, x.size) if isinstance(x, Place) else x for x in parcel.arrays]
        else:
            beside = [(memories.index(place.memory), place.start, place.size) for place in places]
        self._line.send_bytes(parcel.data)
        self._line.send_bytes(pickle.dumps(beside, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> tuple[Any, list[np.ndarray]]:
        """The next message and its arrays. Raises EOFError or OSError if the other end is gone."""
        count, files, _, _ = socket.recv_fds(self._socket, 1, MOST, socket.MSG_CMSG_CLOEXEC)
        if not count:
            raise EOFError
        try:
            message = pickle.loads(self._line.recv_bytes())
            beside = pickle.loads(self._line.recv_bytes())
            if len(files) < count[0]:
                raise OSError(errno.EMFILE, "there was no file left for memory that was sent")
            if not files:
                return message, beside
            ends = [0] * len(files)
            for number, start, size in beside:
                ends[number] = max(ends[number], start + size)
            bytes_of = [_mapped(file, end) for file, end in zip(files, ends, strict=True)]
            return message, [bytes_of[number][start : start + size] for number, start, size in beside]
        finally:
            for file in files:
                os.close(file)

    def _handed_over(self, memories: Sequence[Memory]) -> bool:
        """Whether the other end gets these, before the bytes that are sent next."""
        try:
            socket.send_fds(self._socket, [bytes([len(memories)])], [memory.file for memory in memories])
        except OSError:  # more are on their way than the system lets be, if the other end is not gone
            return False
        return True


def _mapped(file: int, size: int) -> np.ndarray:
    """The first bytes of a file in memory. What is written into them nobody else sees."""
    with contextlib.suppress(RuntimeError):  # torch keeps no file open for it, while Python's mmap does
        return torch.from_file(f"/proc/self/fd/{file}", shared=False, size=size, dtype=torch.uint8).numpy()
    return _read(file, 0, size)


def _read(file: int, start: int, size: int) -> np.ndarray:
    """A copy of bytes of a file."""
    array = np.empty(size, np.uint8)
    rest = array.data
    while rest:
        rest = rest[os.preadv(file, [rest], start + size - len(rest)) :]
    return array
