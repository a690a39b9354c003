"""The process that runs reward functions: it imports as little as it can, and it ends with its parent."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from fppo.workers.calls import Mode, call
from fppo.workers.sample import Outcome, Sample


def main(descriptor: int, parent: int) -> None:
    """Answers the parent until it closes the connection.

    First come the functions, pickled; the answer is ("ready",) or ("failed", why). Then come tasks (number of the
    function, mode, samples); the answers are (number of the sample, outcome) and ("tick",), and ("done",) at the end.
    """
    _end_with(parent)
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        functions = [_load(data) for data in pickle.loads(connection.recv_bytes())]
    except BaseException as error:
        last = traceback.format_exception_only(error)[-1].strip()
        connection.send_bytes(pickle.dumps(("failed", last)))
        return
    connection.send_bytes(pickle.dumps(("ready",)))
    with asyncio.Runner() as loop:
        while True:
            try:
                function, mode, samples = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            _answer(connection, functions[function], Mode(*mode), [Sample(*s) for s in samples], loop)


def _load(data: bytes) -> Any:
    fn = pickle.loads(data)
    prepare = getattr(fn, "reward_prepare", None)
    if prepare is not None:
        prepare()  # slow imports, so that they do not count as the first sample's time
    return fn


def _answer(connection: Connection, fn: Any, mode: Mode, samples: list[Sample], loop: asyncio.Runner) -> None:
    def on_outcome(number: int, outcome: Outcome) -> None:
        connection.send_bytes(pickle.dumps((number, tuple(outcome))))

    call(fn, samples, mode, loop, on_outcome, lambda: connection.send_bytes(pickle.dumps(("tick",))))
    connection.send_bytes(pickle.dumps(("done",)))


def _end_with(parent: int) -> None:
    """Makes this process end when its parent does, even amid a loop that never looks up."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before this
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
