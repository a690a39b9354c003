"""Worker processes that can be killed: a sample that hangs costs its time limit and a new process, nothing else.

Pebble's ProcessPool kills what is overdue too, but its time limit is that of a whole task, whose results come together:
a chunk loses all its samples with the one that hangs, and coroutines run one by one. It sends the function with every
task instead of loading it once, and it kills the worker alone, not the processes that the function started.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import socket
import subprocess
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs

from fppo.runtime.clock import ProcessClock
from fppo.runtime.parent import kill_session, start_python
from fppo.workers.calls import Mode, Patience
from fppo.workers.channel import SECRET, Channel, ForeignBytes
from fppo.workers.sample import Outcome, Sample, UserFn

_SLACK = 1.0  # seconds that overdue coroutines have to end by themselves
_LOOK = 0.5  # seconds between two looks at the processes, at most
_REAP = 10.0  # seconds that a process which was killed may take to end
_CHUNK = 32  # samples in a task, at most
_Task = tuple[int, ...]  # numbers of samples


@attrs.define
class _Worker:
    process: subprocess.Popen[bytes]
    channel: Channel
    deadline: float  # of the pool's clock; until then it has to send something
    limit: float = 0.0  # seconds that its call may take
    ready: bool = False
    task: _Task | None = None
    open: list[int] = attrs.field(factory=list)  # the task's samples without an outcome, in order


@attrs.define
class _Run:
    """One function on many samples."""

    function: int
    mode: Mode
    samples: Sequence[Sample]
    patience: Patience
    pending: deque[_Task]
    outcomes: dict[int, Outcome] = attrs.field(factory=dict)


class WorkerPool:
    """At most `workers` processes that hold `functions`. They start when first needed, or at `start()`.

    Raises ValueError for a function that cannot be sent to another process, and later for one that does not load there;
    `role` is what errors call them.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, UserFn]],
        *,
        workers: int,
        start_limit: float,
        role: str = "reward",
    ) -> None:
        self._names = f"{role} {', '.join(name for name, _ in functions)}"
        self._functions = pickle.dumps([_portable(name, fn, role) for name, fn in functions])
        self._count, self._start_limit = workers, start_limit
        self._clock = ProcessClock(2 * _LOOK)
        self._workers: list[_Worker] = []
        self._closed = 0  # how often
        self._starter: ThreadPoolExecutor | None = None
        self._finalizer = weakref.finalize(self, _end, self._workers)  # runs at the interpreter's exit too

    def start(self) -> None:
        """Starts the processes without waiting for them."""
        while len(self._workers) < self._count:
            self._workers.append(self._started())

    def close(self) -> None:
        """Ends all processes, and what they started. A run under way in another thread fails; a later one starts new
        ones."""
        self._closed += 1
        _end(self._workers)
        starter, self._starter = self._starter, None
        if starter is not None:
            starter.shutdown(wait=False)

    def run(self, function: int, mode: Mode, samples: Sequence[Sample], patience: Patience) -> list[Outcome]:
        """The outcome of function number `function` on every sample, with the patience that is left for their batch. An
        interruption leaves no process behind."""
        tasks = deque(_tasks(len(samples), mode, self._count))
        run, closed = _Run(function, mode, samples, patience, tasks), self._closed
        try:
            while len(run.outcomes) < len(samples) or any(w.task is not None for w in self._workers):
                if self._closed != closed:
                    raise RuntimeError(f"the processes of the {self._names} were closed while they were at work")
                self._assign(run)
                self._wait(run)
        except BaseException:
            self.close()
            raise
        return [run.outcomes[number] for number in range(len(samples))]

    def _started(self) -> _Worker:
        ours, theirs = socket.socketpair()
        channel = Channel(ours, os.urandom(SECRET))
        arguments = [theirs.fileno(), channel.secret, os.getpid()]
        # on a thread that stays: the system ends a worker with the thread that started it
        self._starter = self._starter or ThreadPoolExecutor(1, "reward processes")
        process = self._starter.submit(
            start_python, "fppo.workers.process:main", *arguments, pass_fds=(theirs.fileno(),)
        ).result()
        theirs.close()
        with contextlib.suppress(OSError):  # if it died at once, the first wait says so
            channel.send(self._functions)
        return _Worker(process, channel, self._clock.now() + self._start_limit)

    def _assign(self, run: _Run) -> None:
        if run.patience.used_up:
            run.outcomes |= {number: run.patience.given_up() for task in run.pending for number in task}
            run.pending.clear()
        busy = sum(w.task is not None for w in self._workers)
        while len(self._workers) < min(self._count, len(run.pending) + busy):
            self._workers.append(self._started())
        for worker in list(self._workers):
            if not worker.ready or worker.task is not None or not run.pending:
                continue
            task = run.pending[0]
            try:
                chosen = [tuple(run.samples[number]) for number in task]
                worker.channel.send(pickle.dumps((run.function, tuple(run.mode), chosen)))
            except OSError:  # it died while idle, which is no sample's fault
                self._drop(worker)
                continue
            run.pending.popleft()
            worker.task, worker.open = task, list(task)
            self._await(worker, run)

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        _kill(worker)

    def _await(self, worker: _Worker, run: _Run) -> None:
        """Gives a worker until its next call has to be done, or until coroutines have to end by themselves."""
        slack = _SLACK if run.mode.asynchronous and run.mode.kind == "sample" else 0.0
        worker.limit = run.patience.limit
        worker.deadline = self._clock.now() + worker.limit + slack

    def _wait(self, run: _Run) -> None:
        waiting = [w for w in self._workers if w.task is not None or not w.ready]
        if not waiting:
            return
        patience = max(0.0, min(w.deadline for w in waiting) - self._clock.now())
        moved = _moved(waiting, min(patience, _LOOK))
        now = self._clock.now()
        for worker in waiting:
            try:
                if not (worker in moved and self._receive(worker, run)) and now >= worker.deadline:
                    self._overdue(worker, run)
            except (EOFError, ConnectionError):
                self._died(worker, run)
            except ForeignBytes as error:
                self._broken(worker, run, str(error))

    def _receive(self, worker: _Worker, run: _Run) -> bool:
        """Takes what a worker has said; whether it has said anything."""
        worker.channel.flush()
        messages = worker.channel.receive()
        for message in messages:
            match pickle.loads(message):
                case ("ready",):
                    worker.ready = True
                case ("failed", text):
                    raise ValueError(f"the {self._names} does not load in a worker process: {text}")
                case ("done",):
                    worker.task = None
                case (int(number), outcome) if worker.task is not None:
                    if worker.task[number] not in worker.open:
                        raise ForeignBytes("two outcomes of one sample")
                    run.outcomes[worker.task[number]] = Outcome(*outcome)
                    worker.open.remove(worker.task[number])
            self._await(worker, run)
        return bool(messages)

    def _died(self, worker: _Worker, run: _Run) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=1.0)
        code = worker.process.poll()
        if not worker.ready:
            raise ValueError(f"the process of the {self._names} ended with code {code} before it was ready")
        self._give_up(worker, run, Outcome("error", text=f"its process ended with code {code}"))

    def _broken(self, worker: _Worker, run: _Run, found: str) -> None:
        """Gives a worker up in whose channel somebody else has written."""
        text = f"it wrote to a descriptor that is not its own: the pool got {found}"
        if not worker.ready:
            raise ValueError(f"the {self._names}, as it was loaded: {text}")
        self._give_up(worker, run, Outcome("error", text=text))

    def _overdue(self, worker: _Worker, run: _Run) -> None:
        if not worker.ready:
            raise ValueError(f"the {self._names} did not load within {self._start_limit:g} s")
        self._give_up(worker, run, run.patience.overdue(worker.limit))

    def _give_up(self, worker: _Worker, run: _Run, outcome: Outcome) -> None:
        """Kills a worker. The sample that it was at gets `outcome`; where that is not known, halves are tried again."""
        left = worker.open
        self._drop(worker)
        if len(left) == 1 or (run.mode.kind == "sample" and not run.mode.asynchronous):
            run.outcomes |= {number: outcome for number in left[:1]}
            retry = [left[1:]]
        else:
            retry = [left[: len(left) // 2], left[len(left) // 2 :]]
        run.pending.extendleft(tuple(task) for task in reversed(retry) if task)


def _tasks(count: int, mode: Mode, workers: int) -> list[_Task]:
    """All samples for a function of a batch; else pieces small enough that the workers end together."""
    if mode.kind == "batch":
        size = count
    elif mode.asynchronous:
        size = -(-count // workers)
    else:
        size = min(_CHUNK, -(-count // (4 * workers)))
    numbers = range(count)
    return [tuple(numbers[i : i + size]) for i in range(0, count, max(size, 1))]


def _portable(name: str, fn: UserFn, role: str) -> bytes:
    """The function for another process: by the name of its module, or by value where there is none to import."""
    try:
        data = pickle.dumps(fn)
        if b"__main__" not in data:  # the worker's __main__ is not ours
            return data
    except (pickle.PicklingError, AttributeError, TypeError):
        pass
    import dill

    try:
        return dill.dumps(fn, recurse=True)  # with the globals that it uses, not all that there are
    except Exception as error:
        raise ValueError(
            f"the {role} {name!r} cannot be sent to a worker process ({error}); define it at the top of a module"
            + (", or mark it with inline_reward" if role == "reward" else "")
        ) from error


def _moved(workers: Sequence[_Worker], limit: float) -> list[_Worker]:
    """The workers that have sent something, or can be sent what is left for them, within `limit` seconds."""
    with selectors.PollSelector() as selector:
        for worker in workers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.channel.unsent else 0)
            selector.register(worker.channel, events, worker)
        return [key.data for key, _ in selector.select(limit)]


def _end(workers: list[_Worker]) -> None:
    while workers:
        worker = workers.pop()
        worker.channel.close()  # an idle one ends by itself
        if worker.task is None and worker.ready:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=1.0)
        _kill(worker)


def _kill(worker: _Worker) -> None:
    worker.channel.close()
    kill_session(worker.process)
    with contextlib.suppress(subprocess.TimeoutExpired):  # the system has it, as amid a read from a disk that is away
        worker.process.wait(timeout=_REAP)
