"""The process that runs reward functions: it imports as little as it can, and it ends with its parent."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

from fppo._errors import of_exit, words_of
from fppo.runtime.parent import end_with
from fppo.workers.calls import CoroutineCalls, Mode, OnOutcome, call
from fppo.workers.channel import WorkerChannel
from fppo.workers.sample import Outcome, Sample


def main(descriptor: str, secret: str, parent: str) -> None:
    """Answers the parent until it closes the channel.

    First come the functions, pickled; the answer is ("ready",) or ("failed", why). Then come tasks (number of the
    function, mode, samples with their numbers); the answers are (number of the sample, outcome) and ("tick",). While
    coroutines run, further tasks of the same function may come.
    """
    end_with(int(parent))
    channel = WorkerChannel(int(descriptor), bytes.fromhex(secret))
    try:
        functions = [_load(data) for data in pickle.loads(channel.receive())]
    except BaseException as error:
        last = of_exit(error) if isinstance(error, SystemExit) else words_of(error)
        channel.send(pickle.dumps(("failed", last)))
        return
    channel.send(pickle.dumps(("ready",)))
    with asyncio.Runner() as loop:
        while True:
            try:
                function, mode, samples = _task(channel)
                _answer(channel, functions[function], mode, samples, loop)
            except EOFError:
                return


def _task(channel: WorkerChannel) -> tuple[int, Mode, list[tuple[int, Sample]]]:
    function, mode, samples = pickle.loads(channel.receive())
    return function, Mode(*mode), [(number, Sample(*sample)) for number, sample in samples]


def _load(data: bytes) -> Any:
    fn = pickle.loads(data)
    prepare = getattr(fn, "reward_prepare", None)
    if prepare is not None:
        prepare()  # slow imports, so that they do not count as the first sample's time
    return fn


def _answer(
    channel: WorkerChannel, fn: Any, mode: Mode, samples: list[tuple[int, Sample]], loop: asyncio.Runner
) -> None:
    def on_outcome(number: int, outcome: Outcome) -> None:
        channel.send(pickle.dumps((number, tuple(outcome))))

    if mode.asynchronous and mode.kind == "sample":
        loop.run(_coroutines(channel, fn, mode, samples, on_outcome))
        return
    numbers, plain = zip(*samples, strict=True)
    call(
        fn,
        plain,
        mode,
        loop,
        lambda place, outcome: on_outcome(numbers[place], outcome),
        lambda: channel.send(pickle.dumps(("tick",))),
    )


async def _coroutines(
    channel: WorkerChannel, fn: Any, mode: Mode, samples: list[tuple[int, Sample]], on_outcome: OnOutcome
) -> None:
    """Runs coroutines, and those of tasks that come meanwhile. Raises EOFError once the pool has closed the channel."""
    calls, ended = CoroutineCalls(fn, mode, on_outcome), list[EOFError]()

    def add(samples: list[tuple[int, Sample]]) -> None:
        for number, sample in samples:
            calls.add(number, sample)

    def receive() -> None:
        try:
            add(_task(channel)[2])
        except EOFError as error:
            ended.append(error)
            loop.remove_reader(channel.fileno())

    loop = asyncio.get_running_loop()
    loop.add_reader(channel.fileno(), receive)
    try:
        add(samples)
        await calls.done()
    finally:
        loop.remove_reader(channel.fileno())
    if ended:
        raise ended[0]
