"""State and activations on the host between uses, as functions around steps (ZeRO-Offload, arXiv:2101.06840).

All copies go through a `Lane`. Where an accelerator has streams the host's memory is pinned, and copies run on separate
ones, overlapped with computation; elsewhere they are plain copies, so that results can be tested without a GPU.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fppo import devices, tree
from fppo.runtime.mapped import empty_beside

T = TypeVar("T")
Update = Callable[..., tuple[Any, Any]]
Finish = Callable[[], tuple[Tensor, ...]]

_SAME = frozenset(f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "Unsqueeze", "Slice", "ToCopy"))
WINDOW = 1 << 28  # bytes of activations in transfer to and from the host
GRAIN = 1024  # a multiple of any kernel's vector width, so that cuts of a parameter change no bit


class Lane:
    """Asynchronous copies between the host and one device; only the device waits for them."""

    def __init__(self, device: torch.device) -> None:
        beside = devices.kind_of(device).streams
        if beside and device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self.device = device
        self._streams = (torch.Stream(device), torch.Stream(device)) if beside else None  # in, out
        self._under_way: dict[int, tuple[Any, Sequence[Tensor]]] = {}  # an event, and the tensors of its copy
        self._numbers = itertools.count()

    def host_like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate host memory for a copy of `x`, in its dtype or another."""
        return _host_like(x, dtype)

    @torch.no_grad()
    def fetch(self, tensors: Sequence[Tensor]) -> Finish:
        """Start to copy tensors into new memory of the device; the returned function waits and returns the copies.

        The memory is allocated on the current stream, so the copy waits for the stream's work so far.
        """
        return self._copy(0, tensors, [torch.empty_like(x, device=self.device) for x in tensors])

    @torch.no_grad()
    def send(self, tensors: Sequence[Tensor], into: Sequence[Tensor]) -> Finish:
        """Start to copy tensors of the host into memory of the device, which the device may read once the returned
        function was called."""
        return self._copy(0, tensors, into)

    @torch.no_grad()
    def store(self, tensors: Sequence[Tensor], into: Sequence[Tensor]) -> Finish:
        """Start to copy tensors of the device into host memory, which may be read after `settle`.

        Once the returned function was called, the memory of `tensors` may be reused.
        """
        return self._copy(1, tensors, into)

    def settle(self) -> None:
        """Block the host until all stored copies have arrived."""
        if self._streams is not None:
            self._streams[1].synchronize()
            self._release()

    def _copy(self, direction: int, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Finish:
        copies = tuple(targets)
        if self._streams is None:
            for target, source in zip(copies, sources, strict=True):
                target.copy_(source)
            return lambda: copies
        stream = self._streams[direction]
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            for target, source in zip(copies, sources, strict=True):
                target.copy_(source, non_blocking=True)
        done, number = stream.record_event(), next(self._numbers)
        # keep this memory allocated until the copy is done, even if no one waits for it
        self._release()
        self._under_way[number] = (done, (*sources, *copies))

        def finish() -> tuple[Tensor, ...]:
            torch.accelerator.current_stream(self.device).wait_event(done)
            self._under_way.pop(number, None)
            return copies

        return finish

    def _release(self) -> None:
        for number, (done, _) in list(self._under_way.items()):  # a thread that samples ahead may add some meanwhile
            if done.query():
                self._under_way.pop(number, None)


class OnHost(NamedTuple):
    """Parameters on the host, for passes without gradients: each layer is fetched while the one before it runs, so that
    the device holds two layers at a time, and the parameters outside the layers."""

    params: Mapping[str, Tensor]
    lane: Lane


def to_host(values: T) -> T:
    """Copy a tree to the host, in pinned memory from an accelerator with streams."""
    copies = tree.map(lambda x: _host_like(x).copy_(x.detach(), non_blocking=True), values)
    for device in {x.device for x in tree.tensors(values)}:
        devices.synchronize(device)
    return copies


def to_device(values: T, lane: Lane) -> T:
    """Copy a tree to the lane's device."""
    arrived = iter(lane.fetch(tree.tensors(values))())
    return tree.map(lambda x: next(arrived), values)


def copied(values: T) -> T:
    """Copy a tree on its devices, pinned memory to pinned memory, files to files. Raises TypeError for values in other
    processes."""
    tree.check_here(values, "a copy")

    def copy(x: Tensor) -> Tensor:
        beside = empty_beside(x)
        return (torch.empty_like(x, pin_memory=x.is_pinned()) if beside is None else beside).copy_(x)

    return tree.map(copy, values)


def by_layer(fn: Callable[..., T], lane: Lane) -> Callable[..., T]:
    """Adapt `fn(params, ...)`, a pass without gradients, to parameters on the host, fetched as for `OnHost`."""

    def run(params: Mapping[str, Tensor], *args: Any, **keywords: Any) -> T:
        return fn(OnHost(params, lane), *args, **keywords)

    return run


@attrs.frozen
class Offloaded:
    """An update of a state whose parameters are on the host, before and after, by `stage(state, ..., donate=)`.

    The parameters are on the device during the call. Moments on the host stay there: `offloaded_adamw` is their kernel.
    With `donate` the new state reuses all memory of the old one.
    """

    stage: Update
    lane: Lane

    def __call__(self, state: Any, *args: Any, donate: bool = False, **keywords: Any) -> tuple[Any, Any]:
        state = tree.donate(state) if donate else copied(state)
        home = state.params
        there = tree.replace(state, params=to_device(home, self.lane))
        after, report = self.stage(there, *args, donate=True, **keywords)
        self.lane.store([after.params[name] for name in home], list(home.values()))
        self.lane.settle()
        return tree.replace(after, params=home), report


def offloaded_adamw(kernel: Callable[..., None], lane: Lane, *, bucket_bytes: int = 128 << 20) -> Callable[..., None]:
    """Adapt an AdamW `kernel` to moments on the host, with parameters and gradients on the lane's device.

    While a bucket is updated the next is fetched and the last written back: at most three are on the device.
    `bucket_bytes` counts first and second moments. A parameter may be cut, so the kernel must be elementwise.
    """

    def adamw(
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        **scalars: Any,
    ) -> None:
        buckets = buckets_of([params, grads, exp_avgs, exp_avg_sqs], bucket_bytes)
        counts = torch.stack(steps).to(lane.device).unbind() if steps else ()
        after: dict[int, Tensor] = {}
        moments = [pieces_of(exp_avgs, bucket) + pieces_of(exp_avg_sqs, bucket) for bucket in buckets]
        arriving = lane.fetch(moments[0]) if buckets else None
        leaving: list[Finish] = []
        for number, bucket in enumerate(buckets):
            assert arriving is not None
            here = arriving()
            while len(leaving) > 1:
                leaving.pop(0)()
            arriving = lane.fetch(moments[number + 1]) if number + 1 < len(buckets) else None
            raised = [counts[piece.number].clone() for piece in bucket]
            count = len(bucket)
            kernel(
                pieces_of(params, bucket),
                pieces_of(grads, bucket),
                list(here[:count]),
                list(here[count:]),
                raised,
                **scalars,
            )
            leaving.append(lane.store(here, moments[number]))
            after |= {piece.number: step for piece, step in zip(bucket, raised, strict=True)}
        if steps:
            for step, new in zip(steps, torch.stack(list(after.values())).to(steps[0].device), strict=True):
                step.copy_(new)
        lane.settle()

    return adamw


class MomentPart(NamedTuple):
    """A range of elements of the parameter with index `number`; `stop` None is the whole."""

    number: int
    start: int
    stop: int | None


def pieces_of(tensors: Sequence[Tensor], bucket: Sequence[MomentPart]) -> list[Tensor]:
    """The tensors, or flat ranges of them, that a bucket has; they share memory with `tensors`."""
    return [tensors[n] if stop is None else tensors[n].view(-1)[start:stop] for n, start, stop in bucket]


def buckets_of(columns: Sequence[Sequence[Tensor]], size: int) -> list[list[MomentPart]]:
    """Split all parameters into pieces, in buckets of at most `size` bytes of moments, or of one smallest piece.
    `columns` are the parameters, their gradients, and their first and second moments."""
    buckets: list[list[MomentPart]] = []
    room = 0
    for number, (param, grad, mu, nu) in enumerate(zip(*columns, strict=True)):
        width = mu.element_size() + nu.element_size()
        count, start = param.numel(), 0
        whole = not all(x.is_contiguous() for x in (param, grad, mu, nu))
        while True:
            rest = count - start
            if room < min(rest, rest if whole else GRAIN) * width or not buckets:
                buckets.append([])
                room = size
            fitting = rest if whole else min(rest, max(room // width // GRAIN, 1) * GRAIN)
            cut = fitting < count
            buckets[-1].append(MomentPart(number, start, start + fitting if cut else None))
            room -= fitting * width
            start += fitting
            if start >= count:
                break
    return buckets


def _host_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    pinned = devices.kind_of(x.device).streams or x.is_pinned()
    return torch.empty_like(x, device="cpu", dtype=dtype, requires_grad=False, pin_memory=pinned)


@attrs.frozen
class HostActivations(Generic[T]):
    """A call of `stage` that keeps the tensors saved for its backward pass on the host in between.

    Tensors below `minimum_bytes`, the arguments of `stage`, and parameters, also cast or gathered ones, stay on the
    device. Copies start when a tensor is saved. Tensors in transfer to the host, or fetched ahead of the backward pass,
    take at most `window_bytes` of the device, or one tensor, besides the current operation's inputs. Checkpointed
    layers save their inputs alone, and attention's saved tensors if attention is not recomputed.
    """

    stage: Callable[..., T]
    lane: Lane
    minimum_bytes: int = attrs.field(default=1 << 20, kw_only=True)
    window_bytes: int = attrs.field(default=WINDOW, kw_only=True)

    def __call__(self, *args: Any, **keywords: Any) -> T:
        shelf = _Shelf(self.lane, self.minimum_bytes, self.window_bytes, tree.tensors((args, keywords)))
        with saved_tensors_hooks(shelf.pack, shelf.unpack):
            try:
                return self.stage(*args, **keywords)
            finally:
                shelf.clear()


class _KeptStorage:
    """An offloaded storage: its bytes on the host and, temporarily, on the device."""

    __slots__ = ("__weakref__", "arriving", "here", "host", "leaving", "places", "version")

    def __init__(self, version: int, here: Tensor, host: Tensor, leaving: Finish) -> None:
        self.version, self.host = version, host
        self.here: Tensor | None = here
        self.leaving: Finish | None = leaving
        self.arriving: Finish | None = None
        self.places: list[int] = []  # indices, among all saved tensors, of those still to be used

    def needed(self) -> int:
        """The index of its next use, -1 if there is none. The backward pass goes from high indices to low ones."""
        return self.places[-1] if self.places else -1


class _Saved(NamedTuple):
    """A view of an offloaded storage, and its `place` in the order of saved tensors."""

    kept: _KeptStorage
    place: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Shelf:
    """A store of saved tensors on the host, fetched in reverse order. Whole storages are moved: views stay views."""

    def __init__(self, lane: Lane, minimum: int, window: int, inputs: Sequence[Tensor]) -> None:
        self._lane, self._minimum, self._window = lane, minimum, window
        self._inputs = weakref.WeakSet(x.untyped_storage() for x in inputs)
        self._known: weakref.WeakKeyDictionary[Any, weakref.ref[_KeptStorage]] = weakref.WeakKeyDictionary()
        self._order: list[weakref.ref[_KeptStorage]] = []  # by place
        self._near: set[_KeptStorage] = set()
        self._near_bytes = 0
        self._next = 0  # all indices below are still to be considered for fetching ahead
        self._done: _KeptStorage | None = None

    def pack(self, x: Tensor) -> Tensor | _Saved:
        """The value that autograd keeps in place of `x`."""
        if not self._wanted(x):
            return x.detach()  # an output itself would form a cycle with its node
        storage = x.untyped_storage()
        known = self._known.get(storage)
        kept = known() if known is not None else None
        if kept is None or kept.version != x._version:
            kept = self._put(x)
            self._known[storage] = weakref.ref(kept)
        while self._order and self._order[-1]() is None:
            self._order.pop()
        kept.places.append(len(self._order))
        self._order.append(weakref.ref(kept))
        self._next = len(self._order)
        return _Saved(kept, kept.places[-1], x.dtype, x.size(), x.stride(), int(x.storage_offset()))

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        """Restore a saved tensor; tensors saved before it are fetched ahead."""
        if isinstance(saved, Tensor):
            return saved
        kept = saved.kept
        if self._done is not None and self._done is not kept:  # not at once: some operations unpack twice
            self._drop(self._done)
        if kept not in self._near:
            self._fetch(kept)
        if kept.arriving is not None:
            (kept.here,) = kept.arriving()
            kept.arriving = None
        assert kept.here is not None
        x = kept.here.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
        if saved.place in kept.places:
            kept.places.remove(saved.place)
        self._done = None if kept.places else kept
        self._fetch_ahead(saved.place)
        return x

    def clear(self) -> None:
        """Release all device copies."""
        self._done = None
        for kept in list(self._near):
            self._drop(kept)

    def _wanted(self, x: Tensor) -> bool:
        plain = x.device == self._lane.device and x.layout == torch.strided
        size = x.untyped_storage().nbytes()
        if not plain or size < self._minimum or size % x.itemsize:
            return False
        return not _is_parameter(x) and x.untyped_storage() not in self._inputs

    def _put(self, x: Tensor) -> _KeptStorage:
        here = x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).view(torch.uint8)
        host = self._lane.host_like(here)
        self._make_room(len(host))
        kept = _KeptStorage(x._version, here, host, self._lane.store([here], [host]))
        self._bring(kept)
        return kept

    def _bring(self, storage: _KeptStorage) -> None:
        self._near.add(storage)
        self._near_bytes += len(storage.host)

    def _fetch(self, storage: _KeptStorage) -> None:
        self._make_room(len(storage.host))
        storage.arriving = self._lane.fetch([storage.host])
        self._bring(storage)

    def _fetch_ahead(self, place: int) -> None:
        self._next = min(self._next, place)
        while self._next > 0:
            kept = self._order[self._next - 1]()
            if kept is not None and self._next - 1 in kept.places and kept not in self._near:
                if self._near_bytes + len(kept.host) > self._window:
                    return
                self._fetch(kept)
            self._next -= 1

    def _make_room(self, size: int) -> None:
        """Release the device copies that are needed last, until `size` bytes fit."""
        while self._near and self._near_bytes + size > self._window:
            self._drop(min(self._near, key=_KeptStorage.needed))

    def _drop(self, storage: _KeptStorage) -> None:
        if storage not in self._near:
            return
        self._near.remove(storage)
        for wait in (storage.leaving, storage.arriving):
            if wait is not None:
                wait()
        storage.here = storage.leaving = storage.arriving = None
        self._near_bytes -= len(storage.host)


def _is_parameter(x: Tensor) -> bool:
    """Whether `x` is a leaf with gradient, was gathered from such leaves, or is a view or a cast of either."""
    node = x.grad_fn
    if node is None:
        return x.requires_grad or (x._base is not None and x._base.requires_grad)
    while node is not None and node.name() in _SAME:
        node = node.next_functions[0][0]
    return node is not None and node.name() in ("torch::autograd::AccumulateGrad", "_GatheredBackward")
