"""Trees on their way between processes, through the memory of their hosts: small tensors as one array of bytes, large
ones each by itself."""

from __future__ import annotations

import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, groupby
from operator import attrgetter
from typing import Any, Generic, TypeVar

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fppo.fleet.held import Held, Lease
from fppo.fleet.outline import Outline, put_together, taken_apart

BIG = 1 << 16  # bytes from which a tensor travels by itself
CPU = torch.device("cpu")
_ALIGNED = 64  # bytes: what torch's own memory is aligned to; kernels may round otherwise on other
_PLAIN, _TENSOR, _HELD = range(3)  # kinds of leaves
_IS = [bytes(code == kind for code in range(256)) for kind in range(3)]  # of a kind, by what every byte stands for it
_KEY = attrgetter("device", "dtype", "shape")

# handles that follow each other: the call and the part they are of, and their leaves
Run = tuple[int, int, Sequence[int]]


@attrs.frozen
class _Alike:
    """Small tensors of one dtype and shape, whose bytes follow each other."""

    places: list[int]  # of each among the tensors
    dtype: torch.dtype
    shape: tuple[int, ...]


@attrs.frozen
class PackedTree:
    """A tree; large tensors of it are beside it."""

    outline: Outline
    kinds: bytes  # of its leaves
    plain: list[Any]  # leaves that are neither tensors nor handles
    held: list[Run]
    small: list[_Alike]
    bytes: np.ndarray  # uint8, of all small tensors
    large: list[tuple[int, torch.dtype, tuple[int, ...]]]  # the place of each among the tensors, its dtype and shape

    @property
    def first(self) -> tuple[int, int, int] | None:
        """The call, part and leaf of the first leaf, if that is a handle."""
        if self.kinds[0] != _HELD:
            return None
        call, part, leaves = self.held[0]
        return call, part, leaves[0]


def pack(tree: Any, check: Callable[[Lease], None] = lambda _: None) -> tuple[PackedTree, list[Tensor]]:
    """The tree, and its large tensors as they are. `check` raises for results whose handles must not be in it."""
    outline, leaves = taken_apart(tree)
    types = list(map(type, leaves))
    kind_of = {x: _HELD if issubclass(x, Held) else _TENSOR if issubclass(x, Tensor) else _PLAIN for x in set(types)}
    kinds = bytes(map(kind_of.__getitem__, types))
    tensors = _of_kind(leaves, kinds, _TENSOR)
    small: defaultdict[tuple[torch.device, torch.dtype, torch.Size], list[int]] = defaultdict(list)
    large = [place for place, x in enumerate(tensors) if x.nbytes >= BIG]
    apart = set(large)
    for place, key in enumerate(map(_KEY, tensors)):
        if place not in apart:
            small[key].append(place)
    # the widest first: so all are aligned as their dtypes want it
    alike = sorted(small.items(), key=lambda each: -each[0][1].itemsize)
    parts = [flat(_stacked([tensors[place] for place in places])) for _, places in alike]
    packed = PackedTree(
        outline,
        kinds,
        plain=_of_kind(leaves, kinds, _PLAIN),
        held=_runs(_of_kind(leaves, kinds, _HELD), check),
        small=[_Alike(places, dtype, tuple(shape)) for (_, dtype, shape), places in alike],
        bytes=torch.cat(_on_host(parts)).numpy() if parts else np.empty(0, np.uint8),
        large=[(place, tensors[place].dtype, tuple(tensors[place].shape)) for place in large],
    )
    return packed, [tensors[place] for place in large]


def _runs(held: Iterable[Held], check: Callable[[Lease], None]) -> list[Run]:
    """The handles, as messages name them. `check` raises for a result whose handles must not be among them."""
    found: list[Run] = []
    for lease, each in groupby(held, attrgetter("lease")):
        check(lease)
        leaves = list(map(attrgetter("leaf"), each))
        every = range(leaves[0], leaves[0] + len(leaves))
        found.append((lease.call, lease.part, every if leaves == list(every) else leaves))
    return found


def tensors_of(packed: PackedTree, large: Sequence[np.ndarray], *, device: torch.device = CPU) -> list[Tensor]:
    """The tensors of the tree, on `device`. Small ones have memory of their own, large ones on the host that of
    their arrays, which others may read too."""
    tensors: dict[int, Tensor] = {}
    every, start = bytes_of(packed.bytes).to(device), 0
    for each in packed.small:
        size = len(each.places) * math.prod(each.shape) * each.dtype.itemsize
        stacked = every[start : start + size].view(each.dtype).view(len(each.places), *each.shape)
        tensors |= zip(each.places, _parted(stacked), strict=True)
        start += size
    for (place, dtype, shape), array in zip(packed.large, large, strict=True):
        tensors[place] = bytes_of(array).to(device).view(dtype).view(shape)
    return [tensors[place] for place in range(len(tensors))]


def tree_of(
    packed: PackedTree,
    tensors: Iterable[Tensor],
    *,
    plain: Callable[[Any], Any] = lambda x: x,
    held: Callable[[list[Run]], Iterable[Any]] = lambda _: (),
) -> Any:
    """The tree with these tensors. `held` has what handles stand for, and `plain` what leaves of other kinds do."""
    leaves = iter(map(plain, packed.plain)), iter(tensors), iter(held(packed.held))
    return put_together(packed.outline, map(next, map(leaves.__getitem__, packed.kinds)))


def array_of(x: Tensor) -> np.ndarray:
    """The bytes of a tensor, in its own memory if that is contiguous and on the host."""
    return flat(x).cpu().numpy()


def bytes_of(array: np.ndarray) -> Tensor:
    """The array as a tensor uint8 [N], in its own memory if that is aligned; it may be one that must not be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of arrays that must not be written
        x = torch.from_numpy(array)
    aligned = x.data_ptr() % _ALIGNED == 0 and len(x) > 0  # numpy's stride of nothing is 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _of_kind(leaves: list[Any], kinds: bytes, kind: int) -> list[Any]:
    return list(compress(leaves, kinds.translate(_IS[kind])))


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Tensors of one shape as one."""
    with torch.no_grad():
        return torch.stack(tensors)


def _parted(stacked: Tensor) -> list[Tensor]:
    """The tensors of which this is the stack. Where there is little of them their memory, though of each its own, goes
    when that of all does."""
    if stacked.nbytes >= BIG:
        return [x.clone() for x in stacked.unbind()]
    flat = stacked.flatten(1) if stacked.ndim > 1 else stacked[:, None]
    step = _ALIGNED // stacked.element_size()
    room = flat.new_empty(len(flat), -(-flat.shape[1] // step) * step)[:, : flat.shape[1]]
    room.copy_(flat)
    return [x.data for x in room.view(stacked.shape).unbind()]  # .data: writing into one is not writing into all


def flat(x: Tensor) -> Tensor:
    """The bytes of a tensor, on its device: uint8 [N], in its own memory if that is contiguous."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of bytes, those of each device in one copy, for which that is waited once."""
    found = dict(enumerate(tensors))
    for device in {x.device for x in tensors} - {CPU}:
        there = [place for place, x in enumerate(tensors) if x.device == device]
        whole = torch.cat([tensors[place] for place in there]).cpu()
        found |= zip(there, whole.split([len(tensors[place]) for place in there]), strict=True)
    return list(found.values())


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
