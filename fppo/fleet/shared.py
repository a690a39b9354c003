"""Memory that processes of one machine share, and messages whose large arrays are placed in it.

The memory is an anonymous file (memfd_create). The file is in no directory, the size of /dev/shm does not limit it, and
it is freed when the last process that has it open or mapped closes it or dies. Arrays of a message are written once,
and all receivers read them without a copy; without such memory they go through the pipe. Weights arrive in many pieces,
which are written into the same memory one after the other.
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

from fppo import devices

CPU = torch.device("cpu")
_ALIGNED = 64
_HEAD = struct.Struct("<BQQ")  # of a parcel: number of files, bytes of the message, bytes of the arrays
MOST = 250  # files that go with a message at most: Linux passes 253 at once


class Memory:
    """A file in memory, closed with this object. It grows to the largest total size of one `put`.

    Other processes get it by its descriptor, through a `PipeLane`, or open it at its `path` as long as this process
    lives. Memory that is filled once is filled by write(2), which raises if there is no room. Memory that is `reused`
    is mapped, which makes later copies several times faster; its room is reserved first, since a write without room
    would be a bus error. In a process on a GPU its pages are pinned.
    """

    def __init__(self, file: int | None = None, *, reused: bool = False) -> None:
        self.file = os.memfd_create("fppo-fleet", os.MFD_CLOEXEC) if file is None else file
        self.path = f"/proc/{os.getpid()}/fd/{self.file}"
        weakref.finalize(self, os.close, self.file)
        self._reused, self._pages = reused, torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] = lambda: None

    @staticmethod
    def at(path: str) -> Memory:
        """Open the memory of another process at this path, for repeated use."""
        return Memory(os.open(path, os.O_RDWR), reused=True)

    def put(self, parts: Sequence[np.ndarray | Tensor]) -> list[ArrayPlace]:
        """Copy arrays, or uint8 tensors, into the memory, over earlier contents. Raises OSError if there is no room."""
        ends = list(accumulate(-(-x.nbytes // _ALIGNED) * _ALIGNED for x in parts))
        places = [ArrayPlace(self, start, x.nbytes) for start, x in zip([0, *ends], parts, strict=False)]
        if self._reused:
            pages = self._mapped(max(ends, default=0))
            for x, (_, start, size) in zip(parts, places, strict=True):
                pages[start : start + size].copy_(torch.as_tensor(x), non_blocking=True)
            for device in {x.device for x in parts if isinstance(x, Tensor)}:
                devices.synchronize(device)
            return places
        for x, (_, start, _) in zip(parts, places, strict=True):
            rest = torch.as_tensor(x).numpy().data
            while rest:
                rest = rest[os.pwrite(self.file, rest, start + x.nbytes - len(rest)) :]
        return places

    def get(self, spans: Sequence[tuple[int, int]], device: torch.device = CPU) -> list[np.ndarray]:
        """The uint8 arrays [size] at these (start, size) spans. They are copies or, for a `device` other than the CPU,
        views, which must be copied to the device before the next `put`."""
        if device.type == "cpu":
            return [_read(self.file, start, size) for start, size in spans]
        pages = self._mapped(os.fstat(self.file).st_size).numpy()
        return [pages[start : start + size] for start, size in spans]

    def _mapped(self, size: int) -> Tensor:
        """Map pages of at least `size` bytes, with room reserved."""
        if size > len(self._pages):
            self._unpin()
            os.posix_fallocate(self.file, 0, size)
            self._pages = torch.from_file(f"/proc/self/fd/{self.file}", shared=True, size=size, dtype=torch.uint8)
            if (used := devices.in_use()) is not None and used.type == "cuda":
                cuda: Any = torch.cuda.cudart()
                torch.cuda.check_error(int(cuda.cudaHostRegister(self._pages.data_ptr(), size, 0)))
                self._unpin = weakref.finalize(self, cuda.cudaHostUnregister, self._pages.data_ptr())
        return self._pages


class ArrayPlace(NamedTuple):
    """An array's location: its memory, first byte and number of bytes."""

    memory: Memory
    start: int
    size: int


@attrs.frozen
class Parcel:
    """A pickled message, with its arrays or their locations."""

    data: bytes
    arrays: Sequence[ArrayPlace] | Sequence[np.ndarray]


def put(arrays: Sequence[np.ndarray]) -> list[ArrayPlace] | None:
    """Copy arrays of bytes to new shared memory and return their places; None if no memory is available."""
    try:
        return Memory().put(arrays) if arrays else []
    except (AttributeError, OSError):  # a system without memfd, without free descriptors, or without room
        return None


class PipeLane:
    """One end of a pipe (`multiprocessing.Pipe`) that carries parcels; it takes ownership of the connection."""

    def __init__(self, line: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(line.fileno()))
        line.close()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def send(self, parcel: Parcel) -> None:
        """Send a parcel. Raises OSError if the other end is closed."""
        places = [x for x in parcel.arrays if isinstance(x, ArrayPlace)]
        memories = list(dict.fromkeys(place.memory for place in places))
        where = [(memories.index(place.memory), place.start, place.size) for place in places]
        if memories and self._sent(parcel.data, where, [memory.file for memory in memories]):
            return
        arrays = [x.memory.get([x[1:]])[0] if isinstance(x, ArrayPlace) else x for x in parcel.arrays]
        self._sent(parcel.data, arrays, [])

    def receive(self) -> tuple[Any, list[np.ndarray]]:
        """Receive the next message and its arrays. Raises EOFError or OSError if the other end is closed."""
        head, files, _, _ = socket.recv_fds(self._socket, _HEAD.size, MOST, socket.MSG_CMSG_CLOEXEC)
        try:
            if not head:
                raise EOFError
            count, data, beside = _HEAD.unpack(head + self._bytes(_HEAD.size - len(head)))
            message, beside = pickle.loads(self._bytes(data)), pickle.loads(self._bytes(beside)) if beside else []
            if len(files) < count:
                raise OSError(errno.EMFILE, "no free descriptor for shared memory: raise the limit (ulimit -n)")
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

    def _sent(self, data: bytes, arrays: list[Any], files: list[int]) -> bool:
        """Send one parcel: the pickled message `data`, its `arrays` or their places, and the open `files` of shared
        memory. Returns False if more files are in flight than the system allows."""
        pickled = pickle.dumps(arrays, pickle.HIGHEST_PROTOCOL) if arrays else b""
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
        """Read the next `size` bytes."""
        found = bytearray(size)
        rest = memoryview(found)
        while rest:
            count = self._socket.recv_into(rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return found


def _mapped(file: int, size: int) -> np.ndarray:
    """Map the first `size` bytes of a file in memory, privately: no other process sees what is written to the array."""
    with contextlib.suppress(RuntimeError):  # torch's mapping keeps no descriptor open, unlike Python's mmap
        return torch.from_file(f"/proc/self/fd/{file}", shared=False, size=size, dtype=torch.uint8).numpy()
    return _read(file, 0, size)


def _read(file: int, start: int, size: int) -> np.ndarray:
    """Copy the `size` bytes of a file from byte `start` on."""
    array = torch.empty(size, dtype=torch.uint8).numpy()  # torch aligns the memory
    rest = array.data
    while rest:
        rest = rest[os.preadv(file, [rest], start + size - len(rest)) :]
    return array
