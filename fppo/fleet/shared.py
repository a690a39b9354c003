"""Memory that processes of one machine share, and messages whose large arrays stand in it.

The memory is a file without a name (memfd_create). It is in no directory, no size of /dev/shm limits it, and it is
freed when the last process that has it open or mapped closes it or dies. Arrays of a message are written once, and all
receivers read them without a copy; without such memory they go through the pipe. Weights, of which one piece follows
the other, are written into the same memory again and again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from torch import Tensor

CPU = torch.device("cpu")
_ALIGNED = 64
_HEAD = struct.Struct("<BQQ")  # of a parcel: how many files come with it, and the bytes of its message and of the rest
MOST = 250  # pieces of memory that go with a message: Linux hands over 253 files at once


class Memory:
    """A file in memory, closed with this object. It grows to the most that was put into it at once.

    Other processes get it by its descriptor, through a `PipeLane`, or open it at its `path` as long as this process
    lives. Memory that is filled once is filled by write(2), which raises if there is no room. Memory that is `reused`
    is mapped, which makes later copies some times faster; its room is reserved first, since a store without room would
    be a bus error. In a process on a GPU its pages are pinned.
    """

    def __init__(self, file: int | None = None, *, reused: bool = False) -> None:
        self.file = os.memfd_create("fppo-fleet", os.MFD_CLOEXEC) if file is None else file
        self.path = f"/proc/{os.getpid()}/fd/{self.file}"
        weakref.finalize(self, os.close, self.file)
        self._reused, self._pages = reused, torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] = lambda: None

    @staticmethod
    def at(path: str) -> Memory:
        """Attach the memory of another process, which reuses it."""
        return Memory(os.open(path, os.O_RDWR), reused=True)

    def put(self, parts: Sequence[np.ndarray | Tensor]) -> list[ArrayPlace]:
        """Copy arrays or tensors of bytes in, over what was put before. Raises OSError if there is no room."""
        ends = list(accumulate(-(-x.nbytes // _ALIGNED) * _ALIGNED for x in parts))
        places = [ArrayPlace(self, start, x.nbytes) for start, x in zip([0, *ends], parts, strict=False)]
        if self._reused:
            pages = self._mapped(max(ends, default=0))
            for x, (_, start, size) in zip(parts, places, strict=True):
                pages[start : start + size].copy_(torch.as_tensor(x), non_blocking=True)
            for device in {x.device for x in parts if isinstance(x, Tensor) and x.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
            return places
        for x, (_, start, _) in zip(parts, places, strict=True):
            rest = torch.as_tensor(x).numpy().data
            while rest:
                rest = rest[os.pwrite(self.file, rest, start + x.nbytes - len(rest)) :]
        return places

    def get(self, spans: Sequence[tuple[int, int]], device: torch.device = CPU) -> list[np.ndarray]:
        """The arrays of bytes with these starts and sizes: copies, or views to be copied to a `device` that is none of
        the host's, before the next `put`."""
        if device.type == "cpu":
            return [_read(self.file, start, size) for start, size in spans]
        pages = self._mapped(os.fstat(self.file).st_size).numpy()
        return [pages[start : start + size] for start, size in spans]

    def _mapped(self, size: int) -> Tensor:
        """Mapped pages of at least so many bytes, which have room."""
        if size > len(self._pages):
            self._unpin()
            os.posix_fallocate(self.file, 0, size)
            self._pages = torch.from_file(f"/proc/self/fd/{self.file}", shared=True, size=size, dtype=torch.uint8)
            if torch.cuda.is_initialized():
                cuda: Any = torch.cuda.cudart()
                torch.cuda.check_error(int(cuda.cudaHostRegister(self._pages.data_ptr(), size, 0)))
                self._unpin = weakref.finalize(self, cuda.cudaHostUnregister, self._pages.data_ptr())
        return self._pages


class ArrayPlace(NamedTuple):
    """The memory, first byte and number of bytes of an array."""

    memory: Memory
    start: int
    size: int


@attrs.frozen
class Parcel:
    """A pickled message, and its arrays or their places."""

    data: bytes
    arrays: Sequence[ArrayPlace] | Sequence[np.ndarray]


def put(arrays: Sequence[np.ndarray]) -> list[ArrayPlace] | None:
    """Copy arrays of bytes to new memory and return their places; None if none is available."""
    try:
        return Memory().put(arrays) if arrays else []
    except (AttributeError, OSError):  # a system without such files, or that has none left, or no room
        return None


class PipeLane:
    """One end of a pipe (`multiprocessing.Pipe`) that carries parcels. It takes the end over."""

    def __init__(self, line: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(line.fileno()))
        line.close()

    def close(self) -> None:
        """Close the end."""
        self._socket.close()

    def send(self, parcel: Parcel) -> None:
        """Send a parcel. Raises OSError if the other end is gone."""
        places = [x for x in parcel.arrays if isinstance(x, ArrayPlace)]
        memories = list(dict.fromkeys(place.memory for place in places))
        where = [(memories.index(place.memory), place.start, place.size) for place in places]
        if memories and self._sent(parcel.data, where, [memory.file for memory in memories]):
            return
        arrays = [x.memory.get([x[1:]])[0] if isinstance(x, ArrayPlace) else x for x in parcel.arrays]
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
        """Send one; False if more files are in flight than the system allows."""
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
    """Map the first bytes of a file in memory. Nobody else sees what is written into them."""
    with contextlib.suppress(RuntimeError):  # torch keeps no file open for it, while Python's mmap does
        return torch.from_file(f"/proc/self/fd/{file}", shared=False, size=size, dtype=torch.uint8).numpy()
    return _read(file, 0, size)


def _read(file: int, start: int, size: int) -> np.ndarray:
    """A copy of bytes of a file."""
    array = torch.empty(size, dtype=torch.uint8).numpy()  # which torch aligns
    rest = array.data
    while rest:
        rest = rest[os.preadv(file, [rest], start + size - len(rest)) :]
    return array
