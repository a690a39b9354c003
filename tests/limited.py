"""Limits on the memory of tensors: an operation beyond them fails as on a device that has no more."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Limited(TorchDispatchMode):
    """Counts the bytes that are alive of what is made within the mode. Raises torch.OutOfMemoryError where there would
    be more than `limit`."""

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()
        self.limit, self.live, self.peak, self.failures = limit, 0, 0, 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, before = func(*args, **(kwargs or {})), self.live
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        if self.live > max(self.limit, before):
            self.failures += 1
            raise torch.OutOfMemoryError(f"{self.live} bytes are alive, the limit is {self.limit:.0f}")
        self.peak = max(self.peak, self.live)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place not in self._seen:
            self.live += size

            def freed(_: Any) -> None:
                self.live -= size
                del self._seen[place]

            self._seen[place] = weakref.ref(storage, freed)


class FailingAt(TorchDispatchMode):
    """Counts operations from the first look-up of embeddings on. Raises torch.OutOfMemoryError once, in place of the
    one with this number."""

    def __init__(self, number: int = -1) -> None:
        super().__init__()
        self.number, self.calls = number, 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.calls or func is torch.ops.aten.embedding.default:
            self.calls += 1
            if self.calls - 1 == self.number:
                raise torch.OutOfMemoryError(f"operation {self.number} has no memory")
        return func(*args, **(kwargs or {}))
