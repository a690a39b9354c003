"""Process groups that are watched: what goes over each axis, how long it takes, and what a rank waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs
import torch.distributed as dist
from torch import Tensor

from fppo.runtime.mesh import Mesh


class Traffic(NamedTuple):
    """What a rank has sent over an axis: collectives, bytes, and seconds in which it did nothing but wait for them."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def since(self, before: Traffic) -> Traffic:
        """What was sent after `before`."""
        return Traffic(self.calls - before.calls, self.bytes - before.bytes, self.seconds - before.seconds)


class Waiting(NamedTuple):
    """The collective that a rank is in: the `number`th over its axis, since `since` on the monotonic clock."""

    axis: str
    op: str
    number: int
    since: float


def wire_bytes(op: str, size: int, ranks: int) -> int:
    """Bytes that a rank sends in a collective over `ranks`, each with `size` bytes, by the ring algorithms.

    `size` is of the whole: what is gathered in the end, what there is before it is scattered, what is reduced. A
    reduction that all get is a reduce-scatter and an all-gather.
    """
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return size * (ranks - 1) // ranks
    if op == "all_reduce":
        return 2 * (size * (ranks - 1) // ranks)
    return size if op in ("broadcast", "reduce") else 0


class Watch:
    """What the watched groups of one rank have counted. Other threads may read it at any time."""

    def __init__(self, axes: Sequence[str]) -> None:
        self._traffic = dict.fromkeys(axes, Traffic())
        self.waiting: Waiting | None = None
        self.error: RuntimeError | None = None  # of the collective that failed; `waiting` says which
        self.step = 0  # the last step that is whole; whoever drives the steps sets it

    def traffic(self) -> dict[str, Traffic]:
        """By axis, since the start."""
        return dict(self._traffic)

    def enter(self, axis: str, op: str) -> None:
        """The rank begins to wait."""
        self.waiting = Waiting(axis, op, self._traffic[axis].calls, time.monotonic())

    def leave(self) -> None:
        """What it waited for has come."""
        assert self.waiting is not None
        axis, _, _, since = self.waiting
        calls, size, seconds = self._traffic[axis]
        self._traffic[axis] = Traffic(calls, size, seconds + time.monotonic() - since)
        self.waiting = None

    def count(self, axis: str, size: int) -> None:
        """A collective begins that sends `size` bytes."""
        calls, before, seconds = self._traffic[axis]
        self._traffic[axis] = Traffic(calls + 1, before + size, seconds)


class _Work:
    """A collective under way; waiting for it is watched."""

    def __init__(self, work: Any, watch: Watch, axis: str, op: str) -> None:
        self._work, self._watch, self._axis, self._op = work, watch, axis, op

    def wait(self, *limit: Any) -> Any:
        """Returns when it is done. On a GPU that is when it is queued, so its seconds are not counted."""
        self._watch.enter(self._axis, self._op)
        try:
            done = self._work.wait(*limit)
        except RuntimeError as error:
            self._watch.error = error  # torch.distributed raises another one, of its log
            raise
        self._watch.leave()
        return done

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self._work.is_completed()


class WatchedGroup(dist.ProcessGroup):
    """A group that does what `group` does. The functions of torch.distributed call these methods."""

    def __init__(self, group: Any, axis: str, watch: Watch) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.group, self._axis, self._watch = group, axis, watch

    def __deepcopy__(self, memo: dict) -> WatchedGroup:
        return self

    def size(self) -> int:
        return self.group.size()

    def rank(self) -> int:
        return self.group.rank()

    def _call(self, op: str, whole: Sequence[Tensor], call: Callable[..., Any], *args: Any) -> Any:
        size = sum(x.numel() * x.element_size() for x in whole)
        self._watch.count(self._axis, wire_bytes(op, size, self.size()))
        self._watch.enter(self._axis, op)  # a group among threads waits in the call itself
        given = args if args[-1] is not None else args[:-1]  # the options have defaults of their own
        work = call(*given)
        self._watch.leave()
        return _Work(work, self._watch, self._axis, op)

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
        return self._call("all_to_all", [input], call, output, input, received, sent, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._call("all_to_all", inputs, self.group.alltoall, outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._call("barrier", [], self.group.barrier, opts)

    # the names before torch 2.13
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def watched(mesh: Mesh) -> tuple[Mesh, Watch]:
    """The mesh with its groups watched, and what watches them. What they compute is the same, bit for bit."""
    wide = {name: axis for name, axis in mesh.axes.items() if axis.size > 1}
    watch = Watch(list(wide))
    groups = {name: attrs.evolve(axis, group=WatchedGroup(axis.group, name, watch)) for name, axis in wide.items()}
    return attrs.evolve(mesh, axes={**mesh.axes, **groups}), watch
