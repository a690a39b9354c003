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
import struct
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch

_ALIGNED = 64
_HEAD = struct.Struct("<BQQ")  # of a parcel: how many files come with it, and the bytes of its message and of the rest
MOST = 250  # pieces of memory that go with a message: Linux hands over 253 files at once


class Memory:
    """A file in memory, which is closed with this."""

    def __init__(self, file: int) -> None:
        self.file = file
        weakref.finalize(self, os.close, file)


class ArrayPlace(NamedTuple):
    """Where the bytes of an array are."""

    memory: Memory
    start: int
    size: int


@attrs.frozen
class Parcel:
    """A message, pickled, and its arrays: where they are, or themselves."""

    data: bytes
    arrays: Sequence[ArrayPlace] | Sequence[np.ndarray]


def put(arrays: Sequence[np.ndarray]) -> list[ArrayPlace] | None:
    """Copies arrays of bytes to memory of their own; None where there is none to be had."""
    if not arrays:
        return []
    try:
        memory = Memory(os.memfd_create("fppo-fleet", os.MFD_CLOEXEC))
    except (AttributeError, OSError):  # a system without it, or that has no file left
        return None
    places: list[ArrayPlace] = []
    start = 0
    for array in arrays:
        places.append(ArrayPlace(memory, start, array.nbytes))
        rest = array.data
        try:
            while rest:
                rest = rest[os.pwrite(memory.file, rest, start + array.nbytes - len(rest)) :]
        except OSError:
            return None
        start += -(-array.nbytes // _ALIGNED) * _ALIGNED
    return places


class PipeLane:
    """One end of a pipe (`multiprocessing.Pipe`), which this takes over, that carries parcels."""

    def __init__(self, line: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(line.fileno()))
        line.close()

    def close(self) -> None:
        """Gives the end back."""
        self._socket.close()

    def send(self, parcel: Parcel) -> None:
        """Sends it. Raises OSError if the other end is gone."""
        places = [x for x in parcel.arrays if isinstance(x, ArrayPlace)]
        memories = list(dict.fromkeys(place.memory for place in places))
        where = [(memories.index(place.memory), place.start, place.size) for place in places]
        if memories and self._sent(parcel.data, where, [memory.file for memory in memories]):
            return
        arrays = [_read(x.memory.file, x.start, x.size) if isinstance(x, ArrayPlace) else x for x in parcel.arrays]
        self._sent(parcel.data, arrays, [])

    def receive(self) -> tuple[Any, list[np.ndarray]]:
        """The next message and its arrays. Raises EOFError or OSError if the other end is gone."""
        head, files, _, _ = socket.recv_fds(self._socket, _HEAD.size, MOST, socket.MSG_CMSG_CLOEXEC)
        try:
            if not head:
                raise EOFError
            count, data, beside = _HEAD.unpack(head + self._bytes(_HEAD.size - len(head)))
            message, beside = pickle.loads(self._bytes(data)), pickle.loads(self._bytes(beside)) if beside else []
            if len(files) < count:
                raise OSError(errno.EMFILE, "there was no file left for memory that was sent")
            if not files:
                return message, beside
            ends = [0] * count
            for number, start, size in beside:
                ends[number] = max(ends[number], start + size)
            mapped = [_mapped(file, end) for file, end in zip(files, ends, strict=True)]
            return message, [mapped[number][start : start + size] for number, start, size in beside]
        finally:
            for file in files:
                os.close(file)

    def _sent(self, data: bytes, beside: list[Any], files: list[int]) -> bool:
        """Whether it could be sent; not where more files are on their way than the system lets be."""
        pickled = pickle.dumps(beside, pickle.HIGHEST_PROTOCOL) if beside else b""
        whole = memoryview(b"".join((_HEAD.pack(len(files), len(data), len(pickled)), data, pickled)))
        begun = 0
        if files:
            try:
                begun = socket.send_fds(self._socket, [whole], files)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                return False
        self._socket.sendall(whole[begun:])
        return True

    def _bytes(self, size: int) -> bytearray:
        """The next bytes."""
        found = bytearray(size)
        rest = memoryview(found)
        while rest:
            count = self._socket.recv_into(rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return found


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
