"""Ranks as processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import attrs
from torch import Tensor

from fppo.fleet.codec import Sent, array_of
from fppo.fleet.group import RankLost
from fppo.fleet.rank import Membership, Rank, RankReply, RankRequest, RankSpec
from fppo.fleet.shared import MOST, ArrayPlace, Parcel, PipeLane, put
from fppo.runtime.launch import visible
from fppo.runtime.parent import end_with, in_words, kill_session, start_python
from fppo.runtime.stores import LOOPBACK, listening, loopback_only, new_token

_METHOD = "forkserver"  # each rank is a copy of a process that has imported torch
_ON_GPUS = "spawn"  # imports in that process may already have queried CUDA's devices


class Processes:
    """The ranks of a mesh as processes of this machine: `Group("actor", Processes(RankSpec(count=2)))`.

    `gpus` are the numbers of each rank's GPUs on this machine; a rank sees no other GPUs. Functions that are sent must
    be importable, by the rules of multiprocessing. A tensor that several pools send is written once if they share one
    `sent`. With an `environment` each rank is a new Python with these variables alone; it may start processes, which
    end with it, and it prints to standard error.
    """

    def __init__(
        self,
        spec: RankSpec | None = None,
        *,
        gpus: Sequence[Sequence[int]] = (),
        sent: Sent[ArrayPlace] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._spec, self._environment = spec or RankSpec(), environment
        self.count, self._gpus = self._spec.count, list(gpus)
        self._children: list[_Child] = []
        self._sent = sent or Sent(put)

    def start(self) -> Sequence[str]:
        """Start the processes. Raises RankLost if one does not start."""
        if self._environment is None:
            context: Any = multiprocessing.get_context(_ON_GPUS if self._gpus else _METHOD)
            own = sorted(name for name in list(sys.modules) if name.partition(".")[0] == "fppo")
            context.set_forkserver_preload(own)
        else:
            context = _Pythons(self._environment)
        store, token = listening(), new_token()
        now = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = [visible(own, now) for own in self._gpus] or [None] * self.count
        members = [Membership(rank=i, spec=self._spec, token=token) for i in range(self.count)]
        self._children = [_Child(context, own, store.port, gpus) for own, gpus in zip(members, seen, strict=True)]
        self._store = store  # for the lifetime of the processes
        answers = {child.answer(): child.process.pid for child in self._children}
        # the first loss is reported: the other ranks wait for the lost one to join
        done, waiting = futures.wait(answers, self._spec.patience, futures.FIRST_EXCEPTION)
        for answer in done:
            answer.result()
        if waiting:
            pids = sorted(str(answers[answer]) for answer in waiting)
            raise RankLost(f"process {', '.join(pids)} was not up after {self._spec.patience:g} s", again=False)
        return [f"process {child.process.pid}" for child in self._children]

    def send(self, request: RankRequest, large: Sequence[Tensor]) -> list[Future[RankReply]]:
        """Send a call to every process, after earlier calls, with `large` in shared memory where that has room."""
        places = self._sent.refs(large)
        if places is None or len({place.memory for place in places}) > MOST:
            arrays = [array_of(x) for x in large]
            places = put(arrays) or arrays
        parcel = Parcel(pickle.dumps(request, pickle.HIGHEST_PROTOCOL), places)
        return [child.ask(parcel) for child in self._children]

    def stop(self) -> None:
        """Kill all processes, whatever they are doing."""
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.end()
        self._children = []


class _Child:
    """A child process, and a thread that resolves its replies in the order of the requests."""

    def __init__(self, context: Any, member: Membership, port: int, gpus: str | None) -> None:
        line, other = multiprocessing.Pipe()
        self._lane, self._member = PipeLane(line), (member, port)
        self.process = context.Process(target=_serve, args=(other, gpus), daemon=True)
        self._asked: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        self._over: RankLost | None = None  # error for all later requests
        begun: Future[None] = Future()
        threading.Thread(target=self._live, args=(other, begun), daemon=True).start()
        begun.result()

    def ask(self, parcel: Parcel) -> Future[Any]:
        """Send a request; return the future of its reply."""
        with contextlib.suppress(OSError):  # the listening thread reports the error
            self._lane.send(parcel)
        return self.answer()

    def answer(self) -> Future[Any]:
        """Return the future of the next reply."""
        future: Future[Any] = Future()
        self._asked.put(future)
        if self._over is not None:
            self._refuse(self._over)
        return future

    def end(self) -> None:
        """Wait for a process that was killed, and release its resources. No request may follow."""
        self.process.join()
        self._asked.put(None)

    def _live(self, other: Connection, begun: Future[None]) -> None:
        """Start the process and listen to it, in one thread: Linux ends a process with the thread that started it
        (`end_with`)."""
        try:
            self.process.start()
        except BaseException as error:
            begun.set_exception(error)
            return
        other.close()  # so that the connection closes when the process ends
        with contextlib.suppress(OSError):
            self._lane.send(Parcel(pickle.dumps(self._member), []))
        begun.set_result(None)
        lost = None
        while True:
            over, lost = self._pass_on(lost)
            if over:
                break
        self._over = lost or RankLost(f"process {self.process.pid} was stopped")
        self._refuse(self._over)
        self._lane.close()
        self.process.close()

    def _refuse(self, over: RankLost) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (future := self._asked.get_nowait()) is not None:
                    future.set_exception(over)

    def _pass_on(self, lost: RankLost | None) -> tuple[bool, RankLost | None]:
        """Wait for the next reply and resolve its future, without keeping a reference meanwhile. Returns whether there
        is nothing more to wait for, and the loss of the process, if any."""
        if (future := self._asked.get()) is None:
            return True, lost
        try:
            while lost is None:
                reply, large = self._lane.receive()
                future.set_result(answer := reply and reply.linked(large))
                if not (reply and reply.has_next):
                    return False, None
                future = answer.next_reply
                del reply, large, answer
        except (EOFError, OSError):
            self.process.join()
            lost = RankLost(f"process {self.process.pid} ended {in_words(self.process.exitcode)}")
        future.set_exception(lost)
        return False, lost


@attrs.frozen
class _Pythons:
    """A context of multiprocessing that starts new Python interpreters with an environment of their own."""

    environment: Mapping[str, str]

    def Process(self, *, args: tuple[Connection, None], **_: Any) -> _Python:
        """Start a process that serves the other end of a connection."""
        return _Python(args[0], self.environment)


class _Python:
    """A new Python interpreter, with the methods of multiprocessing.Process that are used here."""

    def __init__(self, line: Connection, environment: Mapping[str, str]) -> None:
        self._line, self._environment = line, environment

    def start(self) -> None:
        line = self._line.fileno()
        target = "fppo.fleet.processes:serve"
        self._process = start_python(target, line, os.getpid(), pass_fds=(line,), environment=self._environment)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.returncode

    def kill(self) -> None:
        kill_session(self._process)

    def join(self) -> None:
        self._process.wait()

    def close(self) -> None:
        pass


def serve(descriptor: str, parent: str) -> None:
    """Serve as a rank in a new Python interpreter, over the connection with this descriptor, until `parent` ends."""
    end_with(int(parent))
    _serve(Connection(int(descriptor)), None)


def _serve(line: Connection, gpus: str | None) -> None:
    """Serve as a rank over the connection `line`; the rank sees only the GPUs in `gpus` (None: no restriction)."""
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # CUDA reads the variable at its first use
    end_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C in a terminal is handled by the controller
    os.environ |= loopback_only()
    rank, lane = Rank(), PipeLane(line)
    (member, port), _ = lane.receive()
    rank.join(member, (LOOPBACK, port))
    lane.send(Parcel(pickle.dumps(None), []))
    while True:
        try:
            request, large = lane.receive()
        except (EOFError, ConnectionError):  # the controller has ended
            return
        replies = rank.stream(request, large) if request.streams else iter([rank.run(request, large)])
        del request, large  # free this call's arguments before the next call arrives
        for reply in replies:
            data = pickle.dumps(attrs.evolve(reply, large=[]), pickle.HIGHEST_PROTOCOL)
            lane.send(Parcel(data, put(reply.large) or reply.large))
            del reply
        del replies
