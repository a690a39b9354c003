"""Trees on their way between processes, through the memory of their hosts: small tensors as one array of bytes, large
ones each by itself."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

BIG = 1 << 16  # bytes from which a tensor travels by itself
CPU = torch.device("cpu")
_ALIGNED = 64  # bytes: what torch's own memory is aligned to; kernels may round otherwise on other


@attrs.frozen
class _Slot:
    """Where the bytes of a tensor are: among the small ones from `start` on, or all of a large one (`start` is -1)."""

    place: int  # among the tensors of the tree, and of a large one among those
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@attrs.frozen
class Packed:
    """A tree whose tensors are slots; large ones are beside it."""

    tree: Any
    small: np.ndarray  # uint8


def pack(tree: Any, leaf: Callable[[Any], Any] = lambda x: x) -> tuple[Packed, list[Tensor]]:
    """The tree, and its large tensors as they are. `leaf` stands in for what is no tensor."""
    small: list[Tensor] = []
    large: list[Tensor] = []
    end = 0

    def slot(x: Any) -> Any:
        nonlocal end
        if not isinstance(x, Tensor):
            return leaf(x)
        if x.nbytes >= BIG:
            large.append(x)
            return _Slot(len(large) - 1, -1, tuple(x.shape), x.dtype)
        small.append(_bytes(x))
        end += x.nbytes
        return _Slot(len(small) - 1, end - x.nbytes, tuple(x.shape), x.dtype)

    slots = pytree.tree_map(slot, tree)
    return Packed(slots, torch.cat(_on_host(small)).numpy() if small else np.empty(0, np.uint8)), large


def unpack(
    packed: Packed,
    large: list[np.ndarray],
    leaf: Callable[[Any], Any] = lambda x: x,
    *,
    device: torch.device = CPU,
) -> Any:
    """The tree, on `device`. Its small tensors have memory of their own; large ones are on the host their arrays, which
    others may read too."""
    every = bytes_of(packed.small).to(device)

    def tensor(x: Any) -> Any:
        if not isinstance(x, _Slot):
            return leaf(x)
        if x.start < 0:
            return bytes_of(large[x.place]).to(device).view(x.dtype).view(x.shape)
        size = math.prod(x.shape) * x.dtype.itemsize
        return every[x.start : x.start + size].clone().view(x.dtype).view(x.shape)

    return pytree.tree_map(tensor, packed.tree)


def array_of(x: Tensor) -> np.ndarray:
    """The bytes of a tensor, in its own memory if that is contiguous and on the host."""
    return _bytes(x).cpu().numpy()


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of bytes, those of each device in one copy, for which that is waited once."""
    found = dict(enumerate(tensors))
    for device in {x.device for x in tensors} - {CPU}:
        there = [place for place, x in enumerate(tensors) if x.device == device]
        whole = torch.cat([tensors[place] for place in there]).cpu()
        found |= zip(there, whole.split([len(tensors[place]) for place in there]), strict=True)
    return list(found.values())


def bytes_of(array: np.ndarray) -> Tensor:
    """The array as a tensor uint8 [N], in its own memory if that is aligned; it may be one that must not be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of arrays that must not be written
        x = torch.from_numpy(array)
    return x if x.data_ptr() % _ALIGNED == 0 else x.clone()
