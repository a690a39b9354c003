"""A question that may never be answered, in a process of its own."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")


def in_process(fn: Callable[[A], R], asked: A, *, limit: float, imports: Sequence[str] = ()) -> R | str:
    """What `fn` says; or why it said nothing, if its process ends or takes more than `limit` seconds. What the first
    call `imports` no process has to import again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imports))
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(there, fn, asked))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(limit) else f"its checks take more than {limit:g} s"
    except EOFError:
        process.join()
        return f"its checks end the process (exit code {process.exitcode})"
    finally:
        process.kill()
        process.join()


def _tell(there: Connection, fn: Callable[[A], R], asked: A) -> None:
    there.send(fn(asked))
