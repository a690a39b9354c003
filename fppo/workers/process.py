"""The process that runs user functions: it imports as little as it can, and it ends with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
from types import FrameType
from typing import Any, NamedTuple

from fppo._errors import of_exit, words_of
from fppo.runtime.parent import end_with
from fppo.workers.calls import CoroutineCalls, Mode, OnOutcome, call
from fppo.workers.channel import CUT, WorkerChannel
from fppo.workers.sample import Outcome, Sample


def main(descriptor: str, secret: str, parent: str) -> None:
    """Answer the pool, in process `parent`, until it closes the channel with this descriptor and secret.

    First come the functions, pickled; the answer is ("ready",) or ("failed", why). Then come tasks (number of the
    function, mode, samples with their numbers); the answers are (number of the sample, outcome) and ("tick",). While
    coroutines run, further tasks of the same function may come.
    """
    end_with(int(parent))
    with contextlib.suppress(ValueError):  # threads handle no signals
        signal.signal(signal.SIGINT, _nothing)  # ctrl-C goes to the parent: a KeyboardInterrupt is the function's own
    channel = WorkerChannel(int(descriptor), bytes.fromhex(secret))
    try:
        _work(channel)
    except OSError:
        os._exit(CUT)  # without a message: user code closed or replaced its descriptors


def _work(channel: WorkerChannel) -> None:
    try:
        functions = [_load(data) for data in pickle.loads(channel.receive())]
    except BaseException as error:
        last = of_exit(error) if isinstance(error, SystemExit) else words_of(error)
        channel.send(pickle.dumps(("failed", last)))
        return
    channel.send(pickle.dumps(("ready",)))
    with asyncio.Runner() as loop:
        task = None
        while True:
            try:
                task = _answer(channel, functions, _task(channel) if task is None else task, loop)
            except EOFError:
                return


def _nothing(number: int, frame: FrameType | None) -> None:
    del number, frame


class _Task(NamedTuple):
    function: int
    mode: Mode
    samples: list[tuple[int, Sample]]


def _task(channel: WorkerChannel) -> _Task:
    function, mode, samples = pickle.loads(channel.receive())
    return _Task(function, Mode(*mode), [(number, Sample(*sample)) for number, sample in samples])


def _task_or_end(channel: WorkerChannel) -> _Task | EOFError:
    """The next task, or the error of a channel that the pool has closed."""
    try:
        return _task(channel)
    except EOFError as error:
        return error


def _load(data: bytes) -> Any:
    fn = pickle.loads(data)
    prepare = getattr(fn, "reward_prepare", None)
    if prepare is not None:
        prepare()  # slow imports, so that they do not count as the first sample's time
    return fn


def _answer(channel: WorkerChannel, functions: list[Any], task: _Task, loop: asyncio.Runner) -> _Task | None:
    """Run a task and send its outcomes. If a task of another function or mode comes meanwhile, it is returned."""
    fn, (_, mode, samples) = functions[task.function], task

    def on_outcome(number: int, outcome: Outcome) -> None:
        channel.send(pickle.dumps((number, tuple(outcome))))

    if mode.asynchronous and mode.kind == "sample":
        return loop.run(_coroutines(channel, fn, task, on_outcome))
    numbers, plain = zip(*samples, strict=True)
    call(
        fn,
        plain,
        mode,
        loop,
        lambda place, outcome: on_outcome(numbers[place], outcome),
        lambda: channel.send(pickle.dumps(("tick",))),
    )
    return None


async def _coroutines(channel: WorkerChannel, fn: Any, task: _Task, on_outcome: OnOutcome) -> _Task | None:
    """Run a task's coroutines, and those of further tasks of the same function and mode. The first other task ends the
    intake and is returned. Raises EOFError once the pool has closed the channel."""
    calls, loop = CoroutineCalls(fn, task.mode, on_outcome), asyncio.get_running_loop()
    last: list[_Task | EOFError] = []

    def receive() -> None:
        new = _task_or_end(channel)
        if isinstance(new, EOFError) or new[:2] != task[:2]:
            last.append(new)
            loop.remove_reader(channel.fileno())
            return
        add(new)

    def add(new: _Task) -> None:
        for number, sample in new.samples:
            calls.add(number, sample)

    loop.add_reader(channel.fileno(), receive)
    try:
        add(task)
        await calls.done()
    finally:
        loop.remove_reader(channel.fileno())
    for other in last:
        if isinstance(other, EOFError):
            raise other
        return other
    return None
