"""Tracking of allocations, compute and traffic, operation by operation, for real tensors or tensors without data.

A storage lives from the operation that creates it until its last owner releases it, as with torch's own allocators. Its
kind shows only later, sometimes at the end of a backward pass, so events are recorded first and classified afterwards.
Process groups send nothing: they count, and answer as if all ranks were equal to this one.
"""

# pyright: reportIncompatibleMethodOverride=false
# torch's stubs name the parameters of its C++ classes otherwise than torch calls them
from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import _DISPATCH_META_HANDLERS as _OF_SIZES
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fppo.runtime.mesh import DENSE, SHARD_AXES, Mesh, Sharding, place_on, ranks_on
from fppo.runtime.schedule import Action
from fppo.runtime.watch import wire_bytes
from fppo.studies.plan.case import pinned
from fppo_kernels.collectives import Axis


class Work(NamedTuple):
    """The work of one operation."""

    kind: str  # "matmul" or "attention", with the dtype; "" for others
    flops: float
    traffic: int  # bytes read and written, except by matmuls


@attrs.frozen
class Cost:
    """Counts of the work between two moments."""

    flops: Counter[str] = attrs.field(factory=Counter)  # FLOPs by the kind of Work
    # bytes of "traffic", to or from the "host", and of activations' host memory ("away"); the number of "launches"
    other: Counter[str] = attrs.field(factory=Counter)
    sent: Counter[tuple[str, str, bool]] = attrs.field(
        factory=Counter
    )  # bytes by axis, collective, and whether the caller waits
    calls: Counter[tuple[str, str, bool]] = attrs.field(factory=Counter)

    def add(self, work: Work) -> None:
        """Count one operation."""
        if work.kind:
            self.flops[work.kind] += work.flops  # type: ignore[assignment]
        self.other["traffic"] += work.traffic
        self.other["launches"] += 1


@attrs.frozen
class Segment:
    """Bytes by kind at the peak between two layers."""

    peak: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.peak.values())


class Phase(NamedTuple):
    """A forward pass, a backward pass, or the time between: the bytes by kind at its start, its segments (one more than
    layers), and its cost."""

    name: str
    segments: tuple[Segment, ...]
    cost: Cost
    start: Mapping[str, float] = MappingProxyType({})


def peak_of(phases: Sequence[Phase]) -> tuple[str, Segment]:
    """The phase and segment of the peak."""
    return max(((p.name, s) for p in phases for s in p.segments), key=lambda pair: pair[1].total)


_NO_WORK = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh", "detach", "alias")
_PICKS = ("embedding", "index", "index_select", "gather")  # they read only as much as they write
_MATMULS = ("mm", "bmm", "addmm", "_linear_pointwise", "baddbmm", "_grouped_mm")
ADAMW_TRAFFIC = 7 / 4  # parameters, gradients and moments are read; all but the gradients are written


class DispatchCounter(NamedTuple):
    """Facts about an operation of torch, cached because the tracker needs them at every call."""

    name: str
    marks: bool  # whether each layer has a call of its own
    attention: bool
    writes: bool  # in place, or with an out argument


@functools.cache
def dispatched(func: Any) -> DispatchCounter:
    """Look up the name of an operation of torch, and whether it is attention or writes in place (cached)."""
    name = func._schema.name.rpartition("::")[2]
    attention = "attention" in name and "fused_sdp_choice" not in name
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    return DispatchCounter(name, attention, attention, writes)


def grouped_product(func: Any, args: Sequence[Any]) -> Tensor | None:
    """An empty result for a grouped matrix product of experts on tensors without data, in dtypes for which torch cannot
    compute the shape; None for other operations."""
    if dispatched(func).name != "_grouped_mm" or args[0].dtype == torch.bfloat16:
        return None
    left, right, offsets = args[:3]
    shape = (left.shape[-2], right.shape[-1])
    return left.new_empty((len(offsets), *shape) if left.dim() == right.dim() == 2 else shape)


def work_of(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], fresh: bool) -> Work | None:
    """FLOPs and bytes of an operation; None for views and empty tensors. `fresh`: it creates storage."""
    name, _, attention, writes = dispatched(func)
    if name in _NO_WORK or not (fresh or writes) or not inputs:
        return None
    if name in _MATMULS:
        return Work(f"matmul {_dtype(inputs[0])}", _matmul_flops(name, inputs, outputs), 0)
    if attention:
        return Work(f"attention {_dtype(inputs[0])}", _attention_flops(name, inputs), 0)
    if name in _PICKS:
        return Work("", 0.0, 2 * _bytes(outputs))
    if name == "_fused_adamw_":
        return Work("", 0.0, int(ADAMW_TRAFFIC * _bytes(inputs)))
    return Work("", 0.0, _bytes(inputs) + _bytes(outputs))


def attention_workspace(name: str, inputs: Sequence[Tensor]) -> int:
    """Bytes that a GPU's flash attention allocates inside its backward pass, which a run elsewhere does not show.

    FlashAttention-2 adds up the query's gradient in float32 and, where several query heads share a key head, writes
    gradients of keys and values for each query head first (torch: aten/.../flash_attn/flash_api.cpp, mha_bwd).
    """
    if "attention" not in name or not name.endswith("backward"):
        return 0
    query, key = inputs[1], inputs[2]
    expanded = 2 * query.numel() * query.element_size() if query.shape[1] != key.shape[1] else 0
    return 4 * query.numel() + expanded


def _matmul_flops(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    left, (out, *_) = inputs[1] if name in ("addmm", "baddbmm") else inputs[0], outputs
    groups = len(out) if left.dim() < out.dim() else 1  # each has its own rows in both matrices, which are summed over
    return 2.0 * math.prod(out.shape) / groups * left.shape[-1]


def _attention_flops(name: str, inputs: Sequence[Tensor]) -> float:
    """FLOPs of causal attention of queries [B, H, L, D], the last of as many tokens as there are keys: 2 matmuls
    forward and 5 backward, over visible pairs."""
    query, key = inputs[1:3] if name.endswith("backward") else inputs[:2]
    rows, heads, length, width = query.shape
    forward = 4.0 * rows * heads * width * (length * key.shape[2] - length * (length - 1) / 2)
    return 2.5 * forward if name.endswith("backward") else forward


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


# (axis, collective, bytes this rank sends, inputs, outputs, whether the caller waits)
Sent = Callable[[str, str, int, Sequence[Tensor], Sequence[Tensor], bool], None]


class CountingGroup(dist.ProcessGroup):
    """One rank's end of an axis whose other ranks are imagined, and equal to this one.

    Real tensors get the results of equal ranks; tensors without data stay as they are.
    """

    def __init__(self, axis: str, size: int, rank: int, sent: Sent) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._axis, self._size, self._rank, self._sent = axis, size, rank, sent

    def __deepcopy__(self, memo: dict) -> CountingGroup:
        return self

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _count(
        self, op: str, whole: Sequence[Tensor], inputs: Any, outputs: Any, opts: Any, *, sent: int | None = None
    ) -> Any:
        if sent is None:
            sent = wire_bytes(op, sum(x.numel() * x.element_size() for x in whole), self._size)
        waits = not getattr(opts, "asyncOp", False)
        self._sent(self._axis, op, sent, list(inputs), list(outputs), waits)
        future: torch.futures.Future = torch.futures.Future()
        future.set_result([])
        return _create_work_from_future(future)

    @torch.no_grad()
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for x in tensors:
            if op == dist.ReduceOp.SUM and not isinstance(x, FakeTensor):
                x.mul_(self._size)
        return self._count("all_reduce", tensors, tensors, tensors, opts)

    @torch.no_grad()
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if not isinstance(output, FakeTensor):
            output.view(self._size, -1).copy_(input.reshape(1, -1))
        return self._count("all_gather", [output], [input], [output], opts)

    @torch.no_grad()
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if not isinstance(output, FakeTensor):
            output.view(-1).copy_(input.reshape(self._size, -1)[self._rank] * self._size)
        return self._count("reduce_scatter", [input], [input], [output], opts)

    @torch.no_grad()
    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Any:
        if not isinstance(output, FakeTensor):
            output.copy_(input)
        size = None
        if len(sent):
            size = (len(input) - sent[self._rank]) * math.prod(input.shape[1:]) * input.element_size()
        return self._count("all_to_all", [input], [input], [output], opts, sent=size)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._count("broadcast", tensors, tensors, tensors, opts)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Any:
        del target, tag
        return self._count("send", tensors, tensors, [], None)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        del source, tag
        return self._count("receive", tensors, [], tensors, None)

    def barrier(self, opts: Any = None) -> Any:
        return self._count("barrier", [], [], [], opts)

    # the names before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def counting_mesh(
    sizes: Mapping[str, int],
    ranks: Mapping[str, int],
    sharding: Sharding | None,
    sent: Sent,
    *,
    virtual_stages: int = 1,
) -> Mesh:
    """The mesh of these sizes, from the rank at the coordinates `ranks`; missing coordinates are 0."""
    axes = {
        name: Axis(size, ranks.get(name, 0), CountingGroup(name, size, ranks.get(name, 0), sent) if size > 1 else None)
        for name, size in sizes.items()
    }
    mesh = Mesh(axes, sharding=sharding, virtual_stages=virtual_stages)
    if mesh["expert"].size == 1:
        return mesh
    size, rank = ranks_on(mesh, SHARD_AXES), place_on(mesh, SHARD_AXES)
    return attrs.evolve(mesh, axes={**axes, DENSE: Axis(size, rank, CountingGroup(DENSE, size, rank, sent))})


STATE, BATCH = "state", "batch"
HOST, AWAY = "host", "away"  # outside the accelerator's memory: state between uses, offloaded activations
GATHERED, LOGITS, ACTIVATIONS, GRADIENTS = "gathered", "logits", "activations", "gradients"
_COPIES = ("_to_copy", "clone", "contiguous")
_DEVICE = torch.ops.prim.device.default
_ELSEWHERE = (HOST, AWAY)


class _Block:
    """A tracked storage: its bytes, its kind, and the backward pass in which it was created."""

    __slots__ = ("bytes", "kind", "ref", "task")

    def __init__(self, size: int, kind: str, task: int) -> None:
        self.bytes, self.kind, self.task = size, kind, task
        self.ref: Any = None  # kept alive, or its callback would not run


class Tracker(TorchDispatchMode):
    """A context in which every operation of this thread is recorded.

    `hold` declares tensors that exist before; `scoped` marks functions whose storages are of a given kind; `begin_pass`
    marks the start of a forward pass; `sent` counts collectives. `phases` returns the recorded phases, in order. With
    `on_gpu` the workspace of a GPU's attention kernels is added, since no operation shows it.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        super().__init__()
        self._on_gpu = on_gpu
        self._events: list[tuple[int, _Block]] = []  # (1, created), (0, for a moment), (-1, freed)
        self._live: dict[int, _Block] = {}
        self._sources: dict[int, list[_Block]] = {}  # sources of copies into live storages
        self._starts: list[tuple[str, int, Cost]] = []  # a phase, and the event at which it begins
        self._marks: list[int] = []  # events between which at most one layer lies
        self._task, self._passes, self._scope, self._told = -1, 0, "", False
        self._nodes = (0, 0)  # autograd nodes created in a scope
        self._start("setup")

    # called by a plan

    def hold(self, tensors: Iterable[Tensor], kind: str = STATE) -> None:
        """Declare tensors that exist from the start; those of kind HOST are on the host."""
        for x in tensors:
            self._new(x, kind)

    def scoped(self, fn: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """Wrap `fn` so that storages created in it, forward and backward, are of this kind."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            first, self._scope = torch._C._autograd._get_sequence_nr(), kind  # type: ignore[attr-defined]
            try:
                return fn(*args, **kwargs)
            finally:
                last, self._scope = torch._C._autograd._get_sequence_nr(), ""  # type: ignore[attr-defined]
                if torch.is_grad_enabled():
                    self._nodes = (first, last)

        return wrapped

    @contextlib.contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """A context in which created storages are of this kind."""
        before, self._scope = self._scope, kind
        try:
            yield
        finally:
            self._scope = before

    def begin_pass(self) -> None:
        """Record the start of a forward pass, unless a pipeline's actions mark the passes (`began`)."""
        if not self._told:
            self._begin("forward")

    def began(self, action: Action) -> None:
        """Record the start of a pass by the action of a pipeline rank, which runs one pass at a time."""
        self._told = True
        self._begin(action.kind)

    def _begin(self, kind: str) -> None:
        self._notice()  # the end of the last pass
        self._passes += kind == "forward"
        self._start(f"{kind} {self._passes}")

    def sent(
        self, axis: str, op: str, size: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool
    ) -> None:
        """Record a collective that sends `size` bytes of this rank; without `wait` the caller continues meanwhile."""
        self._starts[-1][2].sent[axis, op, wait] += size
        self._starts[-1][2].calls[axis, op, wait] += 1
        if axis not in (*SHARD_AXES, DENSE) or op == "all_to_all":  # tokens pass through these
            return
        for x in (*inputs, *outputs):
            block = self._live.get(_storage(x))
            if block is None or block.kind in (STATE, BATCH, HOST, AWAY, GRADIENTS):
                continue
            scattered = op == "reduce_scatter" and any(x is y for y in outputs)
            block.kind = GRADIENTS if scattered else GATHERED
            if op == "reduce_scatter":  # whole gradients, copied together for their sum
                for source in self._sources.get(_storage(x), ()):
                    source.kind = GATHERED if source.kind in (ACTIVATIONS, LOGITS) else source.kind

    # recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles inside, and disabling the compiler takes longer than most operations

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        self._notice()
        if dispatched(func).marks:
            self._marks.append(len(self._events))
        out = grouped_product(func, args) if isinstance(args[0] if args else None, FakeTensor) else None
        out = _run(func, types, args, kwargs) if out is None else out
        self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = list(_tensors((*args, *kwargs.values())))
        outputs = list(_tensors(out if isinstance(out, tuple | list) else (out,)))
        known = [self._live.get(_storage(x)) for x in inputs]
        name = dispatched(func).name
        if name == "copy_" and known[0] is not None and len(known) > 1 and known[1] is not None:
            self._sources.setdefault(_storage(inputs[0]), []).append(known[1])
            if (known[0].kind in _ELSEWHERE) != (known[1].kind in _ELSEWHERE):
                self._starts[-1][2].other["host"] += inputs[0].numel() * inputs[0].element_size()
        fresh = [x for x in outputs if _storage(x) not in self._live]
        if fresh:
            kind = self._kind(name, [block.kind for block in known if block is not None])
            for x in fresh:
                self._new(x, kind)
        if self._on_gpu and (extra := attention_workspace(name, inputs)):
            self._events.append((0, _Block(extra, ACTIVATIONS, self._task)))
        work = work_of(func, inputs, outputs, bool(fresh))
        if work is not None and {block.kind for block in known if block is not None} == {HOST}:
            self._starts[-1][2].other["host"] += work.traffic  # the host's memory is no slower than the way to it
        elif work is not None:
            self._starts[-1][2].add(work)

    def _kind(self, name: str, inputs: Sequence[str]) -> str:
        if self._scope:
            return self._scope
        if self._task >= 0 and self._in_nodes():
            return LOGITS
        if inputs and (inputs[0] == HOST or (name in _COPIES and inputs[0] in (STATE, GATHERED))):
            return GATHERED
        if inputs and all(kind == GRADIENTS for kind in inputs):
            return GRADIENTS
        return ACTIVATIONS

    def _in_nodes(self) -> bool:
        node = torch._C._current_autograd_node()
        return node is not None and self._nodes[0] <= node._sequence_nr() < self._nodes[1]

    def _new(self, x: Tensor, kind: str) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not size or key in self._live or (x.is_meta and not isinstance(x, FakeTensor)):
            return
        block = _Block(size, kind, self._task)

        def freed(_: Any) -> None:
            self._live.pop(key, None)
            self._sources.pop(key, None)
            if kind not in _ELSEWHERE:
                self._events.append((-1, block))

        block.ref = weakref.ref(storage, freed)
        self._live[key] = block
        if kind == AWAY:
            self._starts[-1][2].other["away"] += pinned(size) if self._on_gpu else size
        if kind not in _ELSEWHERE:
            self._events.append((1, block))

    def _notice(self) -> None:
        """Detect the start and end of a backward pass; storages that it created and left behind are gradients."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        if self._task >= 0:
            for block in self._live.values():
                if block.task == self._task and block.kind in (ACTIVATIONS, LOGITS):
                    block.kind = GRADIENTS
        self._task = task
        name = f"{'after' if task < 0 else 'backward'} {self._passes}"
        if name != self._starts[-1][0]:
            self._start(name)

    def _start(self, name: str) -> None:
        self._starts.append((name, len(self._events), Cost()))

    # results

    def phases(self) -> list[Phase]:
        """All phases so far, in order."""
        ends = [start for _, start, _ in self._starts[1:]] + [len(self._events)]
        live: Counter[str] = Counter()
        phases = []
        for (name, start, cost), end in zip(self._starts, ends, strict=True):
            cuts = [start, *(mark for mark in self._marks if start < mark < end), end]
            held = dict(live)
            segments = tuple(self._segment(live, a, b) for a, b in itertools.pairwise(cuts))
            phases.append(Phase(name, segments, cost, held))
        return phases

    def _segment(self, live: Counter[str], start: int, end: int) -> Segment:
        """Bytes by kind at the peak of the events from `start` to `end`; `live` is advanced to the end."""
        total = sum(live.values())
        most, peak = total, dict(live)
        for sign, block in self._events[start:end]:
            live[block.kind] += block.bytes if sign >= 0 else -block.bytes
            total += block.bytes if sign >= 0 else -block.bytes
            if total > most:
                most, peak = total, dict(live)
            if sign == 0:
                live[block.kind] -= block.bytes
                total -= block.bytes
        return Segment(peak)


def _run(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func(*args, **kwargs)`. Tensors without data (FakeTensor) are dispatched to their own mode directly, which
    saves two of torch's dispatch steps."""
    fake = next((x for x in _tensors((*args, *kwargs.values())) if isinstance(x, FakeTensor)), None)
    if fake is None or func in _OF_SIZES:
        return func(*args, **kwargs)
    return fake.fake_mode.dispatch(func, types, args, kwargs)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (x for x in value if isinstance(x, Tensor))
