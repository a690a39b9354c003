"""Encode trees for transfer between processes: an outline, its leaves, small tensors as one array of bytes, and each
large tensor by itself. All parts pass through host memory."""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import compress, groupby, islice
from operator import attrgetter
from typing import Any, Generic, TypeVar

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from fppo.fleet.held import Held, Lease

BIG = 1 << 16  # tensors of at least this many bytes travel by themselves
CPU = torch.device("cpu")
_ALIGNED = 64  # alignment in bytes of torch's own memory; kernels may round differently at other alignments
_PLAIN, _TENSOR, _HELD = range(3)  # kinds of leaves
# for each kind, the table for bytes.translate that maps its code to 1 and others to 0
_IS = [bytes(code == kind for code in range(256)) for kind in range(3)]
_KEY = attrgetter("device", "dtype", "shape")

# The outline of a leaf is None. That of a node has its type, the type's context (for a dict the keys), and the
# outlines of its children, or only their number if all of them are leaves.
Outline = tuple[type, Any, "int | tuple[Outline, ...]"] | None
# a run of consecutive handles: their call, their part of its result, and the range of their leaves
Run = tuple[int, int, Sequence[int]]

_is_namedtuple = functools.lru_cache(1024)(pytree.is_namedtuple_class)


@attrs.frozen
class _Alike:
    """Small tensors of one dtype and shape, whose bytes are adjacent in `PackedTree.bytes`."""

    places: list[int]  # their indices among all tensors
    dtype: torch.dtype
    shape: tuple[int, ...]


@attrs.frozen
class PackedTree:
    """A tree without its large tensors, which are sent separately: outline, plain values, handles, small tensors."""

    outline: Outline
    kinds: bytes  # the kind of each leaf
    plain: list[Any]  # leaves that are neither tensors nor handles
    handles: list[Run]
    small: list[_Alike]
    bytes: np.ndarray  # uint8 [N], the bytes of all small tensors
    large: list[tuple[int, torch.dtype, tuple[int, ...]]]  # index among all tensors, dtype, shape

    @property
    def first(self) -> tuple[int, int, int] | None:
        """The call, part and leaf of the handle that is the tree's first leaf; None if that is no handle."""
        if self.kinds[0] != _HELD:
            return None
        call, part, leaves = self.handles[0]
        return call, part, leaves[0]


def pack(tree: Any, check: Callable[[Lease], None] = lambda _: None) -> tuple[PackedTree, list[Tensor]]:
    """Pack a tree; return it and its large tensors, which are not copied. `check` is called with the lease of each
    handle, and raises an error if the handle is forbidden."""
    outline, leaves = flatten(tree)
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
    # widest dtypes first, so that all tensors are aligned
    alike = sorted(small.items(), key=lambda each: -each[0][1].itemsize)
    parts = [flat(_stacked([tensors[place] for place in places])) for _, places in alike]
    packed = PackedTree(
        outline,
        kinds,
        plain=_of_kind(leaves, kinds, _PLAIN),
        handles=_runs(_of_kind(leaves, kinds, _HELD), check),
        small=[_Alike(places, dtype, tuple(shape)) for (_, dtype, shape), places in alike],
        bytes=torch.cat(_on_host(parts)).numpy() if parts else np.empty(0, np.uint8),
        large=[(place, tensors[place].dtype, tuple(tensors[place].shape)) for place in large],
    )
    return packed, [tensors[place] for place in large]


def _runs(handles: Iterable[Held], check: Callable[[Lease], None]) -> list[Run]:
    """Encode handles as runs, in the form in which messages name them. `check` is called with the lease of each run."""
    found: list[Run] = []
    for lease, each in groupby(handles, attrgetter("lease")):
        check(lease)
        leaves = list(map(attrgetter("leaf"), each))
        every = range(leaves[0], leaves[0] + len(leaves))
        found.append((lease.call, lease.part, every if leaves == list(every) else leaves))
    return found


def tensors_of(packed: PackedTree, large: Sequence[np.ndarray], *, device: torch.device = CPU) -> list[Tensor]:
    """Decode the tensors of a tree on `device`. Small tensors get their own memory; large ones on the host share the
    memory of the arrays `large`, which other processes may read too."""
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
    values_of: Callable[[list[Run]], Iterable[Any]] = lambda _: (),
) -> Any:
    """Rebuild a tree from its tensors. `values_of` returns the values of runs of handles; `plain` converts each leaf
    that is neither a tensor nor a handle."""
    leaves = iter(map(plain, packed.plain)), iter(tensors), iter(values_of(packed.handles))
    return unflatten(packed.outline, map(next, map(leaves.__getitem__, packed.kinds)))


def array_of(x: Tensor) -> np.ndarray:
    """View a tensor's bytes as an array; they are copied only if the tensor is not contiguous, or not on the host."""
    return flat(x).cpu().numpy()


def bytes_of(array: np.ndarray) -> Tensor:
    """View the array as a uint8 tensor [N], if it is aligned; else copy it. The view may be read-only memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's warning about read-only arrays
        x = torch.from_numpy(array)
    aligned = x.data_ptr() % _ALIGNED == 0 and len(x) > 0  # numpy's strides of empty arrays are 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _of_kind(leaves: list[Any], kinds: bytes, kind: int) -> list[Any]:
    return list(compress(leaves, kinds.translate(_IS[kind])))


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Stack tensors of one shape, without gradients."""
    with torch.no_grad():
        return torch.stack(tensors)


def _parted(stacked: Tensor) -> list[Tensor]:
    """Split a stack into its tensors. Tensors of a small stack share one memory, which is freed with the last of them;
    else each gets its own memory."""
    if stacked.nbytes >= BIG:
        return [x.clone() for x in stacked.unbind()]
    flat = stacked.flatten(1) if stacked.ndim > 1 else stacked[:, None]
    step = _ALIGNED // stacked.element_size()
    room = flat.new_empty(len(flat), -(-flat.shape[1] // step) * step)[:, : flat.shape[1]]
    room.copy_(flat)
    # .data: writing into one tensor does not count as writing into all
    return [x.data for x in room.view(stacked.shape).unbind()]


def flat(x: Tensor) -> Tensor:
    """View a tensor's bytes, uint8 [N], on its device; they are copied only if the tensor is not contiguous."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy uint8 tensors to the host, with one copy and one wait for each device."""
    found = dict(enumerate(tensors))
    for device in {x.device for x in tensors} - {CPU}:
        there = [place for place, x in enumerate(tensors) if x.device == device]
        whole = torch.cat([tensors[place] for place in there]).cpu()
        found |= zip(there, whole.split([len(tensors[place]) for place in there]), strict=True)
    return list(found.values())


def flatten(tree: Any) -> tuple[Outline, list[Any]]:
    """Split a tree into its outline and its leaves, the same leaves in the same order as torch's pytrees."""
    leaves: list[Any] = []
    return _outline(tree, leaves), leaves


def unflatten(outline: Outline, leaves: Iterable[Any]) -> Any:
    """Rebuild a tree from its outline and leaves."""
    return _tree(outline, iter(leaves))


def _is_node(kind: type) -> bool:
    return kind in pytree.SUPPORTED_NODES or _is_namedtuple(kind)


def _outline(x: Any, leaves: list[Any]) -> Outline:
    kind = type(x)
    if kind is dict:
        return kind, tuple(x), _inside(x.values(), leaves)
    if kind is list or kind is tuple or _is_namedtuple(kind):
        return kind, None, _inside(x, leaves)
    if kind not in pytree.SUPPORTED_NODES:
        leaves.append(x)
        return None
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(x)
    return kind, context, _inside(list(children), leaves)


def _inside(children: Collection[Any], leaves: list[Any]) -> int | tuple[Outline, ...]:
    if any(map(_is_node, set(map(type, children)))):
        return tuple([_outline(x, leaves) for x in children])
    leaves.extend(children)
    return len(children)


def _tree(outline: Outline, leaves: Iterator[Any]) -> Any:
    if outline is None:
        return next(leaves)
    kind, context, inside = outline
    children = list(islice(leaves, inside)) if isinstance(inside, int) else [_tree(x, leaves) for x in inside]
    if kind is dict:
        return dict(zip(context, children, strict=True))
    if kind is list:
        return children
    if kind is tuple:
        return tuple(children)
    if _is_namedtuple(kind):
        return kind(*children)
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, context)


Ref = TypeVar("Ref")


class Sent(Generic[Ref]):
    """A cache of sent tensors in memory that other processes can read. `put` copies new tensors into the memory, or
    returns None if it has no room.

    A tensor stays there while it lives, and is copied again after torch has written into it. Writes that torch does not
    count (numpy's into shared memory, for example) are not detected: tensors that are sent must not be written into.
    """

    def __init__(self, put: Callable[[Sequence[np.ndarray]], Sequence[Ref] | None]) -> None:
        self._put = put
        self._known: Any = WeakIdKeyDictionary()
        self._lock = threading.Lock()  # concurrent stages send the same tensors

    def refs(self, tensors: Sequence[Tensor]) -> list[Ref] | None:
        """Return references to the tensors in the shared memory; None if the memory has no room for them."""
        with self._lock:
            new = {id(x): x for x in tensors if self._known.get(x, (None,))[0] != x._version}
            made = self._put([array_of(x) for x in new.values()]) if new else ()
            if made is None:
                return None
            for x, ref in zip(new.values(), made, strict=True):
                self._known[x] = x._version, ref
            return [self._known[x][1] for x in tensors]
