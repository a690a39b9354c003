"""Tensors in memory that processes of one machine share, or in one piece of bytes. Processes on a GPU pin it."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Place = tuple[str, torch.dtype, tuple[int, ...], int]  # a tensor's name, dtype, shape and first byte
CPU = torch.device("cpu")
_ALIGN = 64


def places_of(tensors: Mapping[str, Tensor]) -> tuple[list[Place], int]:
    """Where each of the tensors goes in one piece of bytes, and how long that is."""
    places, end = [], 0
    for name, x in tensors.items():
        places.append((name, x.dtype, tuple(x.shape), end))
        end += -(-x.nbytes // _ALIGN) * _ALIGN
    return places, end


def view(memory: Tensor, place: Place) -> Tensor:
    """The tensor at its place in bytes [N] uint8."""
    _, dtype, shape, start = place
    return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class SharedMemory:
    """A file in memory that several processes map; it grows to the most that was put in at once."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._close = weakref.finalize(self, os.close, file)
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] = lambda: None

    @staticmethod
    def make() -> SharedMemory:
        """A new one, which children inherit by its file's number, and others of this user open by its path."""
        return SharedMemory(os.memfd_create("fppo-weights"))

    @staticmethod
    def at(path: str) -> SharedMemory:
        """Attach the memory of another process."""
        return SharedMemory(os.open(path, os.O_RDWR))

    @property
    def path(self) -> str:
        """Where other processes find it, as long as this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    def put(self, tensors: Mapping[str, Tensor]) -> list[Place]:
        """Copies the tensors in; where each of them is."""
        places, end = places_of(tensors)
        if end > len(self._bytes):
            os.ftruncate(self.file, end)
            self._remap(end)
        for place in places:
            view(self._bytes, place).copy_(tensors[place[0]], non_blocking=True)
        _settle({x.device for x in tensors.values()})
        return places

    def get(self, places: list[Place], device: torch.device = CPU) -> dict[str, Tensor]:
        """Copies of the tensors on the device, for the memory holds others next."""
        size = os.fstat(self.file).st_size
        if size > len(self._bytes):
            self._remap(size)
        copies = {place[0]: view(self._bytes, place).to(device, copy=True, non_blocking=True) for place in places}
        _settle({device})
        return copies

    def close(self) -> None:
        """Gives the memory back."""
        if self.file >= 0:
            self._unmap()
            self._close()
            self.file = -1

    def _remap(self, size: int) -> None:
        self._unmap()
        self._map = mmap.mmap(self.file, size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        if torch.cuda.is_initialized():
            self._unpin = _pinned(self, self._bytes)

    def _unmap(self) -> None:
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a tensor of it is still alive: then it goes with that
                self._map.close()
            self._map = None


def _settle(devices: set[torch.device]) -> None:
    """Waits for the copies to these devices and from them."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _pinned(owner: object, memory: Tensor) -> Callable[[], object]:
    """Pins the memory for CUDA, whose copies are some times faster then; what undoes it, also if the owner is dropped
    first."""
    cuda: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(cuda.cudaHostRegister(memory.data_ptr(), len(memory), 0)))
    return weakref.finalize(owner, cuda.cudaHostUnregister, memory.data_ptr())
