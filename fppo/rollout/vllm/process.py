"""vLLM in a process of its own: weights go through shared memory, and a process that dies or hangs is noticed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
from torch import Tensor

from fppo.rollout.shared_memory import Place as Bytes
from fppo.rollout.shared_memory import SharedMemory, current_device
from fppo.rollout.sync import How, SyncError
from fppo.rollout.vllm.devices import EngineGpus, gpus_of
from fppo.rollout.vllm.host import NOT_FOR_VLLM, Answer, EngineDied, EngineFailure, Request, check_installed
from fppo.rollout.vllm.local import LocalHost
from fppo.rollout.vllm.options import VllmOptions
from fppo.runtime.clock import ProcessClock
from fppo.runtime.launch import Place, visible

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from fppo.rollout.vllm.process import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_BEAT = 0.5  # seconds between two signs of life
_GRACE = 10.0  # seconds to end in before it is killed
_ERRORS = {kind.__name__: kind for kind in (EngineDied, EngineFailure, SyncError, ValueError)}  # sent here from there


class ProcessHost:
    """A `Host` whose vLLM is in another process. Raises EngineDied, from any method, once that is gone or hangs."""

    def __init__(self, path: str, options: VllmOptions, *, dtype: str, trust_remote_code: bool) -> None:
        check_installed()
        self._options, gpus = options, _gpus(options)
        self._memory = SharedMemory.make()
        ours, theirs = Pipe()
        paths = [os.getcwd() if entry == "" else entry for entry in sys.path]
        self._connection = ours
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(theirs.fileno()), str(self._memory.file), json.dumps(paths)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=(theirs.fileno(), self._memory.file),
            start_new_session=True,
            env=_environment(gpus),
        )
        theirs.close()
        self._finalizer = weakref.finalize(self, _end, self._process, ours)
        try:
            alone = gpus is None or gpus.alone
            asked = {"dtype": dtype, "trust_remote_code": trust_remote_code, "alone": alone}
            self.limit = int(self._ask("start", path, options, asked, wait="start_patience"))
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Implement `LocalHost.call`."""
        return self._ask("call", method, *arguments, wait="start_patience")

    def begin_load(self, how: How, transfer: bool = False) -> None:
        """Implement `LocalHost.begin_load`."""
        self._ask("begin_load", how, transfer, wait="start_patience")

    def take_in(self, tensors: Mapping[str, Tensor]) -> None:
        """Implement `LocalHost.take_in`, through one piece of shared memory; `end_load` raises what goes wrong."""
        self._ask("take_in", self._memory.put(tensors), wait="start_patience")

    def end_load(self) -> tuple[dict[str, str], list[str]]:
        """Implement `LocalHost.end_load`."""
        return self._ask("end_load", wait="start_patience")

    def generate(self, request: Request, on_answer: Callable[[int, Answer], None]) -> None:
        """Implement `LocalHost.generate`; `on_answer` is called as rows end, so answers outlive the process."""
        self._send("generate", request)
        ended = False
        try:
            while not ended:
                kind, *rest = self._receive("patience")
                if kind == "row":
                    on_answer(rest[0], Answer(*rest[1]))
                ended = kind == "result"
        except BaseException:  # also one of `on_answer`: the rest of its answers has no reader
            self.close()
            raise

    def sleep(self) -> None:
        """Implement `LocalHost.sleep`."""
        self._ask("sleep")

    def wake(self, part: str) -> None:
        """Implement `LocalHost.wake`."""
        self._ask("wake", part)

    def close(self) -> None:
        """Ends the process and frees what it shares with this one."""
        self._finalizer()
        self._memory.close()

    def _ask(self, *message: Any, wait: str = "patience") -> Any:
        self._send(*message)
        kind, *rest = self._receive(wait)
        if kind != "result":
            raise EngineFailure(f"the process of vLLM answers out of turn: {kind}")
        return rest[0]

    def _send(self, *message: Any) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except OSError as error:
            raise self._died() from error

    def _receive(self, wait: str) -> tuple[Any, ...]:
        """The next message that is not a mere sign of life; an error there is raised here."""
        patience = getattr(self._options, wait)
        while True:
            try:
                if not self._waited(patience):
                    _end(self._process, self._connection, grace=0)
                    raise EngineDied(f"the process of vLLM gave no sign of life for {patience:g} s (setting: {wait})")
                message = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError) as error:
                raise self._died() from error
            if message[0] == "error":
                raise _ERRORS.get(message[1], EngineFailure)(message[2])
            if message[0] != "alive":
                return message

    def _waited(self, patience: float) -> bool:
        """Whether there is a message before that much time went by; not while this process, too, stood still."""
        clock = ProcessClock(2.0)
        while clock.now() < patience:
            if self._connection.poll(min(1.0, patience)):
                return True
        return False

    def _died(self) -> EngineDied:
        try:
            code = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            return EngineDied("the process of vLLM closed its connection")
        reason = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        hint = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return EngineDied(f"the process of vLLM ended {reason}{hint}")


def _gpus(options: VllmOptions) -> EngineGpus | None:
    """The GPUs for the process; None: it may see what this one does. Raises ValueError if there are too few."""
    on_gpu, place = torch.cuda.is_initialized(), Place.of_environment()
    if not (on_gpu or options.devices):
        return None
    own, count = torch.cuda.current_device() if on_gpu else None, torch.cuda.device_count()
    return gpus_of(options, own=own, count=count, engine=place.local_rank, engines=place.local_world)


def _environment(gpus: EngineGpus | None) -> dict[str, str]:
    """The process's environment, in which it sees its own GPUs alone."""
    variables = {name: value for name, value in os.environ.items() if name not in NOT_FOR_VLLM}
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible(gpus.numbers, variables.get("CUDA_VISIBLE_DEVICES"))
    return variables


def _end(process: subprocess.Popen[bytes], connection: Connection, grace: float = _GRACE) -> None:
    """Ends the process and what it started."""
    with contextlib.suppress(OSError):
        connection.close()  # which asks it to end
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(connection: int, memory: int) -> None:
    """Serves one `ProcessHost`, in a process started for that, until its connection closes."""
    server = _Server(Connection(connection), SharedMemory(memory))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            server.serve()
    sys.stderr.flush()
    os._exit(0)  # vLLM's threads and libraries have nothing to save


class _Server:
    """What runs beside vLLM: a `LocalHost` whose weights and answers take another way."""

    def __init__(self, connection: Connection, memory: SharedMemory) -> None:
        self._connection, self._memory = connection, memory
        self._host: LocalHost | None = None
        self._wrong: Exception | None = None
        self._replied_at = 0.0

    def serve(self) -> None:
        """Answers one request. What goes wrong is sent; a lost connection is raised."""
        request = self._next()
        try:
            method = getattr(self, request[0], None) or getattr(self._running, request[0])
            result = method(*request[1:])
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _ERRORS), "EngineFailure")
            known = isinstance(error, tuple(_ERRORS.values()))
            self._reply("error", kind, str(error) if known else "".join(traceback.format_exception(error)))
        else:
            if request[0] != "take_in":
                self._reply("result", result)

    def start(self, path: str, options: VllmOptions, rest: dict[str, Any]) -> int:
        """Starts vLLM; the longest prompt and response together."""
        self._host = LocalHost(path, options, **rest)
        return self._host.limit

    def begin_load(self, how: How, transfer: bool) -> None:
        self._wrong = None
        self._running.begin_load(how, transfer)

    def take_in(self, places: list[Bytes]) -> None:
        """Replies that the memory is free again, and only then loads: the trainer fills it meanwhile."""
        tensors = self._memory.get(places, current_device())
        self._reply("result", None)
        try:
            if self._wrong is None:
                self._running.take_in(tensors)
        except Exception as error:
            self._wrong = error

    def end_load(self) -> tuple[dict[str, str], list[str]]:
        if self._wrong is not None:
            raise self._wrong
        return self._running.end_load()

    def generate(self, request: Request) -> None:
        for row, answer in self._running.answers(request):
            if answer is not None:
                self._reply("row", row, tuple(answer))
            elif time.monotonic() - self._replied_at > _BEAT:
                self._reply("alive")

    @property
    def _running(self) -> LocalHost:
        if self._host is None:
            raise EngineFailure("vLLM has not started")
        return self._host

    def _next(self) -> tuple[Any, ...]:
        return pickle.loads(self._connection.recv_bytes())

    def _reply(self, *message: Any) -> None:
        self._replied_at = time.monotonic()
        self._connection.send_bytes(pickle.dumps(message))
