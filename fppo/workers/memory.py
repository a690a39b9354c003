"""Bound the memory of a process and its descendants: by a control group if one can be made, else by watching their sum.

The system's own limits hold for single processes, so that many small ones exceed them together. Linux. No torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

_ENTER = 'kill -STOP $$; exec "$@"'  # for a shell, which stops until it is admitted, and then becomes the command
_KINDS = (  # of control groups (v2, v1): files for the limit, the file that counts kills, other files and their values
    (("memory.max",), "memory.events", {"memory.swap.max": "0", "memory.oom.group": "1"}),
    (("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), "memory.oom_control", {}),
)
_LINGERS = 1.0  # seconds that killed processes may take to leave their group
_PAGE = os.sysconf("SC_PAGE_SIZE")


@attrs.frozen
class ControlGroup:
    """A control group that bounds the memory of its processes, including the kernel's memory for them."""

    directory: Path
    counts: str  # the file that counts kills

    def entering(self, command: Sequence[str]) -> list[str]:
        """Wrap the command, so that its process waits until it is admitted."""
        return ["/bin/sh", "-c", _ENTER, "sh", *command]

    def admit(self, pid: int) -> None:
        """Put a waiting process into the group, and let it continue. Raises OSError if that fails."""
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        (self.directory / "cgroup.procs").write_text(str(pid))
        os.kill(pid, signal.SIGCONT)

    def exceeded(self, pid: int) -> bool:
        """Whether the kernel has killed a process of the group for want of memory; its first process, `pid`, is not
        read."""
        del pid
        words = (self.directory / self.counts).read_text().split()
        return int(words[words.index("oom_kill") + 1]) > 0


@attrs.frozen
class WatchedSum:
    """A limit, in bytes, on the memory of a process and its descendants together; the caller must check it often."""

    limit: int

    def entering(self, command: Sequence[str]) -> list[str]:
        """Return the command as it is."""
        return [*command]

    def admit(self, pid: int) -> None:
        """Do nothing, since the process does not wait."""

    def exceeded(self, pid: int) -> bool:
        """Whether process `pid` and its descendants hold more than the limit; memory that they share counts once."""
        pids = [pid, *descendants(pid)]
        return sum(map(_resident, pids)) > self.limit and sum(map(_share, pids)) > self.limit


MemoryBound = ControlGroup | WatchedSum


@contextlib.contextmanager
def memory_bound(limit: int) -> Iterator[MemoryBound]:
    """Provide, for the context, a bound of `limit` bytes on the memory of all processes of one command together. Where
    the system allows it, it is a control group, whose processes the kernel kills beyond the bound. Elsewhere it is a
    `WatchedSum`: nothing happens by itself, and the caller must check it often and end the processes."""
    group = _group(limit)
    try:
        yield WatchedSum(limit) if group is None else group
    finally:
        if group is not None:
            _remove(group.directory)


def _remove(directory: Path) -> None:
    """Remove a control group once the last of its processes has ended."""
    begun = time.monotonic()
    while time.monotonic() - begun < _LINGERS:
        with contextlib.suppress(OSError):
            directory.rmdir()
            return
        time.sleep(0.01)


def _group(limit: int) -> ControlGroup | None:
    """Make a control group below this process's own; None where none can be made that bounds memory."""
    for parent in _own_groups():
        place = parent / f"fppo-{uuid.uuid4().hex}"
        try:
            place.mkdir()
        except OSError:
            continue
        try:
            (name, *more), counts, others = next(kind for kind in _KINDS if (place / kind[0][0]).exists())
            (place / name).write_text(str(limit))
            for other, value in (dict.fromkeys(more, str(limit)) | others).items():
                if (place / other).exists():  # kernels without swap lack some of the files
                    (place / other).write_text(value)
            group = ControlGroup(place, counts)
            group.exceeded(0)
            return group
        except (OSError, StopIteration, ValueError):  # no controller of memory, or one without counts
            place.rmdir()
    return None


def _own_groups() -> list[Path]:
    """The control groups that this process is in, as directories."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    parts = [line.split(":", 2) for line in lines]
    named = {controllers: path.lstrip("/") for _, controllers, path in parts}
    roots = {"memory": ("/sys/fs/cgroup/memory",), "": ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")}
    return [Path(root, path) for name, path in named.items() for root in roots.get(name, ())]


def descendants(pid: int) -> list[int]:
    """The process ids of a process's children, their children, and so on."""
    found: list[int] = []
    left = [pid]
    while left:
        inside = _children(left.pop())
        found += inside
        left += inside
    return found


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):  # the process has ended
        tasks = os.listdir(f"/proc/{pid}/task")
        texts = (_text(f"/proc/{pid}/task/{task}/children") for task in tasks)
        return [int(word) for text in texts for word in text.split()]
    return []


def _resident(pid: int) -> int:
    """The resident memory of a process in bytes, all of its shared memory included."""
    words = _text(f"/proc/{pid}/statm").split()
    return int(words[1]) * _PAGE if words else 0


def _share(pid: int) -> int:
    """The resident memory of a process in bytes, with its share of shared memory (PSS); all of it if unreadable."""
    lines = _text(f"/proc/{pid}/smaps_rollup").splitlines()
    parts = [int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")]
    return parts[0] if parts else _resident(pid)


def _text(file: str) -> str:
    """The content of a file in /proc; "" if the process has ended, or the file cannot be read."""
    try:
        return Path(file).read_text()
    except OSError:
        return ""
