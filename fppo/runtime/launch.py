"""Launch processes on this machine, as torchrun does, and join them as a mesh."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import FrameType

import attrs
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fppo.runtime.failure import FAILED, MONITOR, Limits, Monitor, not_done
from fppo.runtime.mesh import SHARD_AXES, Mesh, Sharding, lines_of, with_dense, with_lanes
from fppo.runtime.parent import LAUNCHER
from fppo.runtime.restarts import Lost, Restarts
from fppo.runtime.stores import LOOPBACK, TOKEN, listening, loopback_only, new_token, own_keys
from fppo.runtime.watch import Watch, watched
from fppo_kernels.collectives import Axis

STOPPED = 130  # the exit status of a process that stopped on request
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # torchrun's variable: the number of restarts of all ranks
_GRACE = 15.0  # seconds in which ranks end by themselves once one has failed
_KILL = 5.0  # seconds from the request to the kill


@attrs.frozen
class Place:
    """The rank of this process, and the world that it belongs to."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    local_world: int = 1  # the number of ranks on this machine
    started: bool = False  # whether a launcher of several processes started it
    attempt: int = 0  # the number of earlier starts of all ranks

    @staticmethod
    def of_environment() -> Place:
        """Read the variables set by torchrun or `start`; without them the process is alone."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return Place()
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        others = (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", world), (RESTARTS, 0))
        local_rank, local_world, attempt = (int(os.environ.get(name, default)) for name, default in others)
        return Place(rank, local_rank, world, local_world, started=True, attempt=attempt)


@contextlib.contextmanager
def joined(
    sizes: Mapping[str, int],
    process: Place,
    device: torch.device,
    *,
    timeout: float,
    sharding: Sharding,
    virtual_stages: int = 1,
    twin: bool = False,
) -> Iterator[tuple[Mesh, Watch, Mesh | None]]:
    """A context with the mesh of these axes over all processes, each of which must call, with its groups watched.

    With `twin` there is a second mesh, with its own process groups, for a concurrent thread: collectives of one group
    must have the same order on all ranks. It is watched too, but its traffic is not counted.

    `timeout` is the longest wait for a collective in seconds. `sizes` are given from the slowest axis, whose ranks are
    farthest apart, to the fastest; their product is the number of processes. An error in any process ends all
    (`failure.Monitor`).
    """
    shared = next(iter(rendezvous("env://", rank=process.rank, world_size=process.world)))[0]
    store = own_keys(shared, attempt=os.environ.get(RESTARTS, "0"))
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    limit = timedelta(seconds=2 * timeout)  # the monitor comes first, with a better message
    dist.init_process_group(
        backend,
        store=PrefixStore("groups", store),
        rank=process.rank,
        world_size=process.world,
        timeout=limit,
        device_id=None if device.type == "cpu" else device,  # NCCL would guess it
    )
    wide = {name: size for name, size in sizes.items() if size > 1}
    plain = Mesh(
        _axes(wide, process.rank, limit, everyone=dist.group.WORLD),
        sharding if wide.keys() & set(SHARD_AXES) else None,
        virtual_stages=virtual_stages,
    )
    mesh, watch = watched(plain)
    second, beside = watched(attrs.evolve(plain, axes=_axes(wide, process.rank, limit))) if twin else (None, None)
    limits = Limits(timeout=timeout)
    with Monitor(PrefixStore(MONITOR, store), process.rank, process.world, watch, limits, beside):
        yield mesh, watch, second
        dist.barrier()  # the holder of the store leaves last
    dist.destroy_process_group()


def _axes(
    sizes: Mapping[str, int], rank: int, limit: timedelta, *, everyone: dist.ProcessGroup | None = None
) -> dict[str, Axis]:
    """The axes of this rank, each with a new process group, whose collectives time out after `limit`; an axis of all
    ranks gets the group `everyone` if given.

    torch's DeviceMesh would leave torch's default timeout to the groups of several axes.
    """
    ranks = torch.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    axes: dict[str, Axis] = {}
    for name, size in sizes.items():
        if everyone is not None and size == ranks.numel():
            axes[name] = Axis(size, rank, everyone)
            continue
        lines = lines_of(ranks, list(sizes), [name])
        groups = [(line, dist.new_group(line, timeout=limit)) for line in lines]  # every rank makes all of them
        line, group = next((line, group) for line, group in groups if rank in line)
        axes[name] = Axis(size, line.index(rank), group)
    return with_lanes(with_dense(axes, ranks, rank, limit), ranks, rank, limit)


def visible(gpus: Sequence[int], now: str | None) -> str:
    """The value of CUDA_VISIBLE_DEVICES with which a child process has these GPUs. The GPUs are numbered as this
    process sees them, whose own value is `now`."""
    names = None if now is None or not now.strip() else now.split(",")
    return ",".join(str(gpu) if names is None else names[gpu].strip() for gpu in gpus)


class _RanksFailed(Lost):
    """Error for a start of all ranks that ended with a failure's exit status."""

    def __init__(self, status: int, *, again: bool) -> None:
        super().__init__(f"exit status {status}", again=again)
        self.status = status


def start(arguments: Sequence[str], ranks: int, *, max_restarts: int = 0) -> int:
    """Run `python -m fppo ARGUMENTS` as `ranks` processes of this machine, wait, and return the exit status.

    Ctrl-C and SIGTERM are forwarded to all processes. If one fails, the others are ended after some seconds; unless a
    stop was requested, all are restarted, up to `max_restarts` times.
    """
    restarts = Restarts(max_restarts)

    def attempt() -> int:
        status, stopped = _attempt(arguments, ranks, restarts.used)
        if status not in (0, STOPPED):
            raise _RanksFailed(status, again=not stopped)
        return status

    def restart(_: _RanksFailed) -> None:
        print(f"fppo: starting all {ranks} ranks again ({restarts})", file=sys.stderr)

    try:
        return restarts.run(attempt, _RanksFailed, restart)
    except _RanksFailed as error:
        return error.status


def _attempt(arguments: Sequence[str], ranks: int, attempt: int) -> tuple[int, bool]:
    """The exit status of one start of all ranks, and whether a stop was requested."""
    store, token = listening(), new_token()  # in this process, so that the store outlives any rank
    with _passed_on() as (children, asked):
        for rank in range(ranks):
            environment = os.environ | _environment(rank, ranks, store.port, attempt) | {TOKEN: token}
            command = [sys.executable, "-m", "fppo", *arguments]
            children.append(
                # in new sessions: otherwise a terminal's ctrl-C would arrive twice, directly and forwarded
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
            )
        status = _supervised(children)
    ended = [rank for rank, child in enumerate(children) if child.returncode == 0]
    if status == 0 and (early := not_done(own_keys(store, token, attempt=str(attempt)), ended)):
        who = ", ".join(map(str, early))
        text = "before its work was done: code that it runs has ended the process, such as by os._exit"
        print(f"fppo: rank {who} ended with the status 0 {text}", file=sys.stderr)
        return FAILED, bool(asked)
    return status, bool(asked)


def _environment(rank: int, ranks: int, port: int, attempt: int) -> dict[str, str]:
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        RESTARTS: str(attempt),
        LAUNCHER: str(os.getpid()),
        "OMP_NUM_THREADS": threads,
        **loopback_only(),
    }


@contextlib.contextmanager
def _passed_on() -> Iterator[tuple[list[subprocess.Popen[bytes]], list[int]]]:
    """A context that forwards every SIGINT and SIGTERM to the processes of a list, and at its end kills those that
    still run. It yields the list, to be filled, and the list of received signals."""
    children: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        asked.append(number)
        for child in children:
            child.send_signal(number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield children, asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()


def _supervised(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all processes; the exit status of the first that failed, else 0 or `STOPPED`."""
    failed: int | None = None
    deadline = float("inf")
    while any(child.poll() is None for child in children):
        time.sleep(0.05)
        bad = [rank for rank, child in enumerate(children) if child.poll() not in (None, 0, STOPPED)]
        if failed is None and bad:
            failed = bad[0]
            deadline = time.monotonic() + _GRACE
            _say_if_killed(failed, children[failed].returncode)
        if time.monotonic() > deadline:
            for child in children:
                if child.poll() is None:
                    child.kill() if time.monotonic() > deadline + _KILL else child.terminate()
    statuses = [child.returncode for child in children]
    if failed is not None:
        return abs(statuses[failed])
    return next((status for status in statuses if status), 0)


def _say_if_killed(rank: int, status: int) -> None:
    if status < 0:
        name = signal.Signals(-status).name
        hint = ": out of memory?" if name == "SIGKILL" else ""
        print(f"fppo: rank {rank} was ended by {name}{hint}", file=sys.stderr)
