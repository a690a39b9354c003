"""Trees on their way between processes: an outline and its leaves, small tensors as one array of bytes, large ones each
by itself, all through the memory of their hosts."""

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

BIG = 1 << 16  # bytes from which a tensor travels by itself
CPU = torch.device("cpu")
_ALIGNED = 64  # bytes: what torch's own memory is aligned to; kernels may round otherwise on other
_PLAIN, _TENSOR, _HELD = range(3)  # kinds of leaves
_IS = [bytes(code == kind for code in range(256)) for kind in range(3)]  # of a kind, by what every byte stands for it
_KEY = attrgetter("device", "dtype", "shape")

# Of a leaf None. Of a node its type, what its type says of it beside its children (of a dict the keys), and the
# outlines of these, or their number where all are leaves.
Outline = tuple[type, Any, "int | tuple[Outline, ...]"] | None
# handles that follow each other: the call and the part they are of, and their leaves
Run = tuple[int, int, Sequence[int]]

_is_namedtuple = functools.lru_cache(1024)(pytree.is_namedtuple_class)


@attrs.frozen
class _Alike:
    """Small tensors of one dtype and shape, whose bytes follow each other."""

    places: list[int]  # of each among the tensors
    dtype: torch.dtype
    shape: tuple[int, ...]


@attrs.frozen
class PackedTree:
    """A tree without its large tensors, which travel beside it."""

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
    """The packed tree, and its large tensors as they are. `check` raises for handles that must not be in it."""
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
    """Handles as ranges of numbers, as messages name them."""
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
    """Put a tree together from its tensors. `held` gives the values of handles, and `plain` converts other leaves."""
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


def taken_apart(tree: Any) -> tuple[Outline, list[Any]]:
    """The outline of a tree and its leaves, which are those of torch's pytrees, in their order."""
    leaves: list[Any] = []
    return _outline(tree, leaves), leaves


def put_together(outline: Outline, leaves: Iterable[Any]) -> Any:
    """The tree with this outline and these leaves."""
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
    """Places of tensors in memory that other processes read. `put` writes the bytes of new ones, or returns None if it
    has no room for them.

    A tensor stays in its place as long as it lives, and is put anew once torch has written into it. Writes that torch
    does not count, as numpy's into an array that shares its memory, are not noticed: tensors that are sent are values.
    """

    def __init__(self, put: Callable[[Sequence[np.ndarray]], Sequence[Ref] | None]) -> None:
        self._put = put
        self._known: Any = WeakIdKeyDictionary()
        self._lock = threading.Lock()  # stages that run at once send the same tensors

    def refs(self, tensors: Sequence[Tensor]) -> list[Ref] | None:
        """The place of each of the tensors; None without room."""
        with self._lock:
            new = {id(x): x for x in tensors if self._known.get(x, (None,))[0] != x._version}
            made = self._put([array_of(x) for x in new.values()]) if new else ()
            if made is None:
                return None
            for x, ref in zip(new.values(), made, strict=True):
                self._known[x] = x._version, ref
            return [self._known[x][1] for x in tensors]
