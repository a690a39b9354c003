"""Watched process groups: traffic over each axis, time spent waiting, and the collective that a rank waits for."""

# pyright: reportIncompatibleMethodOverride=false
# torch's stubs name the parameters of its C++ classes differently than torch's calls
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from fppo import devices
from fppo.runtime.mesh import Mesh
from fppo_kernels.collectives import Axis


class Traffic(NamedTuple):
    """A rank's traffic over an axis: collectives, bytes sent, and seconds spent waiting.

    On a GPU the seconds are the idle time of the computing stream.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def since(self, before: Traffic) -> Traffic:
        """The traffic since `before`."""
        return Traffic(self.calls - before.calls, self.bytes - before.bytes, self.seconds - before.seconds)


class WaitingCollective(NamedTuple):
    """The collective `op` that a rank waits for: the `number`th over its axis, since `since` on the monotonic clock. A
    message between two ranks has their line from `Watch.message` as axis."""

    axis: str
    op: str
    number: int
    since: float


class _Stall(NamedTuple):
    """A wait queued on a GPU, between two of its events."""

    waiting: WaitingCollective
    start: Any
    end: Any


def wire_bytes(op: str, size: int, ranks: int) -> int:
    """The bytes that a rank sends in the collective `op`, as "all_reduce", over `ranks` ranks, by the ring algorithms.

    `size` is the bytes of the whole tensor: the gathered result, the tensor before it is scattered, the reduced tensor.
    An all-reduce is a reduce-scatter and an all-gather.
    """
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return size * (ranks - 1) // ranks
    if op == "all_reduce":
        return 2 * (size * (ranks - 1) // ranks)
    return size if op in ("broadcast", "reduce", "send") else 0


class Watch:
    """The counts of one rank's watched groups. Other threads may read them at any time."""

    def __init__(self, ranks: Mapping[str, Sequence[int]], coordinates: str = "") -> None:
        self.ranks = {axis: tuple(line) for axis, line in ranks.items()}  # global ranks by axis, or by line
        self.place = coordinates  # this rank's coordinates on the axes, as text
        self.waiting: WaitingCollective | None = None
        self.error: RuntimeError | None = None  # the error of the failed collective, which `waiting` still describes
        self.step = 0  # the last finished step, set by the training loop
        self.thread = 0  # the id of the thread that waited last
        self._traffic = dict.fromkeys(ranks, Traffic())
        self._messages: dict[str, int] = {}  # by line
        self._stalls: deque[_Stall] = deque()
        self._lock = threading.Lock()

    def traffic(self) -> dict[str, Traffic]:
        """The traffic by axis since the start."""
        with self._lock:
            self._drain()
            return dict(self._traffic)

    def oldest(self) -> WaitingCollective | None:
        """The collective with the longest current wait, by this process or on its GPU."""
        with self._lock:
            self._drain()
            queued = [self._stalls[0].waiting] if self._stalls else []
        now = self.waiting
        return min([*queued, *([now] if now is not None else [])], key=lambda waiting: waiting.since, default=None)

    def count(self, axis: str, size: int) -> int:
        """Count a collective that sends `size` bytes, and return its number over the axis, from 1."""
        with self._lock:
            calls, before, seconds = self._traffic[axis]
            self._traffic[axis] = Traffic(calls + 1, before + size, seconds)
            return calls + 1

    def message(self, axis: str, size: int, source: int, target: int) -> tuple[str, int]:
        """Count a message, at either of its two ranks. Returns its line, the axis with both ranks as text, and its
        number on that line, from 1."""
        line = f"{axis} from rank {source} to rank {target}"
        self.count(axis, size)
        with self._lock:
            self.ranks[line] = (source, target)
            number = self._messages[line] = self._messages.get(line, 0) + 1
        return line, number

    def begun(self) -> dict[str, int]:
        """The numbers of collectives and messages begun, by axis and by line."""
        with self._lock:
            return {axis: traffic.calls for axis, traffic in self._traffic.items()} | self._messages

    def wait(self, about: tuple[str, str, int], device: torch.device | None, call: Callable[[], Any]) -> Any:
        """Run `call`, which waits for the collective `about` (axis, name, number), and count the wait."""
        waiting = WaitingCollective(*about, time.monotonic())
        self.waiting, self.error, self.thread = waiting, None, threading.get_ident()
        start = _event(device)
        try:
            result = call()
        except RuntimeError as error:
            self.error = error  # torch.distributed replaces it by an error of its log
            raise
        except BaseException:
            self.waiting = None
            raise
        self.waiting = None
        with self._lock:
            self._drain()
            if start is None:
                self._add(waiting.axis, time.monotonic() - waiting.since)
            else:
                self._stalls.append(_Stall(waiting, start, _event(device)))
        return result

    def _add(self, line: str, seconds: float) -> None:
        axis = line.partition(" ")[0]
        calls, size, before = self._traffic[axis]
        self._traffic[axis] = Traffic(calls, size, before + seconds)

    def _drain(self) -> None:
        """Count the finished waits of a GPU. The caller holds the lock."""
        while self._stalls and self._stalls[0].end.query():
            waiting, start, end = self._stalls.popleft()
            self._add(waiting.axis, start.elapsed_time(end) / 1000)


def _event(device: torch.device | None) -> Any:
    """An event in the computing stream of an accelerator; None elsewhere."""
    if device is None or not devices.kind_of(device).streams:
        return None
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


class _Work:
    """The handle of a collective, whose wait is watched."""

    def __init__(self, work: Any, watch: Watch, about: tuple[str, str, int], device: torch.device | None) -> None:
        self._work, self._watch, self._about, self._device = work, watch, about, device

    def wait(self, *limit: Any) -> Any:
        """Wait until it is done; on a GPU, until later work in the stream is ordered after it."""
        return self._watch.wait(self._about, self._device, lambda: self._work.wait(*limit))

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self._work.is_completed()


class RelayGroup(dist.ProcessGroup):
    """A process group that forwards to `group` through `_call`. The functions of torch.distributed call its methods."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.group, self._size = group, group.size()

    def __deepcopy__(self, memo: dict) -> RelayGroup:
        return self

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self.group.rank()

    def _call(
        self, op: str, whole: Sequence[Tensor], call: Callable[..., Any], *args: Any, sent: int | None = None
    ) -> Any:
        """Run the collective `op` as `call(*args)`; the last of `args` are its options, or None.

        `sent` is the number of bytes that this rank sends, by default `wire_bytes` of the tensors `whole`.
        """
        raise NotImplementedError

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._call("all_reduce", tensors, self.group.allreduce, tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._call("reduce", tensors, self.group.reduce, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._call("broadcast", tensors, self.group.broadcast, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._call("all_gather", outputs[0], self.group.allgather, outputs, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        call = getattr(self.group, "all_gather_single", None) or self.group._allgather_base
        return self._call("all_gather", [output], call, output, input, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        return self._call("reduce_scatter", inputs[0], self.group.reduce_scatter, outputs, inputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        call = getattr(self.group, "reduce_scatter_single", None) or self.group._reduce_scatter_base
        return self._call("reduce_scatter", [input], call, output, input, opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Any:
        call = getattr(self.group, "all_to_all_single", None) or self.group.alltoall_base
        size = None
        if len(sent):
            size = (len(input) - sent[self.rank()]) * input[:1].numel() * input.element_size()
        return self._call("all_to_all", [input], call, output, input, received, sent, opts, sent=size)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        size = sum(x.numel() * x.element_size() for r, x in enumerate(inputs) if r != self.rank())
        return self._call("all_to_all", inputs, self.group.alltoall, outputs, inputs, opts, sent=size)

    def barrier(self, opts: Any = None) -> Any:
        return self._call("barrier", [], self.group.barrier, opts)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Any:
        size = sum(x.numel() * x.element_size() for x in tensors)
        return self._call("send", tensors, self.group.send, tensors, target, tag, sent=size)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        return self._call("receive", tensors, self.group.recv, tensors, source, tag, sent=0)

    # the names before torch 2.13
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def without_default(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a collective; without the last, its options, if None, since a collective has defaults."""
    return args if args[-1] is not None else args[:-1]


class WatchedGroup(RelayGroup):
    """A process group with watched collectives over an axis."""

    def __init__(self, group: Any, axis: str, watch: Watch) -> None:
        super().__init__(group)
        self._axis, self._watch = axis, watch

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group."""
        return tuple(_ranks(self.group))

    def _call(
        self, op: str, whole: Sequence[Tensor], call: Callable[..., Any], *args: Any, sent: int | None = None
    ) -> Any:
        if sent is None:
            sent = wire_bytes(op, sum(x.numel() * x.element_size() for x in whole), self._size)
        about = self._axis, op, self._watch.count(self._axis, sent)
        device = whole[0].device if whole else None
        ahead = getattr(args[-1], "asyncOp", False)  # groups of threads wait in the call all the same
        work = self._watch.wait(about, None if ahead else device, lambda: call(*without_default(args)))
        return None if work is None else _Work(work, self._watch, about, device)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Any:
        ends = self.ranks[self.rank()], self.ranks[target]
        return self._message("send", tensors, ends, lambda: self.group.send(tensors, target, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        ends = self.ranks[source], self.ranks[self.rank()]
        return self._message("receive", tensors, ends, lambda: self.group.recv(tensors, source, tag))

    def _message(self, op: str, tensors: Sequence[Tensor], ends: tuple[int, int], call: Callable[[], Any]) -> _Work:
        sent = sum(x.numel() * x.element_size() for x in tensors) if op == "send" else 0
        line, number = self._watch.message(self._axis, sent, *ends)
        return _Work(
            self._watch.wait((line, op, number), None, call), self._watch, (line, op, number), tensors[0].device
        )


def watched(mesh: Mesh) -> tuple[Mesh, Watch]:
    """The mesh with watched groups, and their watch. Results are the same bit for bit."""
    wide = {name: axis for name, axis in mesh.axes.items() if axis.size > 1}
    place = ", ".join(f"{name} {axis.rank}" for name, axis in wide.items())
    ranks = {name: _ranks(axis.group) for name, axis in wide.items()}
    watch = Watch(ranks, place if len(wide) > 1 or "pipeline" in wide else "")

    def watched_axis(name: str, axis: Axis) -> Axis:
        group, *lanes = (WatchedGroup(group, name, watch) for group in (axis.group, *axis.lanes.values()))
        return attrs.evolve(axis, group=group, lanes=dict(zip(axis.lanes, lanes, strict=True)))

    axes = {name: watched_axis(name, axis) for name, axis in wide.items()}
    return attrs.evolve(mesh, axes={**mesh.axes, **axes}), watch


def _ranks(group: Any) -> Sequence[int]:
    """The global ranks of a group; our own groups hold them."""
    own = getattr(group, "ranks", None)
    return dist.get_process_group_ranks(group) if own is None else own
