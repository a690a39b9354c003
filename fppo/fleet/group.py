"""Groups of ranks, and calls of functions on them."""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import attrs
import numpy as np
import torch
from torch import Tensor

from fppo.fleet.codec import CPU, PackedTree, pack, tensors_of, tree_of, unflatten
from fppo.fleet.held import HERE, Here, Lease, handles
from fppo.fleet.rank import PATIENCE, RankReply, RankRequest, Stayed, Stays
from fppo.runtime.clock import ProcessClock
from fppo.runtime.restarts import Lost

_GRACE = 5.0
_LOOK = 1.0  # longest sleep in seconds between two checks of the clock
_CALLS = 4096  # number of recent calls whose records are kept until they are queried


class RankLost(Lost):
    """Error for a rank whose process ended or did not start; the text says what is known about it."""


class GroupDied(Lost):
    """Error for the group named `group`, which lost its ranks. `Group.start` starts it again, unless `again` is False:
    then there was no room within the group's patience. `silent`: its ranks did not answer in time."""

    def __init__(self, group: str, text: str, *, again: bool = True, silent: bool = False) -> None:
        super().__init__(text, again=again)
        self.group, self.silent = group, silent


RankTimes = tuple[tuple[float, float], ...]  # the start and seconds of each rank's work, until its reply arrived


@attrs.frozen
class Call:
    """The times of the call `label` in seconds, by `time.perf_counter` of the controller, and the bytes of its
    arguments (`there`) and results (`back`)."""

    group: str
    label: str
    start: float
    seconds: float
    ranks: RankTimes
    there: int
    back: int


class Ranks(Protocol):
    """Protocol of processes that are the ranks of one mesh."""

    @property
    def count(self) -> int: ...

    def start(self) -> Sequence[str]:
        """Start all processes, or restart them; return a description of each one's location."""
        ...

    def send(self, request: RankRequest, large: Sequence[Tensor]) -> list[Future[RankReply]]:
        """Send a call, with the `large` tensors of its arguments, to every rank, after earlier calls. A future fails
        with RankLost if its rank is lost."""
        ...

    def stop(self) -> None:
        """Kill all processes, whatever they are doing."""
        ...


@attrs.frozen
class LocalGroup:
    """A stand-in for a group: this process is a single rank, and a call is a plain function call."""

    here: Here = attrs.field(factory=Here)

    def call(
        self,
        fn: Callable[..., Any],
        *args: Any,
        stays: Stays = (),
        label: str = "",
        on_host: bool = False,
        patience: float | None = None,
        on_item: Callable[[Any], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call `fn` in this process and return its result. With `on_item`, `fn` returns an iterator: `on_item` gets
        each item, and the result is None. The other parameters of `Group.call` have no effect."""
        del stays, label, on_host, patience
        named = {name: self.here if x is HERE else x for name, x in kwargs.items()}
        value = fn(*(self.here if x is HERE else x for x in args), **named)
        if on_item is None:
            return value
        for item in value:
            on_item(item)
        return None


class Group:
    """The ranks of one mesh, in their own processes. `life` counts how often they were started. Results of calls are
    placed on the controller's `device`.

    A call that takes more than `patience` seconds ends the group, and so does the loss of a rank. When a call fails on
    one rank, the others may wait for it: the group ends unless they are done within `grace` seconds. Every rank calls
    `begin` whenever it has started.
    """

    def __init__(
        self,
        name: str,
        ranks: Ranks,
        *,
        patience: float = PATIENCE,
        grace: float = _GRACE,
        device: torch.device = CPU,
        begin: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.device, self.life, self.places = name, device, 0, list[str]()
        self._ranks, self._patience, self._grace = ranks, patience, grace
        self._calls, self._forget, self._lock = 0, list[tuple[int, int]](), threading.Lock()
        self._lost: str | None = "it has not been started"
        self._made: deque[Call] = deque(maxlen=_CALLS)
        self._on_start = begin

    def __enter__(self) -> Group:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks."""
        self._end("it was closed")

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self._ranks.count

    def start(self) -> None:
        """Start all ranks, or restart them, which loses their values. Raises GroupDied if they do not start."""
        self._ranks.stop()
        self.life += 1
        self._forget.clear()
        try:
            self.places = list(self._ranks.start())
        except RankLost as error:
            self._end(str(error))
            raise GroupDied(self.name, f"group {self.name!r} did not start: {error}", again=error.again) from error
        self._lost = None
        if self._on_start is not None:
            self.call(self._on_start, label="begin")

    def call(
        self,
        fn: Any,
        *args: Any,
        stays: Stays = (),
        label: str = "",
        on_host: bool = False,
        patience: float | None = None,
        on_item: Callable[[Any], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call `fn(*args, **kwargs)` on every rank and return the result.

        Results whose numbers are in `stays`, or all with True, stay on the ranks: the caller gets their trees, with a
        `Held` in place of each leaf that is no plain value. Other results come from the first rank. For a `Held` of
        this group among the arguments, or as `fn`, each rank uses its own value, and for `HERE` the rank's `Here`.
        Tensors among the arguments are put on the rank's device, or stay `on_host`. `fn` must pickle, and must not
        write into its tensors; its first call is checked for that. Times and errors name the call by `label`, or else
        by `fn`.

        With `on_item`, `fn` returns an iterator, and `on_item` gets each item when it comes. An error in `on_item` ends
        the group, since its rank is in the middle of the call. `patience`, in place of the group's, is the time limit
        in seconds of the call, or of each item.

        Raises the error of `fn`, with a note that names the rank; ValueError for a handle of another group; GroupDied
        if a rank is lost, if the call takes too long, and for a handle from before the last start.
        """
        start = time.perf_counter()
        label = label or getattr(fn, "__name__", "") or getattr(getattr(fn, "func", None), "__name__", "a call")
        packed, large = pack((fn, args, kwargs), lambda lease: self._check_held(lease, label))
        number, sent = self._begin(packed, large, stays, label, on_host, streams=on_item is not None)
        value, ran, back = self._received(number, sent, label, patience or self._patience, on_item)
        there = _num_bytes(packed, large)
        self._made.append(Call(self.name, label, start, time.perf_counter() - start, ran, there, back))
        return value

    def calls(self) -> list[Call]:
        """The times and bytes of all calls since the last query, in order."""
        return [self._made.popleft() for _ in range(len(self._made))]

    def _begin(
        self, packed: PackedTree, large: Sequence[Tensor], stays: Stays, label: str, on_host: bool, *, streams: bool
    ) -> tuple[int, list[Future[RankReply]]]:
        """Send a call to all ranks: its function and arguments, `packed` and with the `large` tensors apart, options as
        of `call`, and whether the function `streams` items. Values whose handles have died since the last call are
        freed with it. Returns the call's number, and a future of each rank's reply."""
        with self._lock:  # calls from several threads must reach all ranks in one order, or their collectives deadlock
            self._check_alive(label)
            self._calls += 1
            number, forget = self._calls, tuple(self._forget)
            del self._forget[: len(forget)]
            return number, self._ranks.send(RankRequest(number, packed, stays, label, forget, on_host, streams), large)

    def _received(
        self,
        number: int,
        sent: list[Future[RankReply]],
        label: str,
        patience: float,
        on_item: Callable[[Any], None] | None,
    ) -> tuple[Any, RankTimes, int]:
        """Wait at most `patience` seconds for call number `number`, or for each item of its stream, which `on_item`
        gets. `sent` are the futures of the ranks' replies; errors name the call by `label`. Returns the result, the
        times of each rank's work, and the bytes that came back."""
        back = 0

        def value_of(reply: RankReply) -> Any:
            nonlocal back
            assert reply.packed is not None
            back += _num_bytes(reply.packed, reply.large)
            tensors = tensors_of(reply.packed, reply.large, device=self.device)
            handles_of = partial(self._handles, number)
            return tree_of(reply.packed, tensors, plain=lambda x: handles_of(x) if isinstance(x, Stayed) else x)

        def on_part(reply: RankReply) -> None:
            if on_item is not None and reply.packed is not None:
                on_item(value_of(reply))

        try:
            reply, ran = self._first(sent, label, patience, on_part)
        except BaseException:
            if on_item is not None:
                self._end(f"{label} was interrupted")
            raise
        return value_of(reply), ran, back

    def _check_held(self, lease: Lease, label: str) -> None:
        if lease.group != self.name:
            only = f"a value on the ranks of group {lease.group!r}, which only those ranks hold"
            raise ValueError(f"{label} runs on group {self.name!r}, but an argument is {only}")
        if lease.life != self.life:
            lost = f"is of start {lease.life} of group {self.name!r}, which has been started {self.life} times"
            raise GroupDied(self.name, f"{label}: an argument {lost}: its value is lost")

    def _handles(self, call: int, stayed: Stayed) -> Any:
        """Rebuild the tree of a result that stayed on the ranks, with handles in place of its values."""
        lease = Lease(self.name, self.life, call, stayed.part, self.device)
        weakref.finalize(lease, _forget, self._forget, self.life, self, (call, stayed.part))
        leaves = iter(stayed.plain), iter(handles(lease, sum(stayed.here)))
        return unflatten(stayed.outline, map(next, map(leaves.__getitem__, stayed.here)))

    def _check_alive(self, label: str) -> None:
        if self._lost is not None:
            raise GroupDied(self.name, f"group {self.name!r} cannot run {label}: {self._lost}")

    def _first(
        self, sent: list[Future[RankReply]], label: str, patience: float, on_part: Callable[[RankReply], None]
    ) -> tuple[RankReply, RankTimes]:
        """Wait for the futures `sent` of the replies of all ranks, at most `patience` seconds, or so many for each
        reply of a stream. Returns the first rank's last reply, and the times of each rank's work. `on_part` is called
        with each earlier reply of a stream; errors name the call by `label`."""
        came: dict[int, tuple[float, RankReply]] = {}
        failed: tuple[int, RankReply | RankLost] | None = None
        waiting, clock = {future: rank for rank, future in enumerate(sent)}, ProcessClock(2 * _LOOK)
        deadline = clock.now() + patience
        while waiting and (left := deadline - clock.now()) > 0:
            done = futures.wait(waiting, min(left, _LOOK), futures.FIRST_COMPLETED).done
            for rank, future in sorted((waiting.pop(future), future) for future in done):
                error = future.exception()
                if error is not None and not isinstance(error, RankLost):
                    raise error
                reply = error if isinstance(error, RankLost) else future.result()
                lost = isinstance(reply, RankLost)
                if lost or reply.error is not None:
                    if failed is None:
                        deadline = clock.now() + self._grace
                    if failed is None or (lost and not isinstance(failed[1], RankLost)):
                        failed = rank, reply  # the other ranks' errors follow from the loss of this one
                elif reply.next_reply is not None:
                    waiting[reply.next_reply] = rank
                    on_part(reply)
                    deadline = deadline if failed else clock.now() + patience
                else:
                    came[rank] = time.perf_counter(), reply
        if failed is None and not waiting:
            ran = [(at - reply.seconds, reply.seconds) for _, (at, reply) in sorted(came.items())]
            return came[0][1], tuple(ran)
        if failed is None:
            silent = self._names(sorted(waiting.values()))
            raise self._died(f"{label} was not done after {patience:g} s on {silent}", silent=True)
        raise self._error_of(*failed, label, waited=bool(waiting))

    def _error_of(self, rank: int, failure: RankReply | RankLost, label: str, *, waited: bool) -> BaseException:
        """Make the error of a call that failed on a rank. The group ends if the rank is lost, or if other ranks are
        still in the call (`waited`)."""
        if isinstance(failure, RankLost):
            return self._died(f"{self._names([rank])} was lost in {label}: {failure}")
        if waited:
            self._end(f"{label} failed on rank {rank}, and the others waited for it")
        assert failure.error is not None
        error = pickle.loads(failure.error)
        error.add_note(f"in {label}, on {self._names([rank])} of group {self.name!r}\n{failure.trace}")
        return error

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {i} of {self.ranks} ({self.places[i]})" for i in ranks)

    def _died(self, text: str, *, silent: bool = False) -> GroupDied:
        self._end(text)
        return GroupDied(self.name, f"group {self.name!r}: {text}", silent=silent)

    def _end(self, reason: str) -> None:
        self._lost = reason
        self._ranks.stop()


def _num_bytes(packed: PackedTree, large: Sequence[Tensor] | Sequence[np.ndarray]) -> int:
    """The bytes of a tree's tensors, those in `packed` and the `large` ones."""
    return packed.bytes.nbytes + sum(x.nbytes for x in large)


def _forget(into: list[tuple[int, int]], life: int, group: Group, key: tuple[int, int]) -> None:
    if group.life == life:
        into.append(key)


AnyGroup = Group | LocalGroup
LOCAL_GROUP = LocalGroup()


def on(group: AnyGroup, fn: Any, *, stays: Stays = (), label: str = "") -> Callable[..., Any]:
    """Bind `fn`, or the function behind a handle, to a group: calls of the returned function run on the group's ranks,
    as `Group.call` with `stays` and `label`."""
    if isinstance(group, LocalGroup):
        return fn

    def stage(*args: Any, **kwargs: Any) -> Any:
        return group.call(fn, *args, stays=stays, label=label, **kwargs)

    return stage


def at_once(work: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run all functions concurrently and return their results by name. Raises the first error once all have ended."""
    if len(work) < 2:
        return {name: do() for name, do in work.items()}
    grad = torch.is_grad_enabled()

    def run(do: Callable[[], Any]) -> Any:
        with torch.set_grad_enabled(grad):
            return do()

    with ThreadPoolExecutor(len(work)) as pool:
        results = {name: pool.submit(run, do) for name, do in work.items()}
    return {name: result.result() for name, result in results.items()}
