"""Tensors that were put where others read them, each once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fppo.fleet.codec import array_of

Ref = TypeVar("Ref")


class Sent(Generic[Ref]):
    """Where tensors are for others, by what `put` says of the bytes of those that are not there yet; None if it has no
    room for them.

    What is there stays as long as the tensor lives, and is put anew once torch has written into it. Writing that torch
    does not count, as numpy's into an array that shares its memory, it does not see: tensors that are sent are values.
    """

    def __init__(self, put: Callable[[Sequence[np.ndarray]], Sequence[Ref] | None]) -> None:
        self._put = put
        self._known: Any = WeakIdKeyDictionary()
        self._lock = threading.Lock()  # stages that run at once send the same tensors

    def refs(self, tensors: Sequence[Tensor]) -> list[Ref] | None:
        """Where each of the tensors is."""
        with self._lock:
            new = {id(x): x for x in tensors if self._known.get(x, (None,))[0] != x._version}
            made = self._put([array_of(x) for x in new.values()]) if new else ()
            if made is None:
                return None
            for x, ref in zip(new.values(), made, strict=True):
                self._known[x] = x._version, ref
            return [self._known[x][1] for x in tensors]
