"""Worker processes that can be killed: a sample that hangs costs its time limit and a new process, nothing else.

Pebble's ProcessPool kills overdue tasks too, but its time limit is for a whole task, whose results come together: a
chunk loses all its samples with the one that hangs, and coroutines run one by one. It sends the function with every
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs

from fppo.runtime.clock import ProcessClock
from fppo.runtime.in_order import InOrder
from fppo.runtime.parent import kill_session, start_python
from fppo.workers.calls import Mode, Patience
from fppo.workers.channel import CUT, SECRET, Channel, ForeignBytes
from fppo.workers.sample import Outcome, Sample, UserFn

_SLACK = 1.0  # seconds that overdue coroutines have to end by themselves
_LOOK = 1.0  # seconds after which the clock counts the process as stopped
_SLICE = 0.05  # seconds that one run waits before another gets its turn
_REAP = 10.0  # seconds that a killed process may take to end
_CHUNK = 32  # samples in a task, at most
_Task = tuple[int, ...]  # numbers of samples


def start_worker() -> tuple[subprocess.Popen[bytes], Channel]:
    """Start a worker process, and return it with the channel to it."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, os.urandom(SECRET))
    arguments = [theirs.fileno(), channel.secret, os.getpid()]
    process = start_python("fppo.workers.process:main", *arguments, pass_fds=(theirs.fileno(),))
    theirs.close()
    return process, channel


def wait_for(channels: Sequence[Channel], limit: float) -> list[Channel]:
    """Wait up to `limit` seconds for channels on which something came, or that can take more of a message; return
    these."""
    with selectors.PollSelector() as selector:
        for channel in channels:
            selector.register(channel, selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.unsent else 0), channel)
        return [key.data for key, _ in selector.select(limit)]


@attrs.frozen
class System:
    """Functions of the operating system for a pool: to start, watch and kill processes, and a clock in seconds."""

    start: Callable[[], tuple[subprocess.Popen[bytes], Channel]] = start_worker
    wait: Callable[[Sequence[Channel], float], list[Channel]] = wait_for
    kill: Callable[[subprocess.Popen[bytes]], None] = kill_session
    now: Callable[[], float] = attrs.field(factory=lambda: ProcessClock(_LOOK).now)


@attrs.define
class _Worker:
    process: subprocess.Popen[bytes]
    channel: Channel
    deadline: float  # by the pool's clock: before it, the worker must send something
    limit: float = 0.0  # seconds that its call may take
    ready: bool = False
    run: PoolRun | None = None  # the run to which its samples belong
    open: list[int] = attrs.field(factory=list)  # samples without an outcome, in order


@attrs.define(eq=False)
class PoolRun:
    """One function run on many samples; more may be added. `new` ones are in no task yet, `pending` tasks have no
    worker."""

    function: int
    mode: Mode
    patience: Patience
    closed: int  # how many times the pool had been closed when it began
    samples: dict[int, Sample] = attrs.field(factory=dict)  # samples without an outcome
    new: list[int] = attrs.field(factory=list)
    pending: deque[_Task] = attrs.field(factory=deque)
    outcomes: dict[int, Outcome] = attrs.field(factory=dict)  # outcomes that nobody has taken
    suspects: set[int] = attrs.field(factory=set)  # samples of a task that cost a process: any of them may be at fault

    def put(self, number: int, sample: Sample) -> None:
        """Add a sample under a number that no open sample has."""
        self.samples[number] = sample
        self.new.append(number)

    def end(self, outcomes: Mapping[int, Outcome]) -> None:
        """Record outcomes; their samples are no longer open."""
        self.outcomes |= outcomes
        self.suspects -= outcomes.keys()
        for number in outcomes:
            self.samples.pop(number, None)


class WorkerPool:
    """At most `workers` processes that hold `functions`. They start when first needed, or at `start()`.

    Raises ValueError for a function that cannot be sent to another process, and later for one that does not load there;
    `role` is what errors call them. `system` starts, watches and kills the processes.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, UserFn]],
        *,
        workers: int,
        start_limit: float,
        role: str = "reward",
        system: System | None = None,
    ) -> None:
        self._system = system or System()
        self._names = f"{role} {', '.join(name for name, _ in functions)}"
        self._functions = pickle.dumps([_portable(name, fn, role) for name, fn in functions])
        self._count, self._start_limit = workers, start_limit
        self._workers: list[_Worker] = []
        self._closed = 0  # how often it was closed
        self._turn = InOrder()
        self._starter: ThreadPoolExecutor | None = None
        self._finalizer = weakref.finalize(
            self, _end, self._workers, self._system
        )  # runs at the interpreter's exit too

    def start(self) -> None:
        """Start the processes without waiting for them."""
        while len(self._workers) < self._count:
            self._workers.append(self._started())

    def close(self) -> None:
        """End all processes, and the processes that they started. A run in progress in another thread fails; a later
        run starts new processes."""
        self._closed += 1
        _end(self._workers, self._system)
        starter, self._starter = self._starter, None
        if starter is not None:
            starter.shutdown(wait=False)

    def run(self, function: int, mode: Mode, samples: Sequence[Sample], patience: Patience) -> list[Outcome]:
        """Call function number `function` on every sample, and return the outcomes. `patience` is the remaining
        patience with the samples' batch. An interruption leaves no process behind."""
        run, outcomes = self.begin(function, mode, patience), dict[int, Outcome]()
        for number, sample in enumerate(samples):
            run.put(number, sample)
        while len(outcomes) < len(samples):
            outcomes |= self.taken(run, wait=True)
        return [outcomes[number] for number in range(len(samples))]

    def begin(self, function: int, mode: Mode, patience: Patience) -> PoolRun:
        """Begin a run of function number `function`, to which samples are added later."""
        return PoolRun(function, mode, patience, self._closed)

    def taken(self, run: PoolRun, *, wait: bool) -> dict[int, Outcome]:
        """Advance a run and take its new outcomes; with `wait`, wait for at least one if any sample is open. Several
        threads may each have a run. An interruption leaves no process behind."""
        while True:
            with self._turn:
                try:
                    self._move(run, 0.0 if not wait or run.outcomes else _SLICE)
                except BaseException:
                    self.close()
                    raise
                if run.outcomes or not (wait and run.samples):
                    outcomes, run.outcomes = run.outcomes, {}
                    return outcomes

    def forget(self, run: PoolRun) -> None:
        """End a run. Processes that work for it are killed."""
        with self._turn:
            for worker in [worker for worker in self._workers if worker.run is run]:
                self._drop(worker)

    def _move(self, run: PoolRun, limit: float) -> None:
        if self._closed != run.closed:
            raise RuntimeError(f"the processes of the {self._names} were closed while they were at work")
        self._assign(run)
        self._wait(limit)
        self._assign(run)

    def _started(self) -> _Worker:
        # on a thread that stays: the system ends a worker with the thread that started it
        self._starter = self._starter or ThreadPoolExecutor(1, "reward processes")
        process, channel = self._starter.submit(self._system.start).result()
        with contextlib.suppress(OSError):  # if the process died at once, the first wait says so
            channel.send(self._functions)
        return _Worker(process, channel, self._system.now() + self._start_limit)

    def _assign(self, run: PoolRun) -> None:
        new, run.new = run.new, []
        run.pending += _tasks(new, run.mode, self._count)
        if run.patience.used_up:
            given_up = [number for task in run.pending for number in task]
            run.end({number: run.patience.given_up() for number in given_up})
            run.pending.clear()
        busy = sum(worker.run is not None for worker in self._workers)
        while len(self._workers) < min(self._count, len(run.pending) + busy):
            self._workers.append(self._started())
        while run.pending and (worker := self._free(run)) is not None:
            task = run.pending[0]
            try:
                chosen = [(number, tuple(run.samples[number])) for number in task]
                worker.channel.send(pickle.dumps((run.function, tuple(run.mode), chosen)))
            except OSError:  # the process died while idle, which is no sample's fault
                self._died(worker) if worker.open else self._drop(worker)
                continue
            run.pending.popleft()
            if not worker.open:
                self._await(worker, run)
            worker.run = run
            worker.open += task

    def _free(self, run: PoolRun) -> _Worker | None:
        """The least busy process that can take a task: an idle process, or one that runs coroutines of the same run."""
        grows = run.mode.asynchronous and run.mode.kind == "sample" and not run.suspects
        free = [w for w in self._workers if w.ready and (w.run is None or (grows and w.run is run))]
        return min(free, key=lambda worker: len(worker.open), default=None)

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        _kill(worker, self._system)

    def _await(self, worker: _Worker, run: PoolRun) -> None:
        """Set a worker's deadline: when its next call must be done, or when overdue coroutines must have ended."""
        slack = _SLACK if run.mode.asynchronous and run.mode.kind == "sample" else 0.0
        worker.limit = run.patience.limit
        worker.deadline = self._system.now() + worker.limit + slack

    def _wait(self, limit: float) -> None:
        waiting = [w for w in self._workers if w.run is not None or not w.ready]
        if not waiting:
            return
        patience = max(0.0, min(w.deadline for w in waiting) - self._system.now())
        moved = self._system.wait([worker.channel for worker in waiting], min(patience, limit))
        now = self._system.now()
        for worker in waiting:
            try:
                if not (worker.channel in moved and self._receive(worker)) and now >= worker.deadline:
                    self._overdue(worker)
            except (EOFError, ConnectionError):
                self._died(worker)
            except ForeignBytes as error:
                self._broken(worker, str(error))

    def _receive(self, worker: _Worker) -> bool:
        """Handle a worker's messages; return whether there were any."""
        worker.channel.flush()
        messages = worker.channel.receive()
        for message in messages:
            match pickle.loads(message):
                case ("ready",):
                    worker.ready = True
                case ("failed", text):
                    raise ValueError(f"the {self._names} does not load in a worker process: {text}")
                case (int(number), outcome) if worker.run is not None:
                    if number not in worker.open:
                        raise ForeignBytes("two outcomes of one sample")
                    worker.run.end({number: Outcome.of(outcome)})
                    worker.open.remove(number)
            if worker.run is not None:
                self._await(worker, worker.run)
                worker.run = worker.run if worker.open else None
        return bool(messages)

    def _died(self, worker: _Worker) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=1.0)
        code = worker.process.poll()
        how = "closed a descriptor that is not its own" if code == CUT else f"ended with code {code}"
        if not worker.ready:
            raise ValueError(f"the process of the {self._names} {how} before it was ready")
        self._give_up(worker, Outcome("error", text=f"its process {how}"))

    def _broken(self, worker: _Worker, problem: str) -> None:
        """Give up a worker whose channel contains bytes of someone else."""
        text = f"it wrote to a descriptor that is not its own: the pool got {problem}"
        if not worker.ready:
            raise ValueError(f"the {self._names}, as it was loaded: {text}")
        self._give_up(worker, Outcome("error", text=text))

    def _overdue(self, worker: _Worker) -> None:
        if not worker.ready or worker.run is None:
            raise ValueError(f"the {self._names} did not load within {self._start_limit:g} s")
        self._give_up(worker, worker.run.patience.overdue(worker.limit))

    def _give_up(self, worker: _Worker, outcome: Outcome) -> None:
        """Kill a worker. The sample at fault gets `outcome`; if it is not known which one that is, the open samples are
        tried again in two halves."""
        left, run = worker.open, worker.run
        self._drop(worker)
        if run is None:
            return
        if len(left) == 1 or (run.mode.kind == "sample" and not run.mode.asynchronous):
            run.end({number: outcome for number in left[:1]})
            retry = [left[1:]]
        else:
            retry = [left[: len(left) // 2], left[len(left) // 2 :]]
            run.suspects.update(left)
        run.pending.extendleft(tuple(task) for task in reversed(retry) if task)


def _tasks(numbers: Sequence[int], mode: Mode, workers: int) -> list[_Task]:
    """Divide samples into tasks: a single one if the function takes a batch, else tasks so small that the workers
    finish together."""
    count = len(numbers)
    if mode.kind == "batch":
        size = count
    elif mode.asynchronous:
        size = -(-count // workers)
    else:
        size = min(_CHUNK, -(-count // (4 * workers)))
    return [tuple(numbers[i : i + size]) for i in range(0, count, max(size, 1))]


def _portable(name: str, fn: UserFn, role: str) -> bytes:
    """Pickle a function for another process: by its module and name, or by value if it cannot be imported."""
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


def _end(workers: list[_Worker], system: System) -> None:
    while workers:
        worker = workers.pop()
        worker.channel.close()  # an idle process ends by itself
        if worker.run is None and worker.ready:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=1.0)
        _kill(worker, system)


def _kill(worker: _Worker, system: System) -> None:
    worker.channel.close()
    system.kill(worker.process)
    with contextlib.suppress(subprocess.TimeoutExpired):  # the process hangs in the kernel, as in reading a lost disk
        worker.process.wait(timeout=_REAP)
