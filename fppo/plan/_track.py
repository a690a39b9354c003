"""What a piece of code allocates, computes and sends, operation by operation: of real tensors, or of ones with no data.

A storage lives from the operation that makes it until its last owner lets go, as with torch's own allocators. What it
is for shows only later, sometimes at the end of a backward pass, so events are noted as they come and read afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import _DISPATCH_META_HANDLERS as _OF_SIZES
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fppo.plan._ops import attention_workspace, dispatched, grouped_product, work_of
from fppo.plan.hardware import pinned
from fppo.plan.values import Cost, Phase, Segment
from fppo.runtime.mesh import DENSE, SHARD_AXES
from fppo.runtime.schedule import Action

STATE, BATCH = "state", "batch"
HOST, AWAY = "host", "away"  # no memory of the accelerator: state there between uses, and activations put away
GATHERED, LOGITS, ACTIVATIONS, GRADIENTS = "gathered", "logits", "activations", "gradients"
_COPIES = ("_to_copy", "clone", "contiguous")
_DEVICE = torch.ops.prim.device.default
_ELSEWHERE = (HOST, AWAY)


class _Block:
    """A storage."""

    __slots__ = ("bytes", "kind", "ref", "task")

    def __init__(self, size: int, kind: str, task: int) -> None:
        self.bytes, self.kind, self.task = size, kind, task
        self.ref: Any = None  # kept, or its callback would not come


class Tracker(TorchDispatchMode):
    """Inside this context every operation of this thread is noted.

    `hold` names what is there before; `scoped` marks functions whose storages are of a kind; `begin_pass` says that the
    next forward pass begins; `sent` counts collectives. `phases` is what there was, in order. With `on_gpu` the
    workspace of a GPU's attention kernels counts, which no operation shows.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        super().__init__()
        self._on_gpu = on_gpu
        self._events: list[tuple[int, _Block]] = []  # (1, a new one), (0, one for a moment), (-1, one that is freed)
        self._live: dict[int, _Block] = {}
        self._sources: dict[int, list[_Block]] = {}  # what was copied into a live storage
        self._starts: list[tuple[str, int, Cost]] = []  # a phase, and the event that it begins with
        self._marks: list[int] = []  # events between which there is one layer at most
        self._task, self._passes, self._scope, self._told = -1, 0, "", False
        self._nodes = (0, 0)  # of the functions of the autograd graph that a scope has made
        self._start("setup")

    # what a plan says

    def hold(self, tensors: Iterable[Tensor], kind: str = STATE) -> None:
        """These are there from the start; those of kind HOST lie on the host."""
        for x in tensors:
            self._new(x, kind)

    def scoped(self, fn: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """`fn`, whose storages are of this kind, forward and backward."""

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
        """Storages that are made inside are of this kind."""
        before, self._scope = self._scope, kind
        try:
            yield
        finally:
            self._scope = before

    def begin_pass(self) -> None:
        """A forward pass begins, of which no action has told."""
        if not self._told:
            self._begin("forward")

    def began(self, action: Action) -> None:
        """A rank of a pipeline, which runs one pass at a time, begins an action."""
        self._told = True
        self._begin(action.kind)

    def _begin(self, kind: str) -> None:
        self._notice()  # that the last one has ended
        self._passes += kind == "forward"
        self._start(f"{kind} {self._passes}")

    def sent(
        self, axis: str, op: str, size: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool
    ) -> None:
        """A collective puts `size` bytes of this rank on the wire; without `wait` the caller goes on meanwhile."""
        self._starts[-1][2].sent[axis, op, wait] += size
        self._starts[-1][2].calls[axis, op, wait] += 1
        if axis not in (*SHARD_AXES, DENSE) or op == "all_to_all":  # which tokens go by
            return
        for x in (*inputs, *outputs):
            block = self._live.get(_storage(x))
            if block is None or block.kind in (STATE, BATCH, HOST, AWAY, GRADIENTS):
                continue
            scattered = op == "reduce_scatter" and any(x is y for y in outputs)
            block.kind = GRADIENTS if scattered else GATHERED
            if op == "reduce_scatter":  # whole gradients, that are copied together to be added up
                for source in self._sources.get(_storage(x), ()):
                    source.kind = GATHERED if source.kind in (ACTIVATIONS, LOGITS) else source.kind

    # what is seen

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles inside, and keeping the compiler out takes longer than most operations

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
        if work is not None:
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
        """Whether a backward pass begins or has ended: what it made and left behind are gradients."""
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

    # what is read

    def phases(self) -> list[Phase]:
        """Everything that has happened, in order."""
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
        """What lives where most does; `live` is brought up to the end."""
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
    """`func(*args, **kwargs)`; of tensors with no data by what computes them, without torch's two ways to it."""
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
