"""The process that runs reward functions: it imports as little as it can, and it ends with its parent."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

from fppo._errors import of_exit, words_of
from fppo.runtime.parent import end_with
from fppo.workers.calls import Mode, call
from fppo.workers.channel import WorkerChannel
from fppo.workers.sample import Outcome, Sample


def main(descriptor: str, secret: str, parent: str) -> None:
    """Answers the parent until it closes the channel.

    First come the functions, pickled; the answer is ("ready",) or ("failed", why). Then come tasks (number of the
    function, mode, samples); the answers are (number of the sample, outcome) and ("tick",), and ("done",) at the end.
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
                function, mode, samples = pickle.loads(channel.receive())
            except EOFError:
                return
            _answer(channel, functions[function], Mode(*mode), [Sample(*s) for s in samples], loop)


def _load(data: bytes) -> Any:
    fn = pickle.loads(data)
    prepare = getattr(fn, "reward_prepare", None)
    if prepare is not None:
        prepare()  # slow imports, so that they do not count as the first sample's time
    return fn


def _answer(channel: WorkerChannel, fn: Any, mode: Mode, samples: list[Sample], loop: asyncio.Runner) -> None:
    def on_outcome(number: int, outcome: Outcome) -> None:
        channel.send(pickle.dumps((number, tuple(outcome))))

    call(fn, samples, mode, loop, on_outcome, lambda: channel.send(pickle.dumps(("tick",))))
    channel.send(pickle.dumps(("done",)))
