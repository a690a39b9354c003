"""A process group among the threads of one process."""

# pyright: reportIncompatibleMethodOverride=false
# torch's stubs name the parameters of its C++ classes differently than torch's calls
from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.utils import _pytree

Payload = Any
PATIENCE = 0.02  # seconds that a turn may last while another rank waits


class Stopped(RuntimeError):
    """Raised in a rank that cannot go on because of another one."""


class Turns:
    """Turns of ranks: one runs at a time, until it waits for others, since threads that contend for Python's lock take
    twice the CPU time. A rank that sleeps or waits outside a collective loses its turn."""

    def __init__(self) -> None:
        self._ended = threading.Condition()
        self._threads: set[int] = set()
        self._count = 0
        self._owner: int | None = None

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """A context in which the calling thread runs only during its turns."""
        self._threads.add(threading.get_ident())
        self.take()
        try:
            yield
        finally:
            self.give()
            self._threads.remove(threading.get_ident())

    def take(self) -> None:
        """Block until it is the calling thread's turn; outside of `shared`, return at once."""
        if (thread := threading.get_ident()) not in self._threads:
            return
        with self._ended:
            while self._owner is not None:
                count = self._count
                if not self._ended.wait(PATIENCE) and count == self._count:
                    break
            self._count, self._owner = self._count + 1, thread

    def give(self) -> None:
        """End the turn of the calling thread, so that another can begin. If it is not its turn, do nothing."""
        with self._ended:
            if self._owner == threading.get_ident():
                self._owner = None
                self._ended.notify()


class World:
    """The shared state of the ranks: which have ended, which wait in which collective, the turns, the first error."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.RLock()
        self.turns = Turns()
        self.meetings: list[Meeting] = []
        self.ended: set[int] = set()
        self.waiting: dict[int, str] = {}
        self.error: BaseException | None = None
        self.failed: int | None = None  # the rank with the first error

    def end(self, rank: int) -> None:
        """Record that the rank has returned."""
        with self.lock:
            self.ended.add(rank)
            self.find_deadlock()

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Record that the rank has raised; the others stop at their next collective. Only the first error is kept."""
        with self.lock:
            if self.error is None:
                self.error, self.failed = error, rank
            for meeting in self.meetings:
                meeting.changed.notify_all()

    def find_deadlock(self) -> None:
        """Fail if every rank waits or has ended, and some wait. The caller holds the lock."""
        if self.error is None and self.waiting and len(self.waiting) + len(self.ended) == self.size:
            states = [f"rank {r} {self.waiting.get(r, 'has ended')}" for r in range(self.size)]
            self.fail(None, Stopped(f"no rank of the simulated mesh can go on: {'; '.join(states)}"))


class Meeting:
    """The rendezvous of a group's ranks with their tensors; the last one to arrive computes for all."""

    def __init__(self, world: World, axis: str, ranks: Sequence[int]) -> None:
        self.world, self.axis, self.ranks = world, axis, tuple(ranks)
        self.changed = threading.Condition(world.lock)
        world.meetings.append(self)
        self.seats: dict[int, tuple[str, Payload]] = {}
        self.turn = 0
        # by source and target: tensors sent and not yet received, or receipts of tensors not yet sent
        self.sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.posted: dict[tuple[int, int], deque[Receipt]] = defaultdict(deque)

    def join(self, number: int, op: str, payload: Payload, work: Callable[[list[Payload]], None]) -> None:
        """Block until every rank has arrived for the collective `op` and `work(payloads)` is done; `number` is this
        rank's index in the group. Raises Stopped if another rank failed."""
        world, turn = self.world, self.turn
        with world.lock:
            if world.error is None:
                self.seats[number] = (op, payload)
                if len(self.seats) == len(self.ranks):
                    self._work(work)
                else:
                    world.waiting[self.ranks[number]] = f"waits in {op} over {self.axis!r}"
                    world.find_deadlock()
                    self.wait_for(lambda: self.turn != turn)
            if self.turn == turn:
                raise Stopped(f"{op} over {self.axis!r}: another rank failed") from world.error

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Block until `done()` is true or a rank has failed; meanwhile other ranks run. The caller holds the lock."""
        self.world.turns.give()
        self.changed.wait_for(lambda: done() or self.world.error is not None)
        self.world.lock.release()  # the rank whose turn it is may need it
        try:
            self.world.turns.take()
        finally:
            self.world.lock.acquire()

    def _work(self, work: Callable[[list[Payload]], None]) -> None:
        ops = [self.seats[r][0] for r in range(len(self.ranks))]
        if len(set(ops)) > 1:
            calls = "; ".join(f"rank {rank} called {op}" for rank, op in zip(self.ranks, ops, strict=True))
            raise RuntimeError(f"the ranks of {self.axis!r} call different collectives: {calls}")
        with torch.no_grad():
            work([self.seats[r][1] for r in range(len(self.ranks))])
        self.seats = {}
        for rank in self.ranks:
            self.world.waiting.pop(rank, None)
        self.turn += 1
        self.changed.notify_all()

    def send(self, source: int, target: int, x: Tensor) -> None:
        """Leave a copy of `x` for the rank `target`, without waiting. Tensors between two ranks arrive in order."""
        with self.world.lock:
            if self.posted[source, target]:
                self.posted[source, target].popleft().fill(x)
            else:
                self.sent[source, target].append(x.clone())

    def receive(self, source: int, target: int, buffer: Tensor) -> Receipt:
        """Post a receive of the next tensor from `source` to `target` into the memory of `buffer`, without waiting."""
        with self.world.lock:
            receipt = Receipt(self, source, target, buffer)
            if self.sent[source, target]:
                receipt.fill(self.sent[source, target].popleft())
            else:
                self.posted[source, target].append(receipt)
        return receipt


class Receipt:
    """The handle of a posted receive."""

    def __init__(self, meeting: Meeting, source: int, target: int, buffer: Tensor) -> None:
        self._meeting, self._source, self._rank, self._place = meeting, source, meeting.ranks[target], buffer
        self._filled = self._waits = False

    def fill(self, x: Tensor) -> None:
        """Copy the received tensor to its place. The caller holds the lock."""
        if (x.dtype, x.shape) != (self._place.dtype, self._place.shape):
            raise RuntimeError(f"{self._about()}: {_of('a send', x)} meets {_of('a receive', self._place)}")
        with torch.no_grad():
            self._place.copy_(x)
        self._filled, world = True, self._meeting.world
        if self._waits:
            world.waiting.pop(self._rank)
            self._meeting.changed.notify_all()

    def wait(self) -> None:
        """Block until the tensor is received. Raises Stopped if another rank failed."""
        world = self._meeting.world
        with world.lock:
            if not self._filled and world.error is None:
                self._waits, world.waiting[self._rank] = True, f"waits in a {self._about()}"
                world.find_deadlock()
                self._meeting.wait_for(lambda: self._filled)
            if not self._filled:
                raise Stopped(f"{self._about()}: another rank failed") from world.error

    def is_completed(self) -> bool:
        """Whether the tensor is received."""
        return self._filled

    def _about(self) -> str:
        return f"receive from rank {self._meeting.ranks[self._source]} over {self._meeting.axis!r}"


_SUM = dist.ReduceOp.SUM
_COMBINE = (
    (_SUM, torch.Tensor.add_),
    (dist.ReduceOp.AVG, torch.Tensor.add_),
    (dist.ReduceOp.MAX, lambda x, y: x.copy_(torch.maximum(x, y))),
    (dist.ReduceOp.MIN, lambda x, y: x.copy_(torch.minimum(x, y))),
    (dist.ReduceOp.PRODUCT, torch.Tensor.mul_),
)


def _reduced(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """Reduce tensors in the order of the ranks."""
    combine = next((fn for known, fn in _COMBINE if op == known), None)
    if combine is None:
        name = next((name for name, known in dist.ReduceOp.RedOpType.__members__.items() if op == known), op)
        raise ValueError(f"the simulated mesh does not reduce by {name}; it knows SUM, AVG, MAX, MIN and PRODUCT")
    total = tensors[0].clone()
    for x in tensors[1:]:
        combine(total, x)
    return total.div_(len(tensors)) if op == dist.ReduceOp.AVG else total


def _done() -> Any:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result([])
    return _create_work_from_future(future)


def _of(op: str, *tensors: Tensor) -> str:
    """Describe a call of the collective `op`; the description must be equal on all ranks."""
    return f"{op} of {', '.join(f'{x.dtype} {list(x.shape)}' for x in tensors)}"


def _refuse_devices(op: str, payload: Payload) -> None:
    """Raise ValueError for tensors outside the CPU: torch runs all backward passes on a GPU in one thread, where the
    ranks would wait for each other forever."""
    for x in _pytree.tree_leaves(payload):
        if isinstance(x, Tensor) and x.device.type != "cpu":
            raise ValueError(
                f"{op} on {x.device}: a simulated mesh runs on CPUs; make its models and tensors there, or start a "
                "process for each rank, as torchrun does"
            )


def _pieces(x: Tensor, sizes: Sequence[int], count: int) -> list[Tensor]:
    """Split `x` along its first dimension into parts of these `sizes`; if there are none, into `count` equal parts."""
    return list(x.split(list(sizes) if len(sizes) else [x.shape[0] // count] * count))


class ThreadGroup(dist.ProcessGroup):
    """One rank's process group for torch.distributed's functions; its collectives run at a `Meeting` of threads."""

    def __init__(self, meeting: Meeting, number: int) -> None:
        super().__init__(number, len(meeting.ranks))  # type: ignore[call-arg]
        self._meeting, self._number, self._count = meeting, number, len(meeting.ranks)

    def __deepcopy__(self, memo: dict) -> ThreadGroup:
        return self

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group."""
        return self._meeting.ranks

    def size(self) -> int:
        return self._count

    def rank(self) -> int:
        return self._number

    def _join(self, op: str, payload: Payload, work: Callable[[list[Payload]], None]) -> Any:
        _refuse_devices(op, payload)
        self._meeting.join(self._number, op, payload, work)
        return _done()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        op = _SUM if opts is None else opts.reduceOp

        def work(all_tensors: list[list[Tensor]]) -> None:
            for tensors in zip(*all_tensors, strict=True):
                total = _reduced(tensors, op)
                for part in tensors:
                    part.copy_(total)

        return self._join(_of("all_reduce", *tensors), [x.detach() for x in tensors], work)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        def work(all_tensors: list[list[Tensor]]) -> None:
            for tensors in zip(*all_tensors, strict=True):
                tensors[opts.rootRank].copy_(_reduced(tensors, opts.reduceOp))

        return self._join(_of("reduce", *tensors), [x.detach() for x in tensors], work)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        def work(all_tensors: list[list[Tensor]]) -> None:
            for tensors in zip(*all_tensors, strict=True):
                for part in tensors:
                    part.copy_(tensors[opts.rootRank])

        return self._join(_of("broadcast", *tensors), [x.detach() for x in tensors], work)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        def work(payloads: list[tuple[list[Tensor], Tensor]]) -> None:
            for places, _ in payloads:
                for place, (_, x) in zip(places, payloads, strict=True):
                    place.copy_(x)

        return self._join("all_gather (list)", ([x.detach() for x in outputs[0]], inputs[0].detach()), work)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        def work(payloads: list[tuple[Tensor, Tensor]]) -> None:
            whole = torch.cat([x.flatten() for _, x in payloads])
            for place, _ in payloads:
                place.copy_(whole.view(place.shape))

        return self._join(_of("all_gather", input), (output.detach(), input.detach()), work)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        op = _SUM if opts is None else opts.reduceOp

        def work(payloads: list[tuple[Tensor, list[Tensor]]]) -> None:
            for number, (place, _) in enumerate(payloads):
                place.copy_(_reduced([tensors[number] for _, tensors in payloads], op))

        return self._join(_of("reduce_scatter", *outputs), (outputs[0].detach(), [x.detach() for x in inputs[0]]), work)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        tensors = input.detach().reshape(self._count, *output.shape)
        return self.reduce_scatter([output], [list(tensors.unbind(0))], opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Any:
        places, tensors = _pieces(output.detach(), received, self._count), _pieces(input.detach(), sent, self._count)
        return self.alltoall(places, tensors, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        def work(payloads: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            for number, (places, _) in enumerate(payloads):
                for place, (_, tensors) in zip(places, payloads, strict=True):
                    place.copy_(tensors[number])

        return self._join("all_to_all", ([x.detach() for x in outputs], [x.detach() for x in inputs]), work)

    def barrier(self, opts: Any = None) -> Any:
        return self._join("barrier", None, lambda _: None)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Any:
        _refuse_devices("send", tensors)
        self._meeting.send(self._number, target, tensors[0].detach())
        return _done()

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        _refuse_devices("receive", tensors)
        return self._meeting.receive(source, self._number, tensors[0].detach())

    # the names before torch 2.13
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
