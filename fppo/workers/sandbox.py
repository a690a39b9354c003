"""Run untrusted Python in a sandbox: programs that a policy wrote, for code rewards and tools. Linux with bubblewrap.

A program runs as an unprivileged user in namespaces of its own: no network, no other processes, no files but a
read-only view of the system's files and a small directory for itself, no variables of this process. Its time, processes
and output are bounded, and so is the memory of all its processes together; system calls that keep memory outside of
processes are refused. If a machine cannot do this, the program is refused, with the reason.
"""

from __future__ import annotations

import errno
import os
import platform
import selectors
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from typing import IO, Any, Literal, NamedTuple

import attrs

from fppo._errors import printable
from fppo.fields import Check, above, at_least
from fppo.workers.memory import MemoryBound, memory_bound

PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")  # a Python that another user can read
NOBODY = 65534
_SPACE = 16 << 20  # bytes of the program's own directory, and of a file
_PIECE = 1 << 16
_LOOK = 0.02  # seconds from one look at the memory to the next
_TRIED = 64 << 20  # bytes of memory of a trial
_CALLS = {  # by processor: its audit architecture, and the numbers of system calls whose memory belongs to no process:
    # memfd_create, memfd_secret, shmget, msgget, semget, mq_open, io_uring_setup, bpf, userfaultfd, perf_event_open
    "x86_64": (0xC000003E, (319, 447, 29, 68, 64, 240, 425, 321, 323, 298)),
    "aarch64": (0xC00000B7, (279, 447, 194, 186, 190, 180, 425, 280, 282, 241)),
}
# sets limits inside the sandbox, where only its own processes count, and then becomes the program
_LAUNCH = """
import os, resource, sys
memory, seconds, processes, space = map(int, sys.argv[1:5])
for name, most in dict(AS=memory, CPU=seconds, FSIZE=space, CORE=0, NOFILE=128, NPROC=processes).items():
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
os.execv(sys.executable, [sys.executable, "-I", "/box/main.py"])
"""


class SandboxRun(NamedTuple):
    """How a program ended (by itself, by a signal, or at a limit of time, output or memory), and its output."""

    why: Literal["exit", "signal", "time", "output", "memory"]
    code: int
    out: str
    err: str
    seconds: float


def _checked(check: Check) -> Callable[[Any, attrs.Attribute, Any], None]:
    def validate(_: object, attribute: attrs.Attribute, value: float) -> None:
        if (text := check(value)) is not None:
            raise ValueError(f"{attribute.name} = {value!r}: {text}")

    return validate


@attrs.frozen(kw_only=True)
class Sandbox:
    """Limits of a program: wall-clock seconds, bytes of memory of all its processes together, processes, and bytes of
    stdout and stderr together.

    A process that asks for more memory gets a MemoryError; if several together use more, they are killed.
    """

    seconds: float = attrs.field(default=5.0, validator=_checked(above(0)))
    memory: int = attrs.field(default=512 << 20, validator=_checked(at_least(64 << 20)))
    processes: int = attrs.field(default=32, validator=_checked(at_least(1)))
    output: int = attrs.field(default=64 << 10, validator=_checked(at_least(1)))

    def run(self, program: str, stdin: str = "") -> SandboxRun:
        """Run the text of a Python program; all its processes end with it. Raises RuntimeError with the reason
        (`refusal`) where no sandbox is available."""
        bwrap, python = shutil.which("bwrap"), interpreter()
        if bwrap is None or python is None:
            raise RuntimeError(f"untrusted programs are not run: {refusal()}")
        limits = (self.memory, int(self.seconds) + 1, self.processes, _SPACE)
        began = time.monotonic()
        calls = refused_calls()
        with (
            _in_memory(program.encode(errors="replace")) as source,
            _in_memory(stdin.encode(errors="replace")) as given,
            _in_memory(calls) as rules,
            memory_bound(self.memory) as bound,
        ):
            view = _view(bwrap, rules, ["--ro-bind-data", str(source.fileno()), "/box/main.py"])
            command = [*view, python, "-I", "-S", "-c", _LAUNCH, *map(str, limits)]
            process = _started(command, [source, rules], given, bound)
            try:
                why, out, err = _read(process, began + self.seconds, self.output, bound)
            finally:
                _end(process)
            code = process.wait()
            why = "memory" if not why and bound.exceeded(process.pid) else why
        how = why or ("signal" if code < 0 or code > 128 else "exit")
        if how == "exit" and code and err.startswith("bwrap: "):
            raise RuntimeError(f"untrusted programs are not run: {printable(err.strip())}")
        return SandboxRun(how, code, out, err, time.monotonic() - began)


def _started(
    command: list[str], files: list[IO[bytes]], stdin: IO[bytes], bound: MemoryBound
) -> subprocess.Popen[bytes]:
    try:
        process = subprocess.Popen(
            bound.entering(command),
            env={},  # bwrap is process 1 in the sandbox, and /proc/1/environ shows its initial environment
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=tuple(file.fileno() for file in files),
            start_new_session=True,
            user=NOBODY if _is_root() else None,
            group=NOBODY if _is_root() else None,
            extra_groups=[] if _is_root() else None,
        )
    except OSError as error:
        user = f" as the user {NOBODY}" if _is_root() else ""
        raise RuntimeError(f"{command[0]} does not start{user}: {error.strerror}") from error
    try:
        bound.admit(process.pid)
    except OSError as error:
        _end(process)
        raise RuntimeError(f"{command[0]} is not let into its control group: {error.strerror}") from error
    return process


def refusal() -> str | None:
    """The reason why this machine has no sandbox; None if it has one."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "bubblewrap is not installed (its command is bwrap; as: apt-get install bubblewrap)"
    if (python := interpreter()) is None:
        return f"there is no Python that any user can read, as {' or '.join(PYTHONS)}"
    try:
        with _in_memory(b"") as nothing, _in_memory(refused_calls()) as rules, memory_bound(_TRIED) as bound:
            tried = _started([*_view(bwrap, rules, []), python, "-I", "-S", "-c", ""], [rules], nothing, bound)
            said = tried.communicate()[1].decode(errors="replace").strip()
    except RuntimeError as error:
        return str(error)
    if tried.returncode:
        why = printable(said) or f"it ended with {tried.returncode}"
        return f"bubblewrap cannot make a sandbox here ({why}); it needs user namespaces (user.max_user_namespaces)"
    return None


def interpreter() -> str | None:
    """The path of the Python interpreter for programs; None if no user can read one."""
    return next((path for path in PYTHONS if os.access(path, os.X_OK)), None)


def _view(bwrap: str, rules: IO[bytes], options: list[str]) -> list[str]:
    """The bwrap command that starts a program in the sandbox, with the seccomp filter in the file `rules` and the
    further options `options`."""
    links = [x for name in ("lib", "lib64", "bin") for x in ("--symlink", f"usr/{name}", f"/{name}")]
    return [
        *(bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--clearenv", "--setenv", "PATH", "/usr/bin", "--setenv", "HOME", "/tmp"),
        *("--setenv", "PYTHONDONTWRITEBYTECODE", "1", "--uid", str(NOBODY), "--gid", str(NOBODY)),
        *("--hostname", "sandbox", "--ro-bind", "/usr", "/usr", *links, "--proc", "/proc", "--dev", "/dev"),
        *("--remount-ro", "/dev"),  # it is a file system in memory, without a limit
        *("--seccomp", str(rules.fileno())),
        *("--size", str(_SPACE), "--tmpfs", "/tmp", *options, "--chdir", "/tmp", "--remount-ro", "/"),
    ]


def _is_root() -> bool:
    """Whether this process runs as root, whose processes have no limits: programs then run as nobody."""
    return os.getuid() == 0


def refused_calls() -> bytes:
    """A seccomp filter that refuses the system calls of `_CALLS`, whose memory belongs to no process. Raises
    RuntimeError on processors whose calls have other numbers."""
    machine = platform.machine()
    if machine not in _CALLS:
        raise RuntimeError(
            f"programs are not bounded on a processor of the kind {machine}, but on {' or '.join(_CALLS)}"
        )
    kind, numbers = _CALLS[machine]
    load, equal, at_least_, give = 0x20, 0x15, 0x35, 0x06  # classic BPF: load, two jumps, return
    kill, refuse, allow = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000
    rules = [(load, 0, 0, 4), (equal, 1, 0, kind), (give, 0, 0, kill), (load, 0, 0, 0)]
    rules.append((at_least_, len(numbers) + 1, 0, 0x40000000))  # the numbers of x86's x32 calls
    rules += [(equal, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    rules += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    return b"".join(struct.pack("=HBBI", *rule) for rule in rules)


def _in_memory(content: bytes) -> IO[bytes]:
    """An anonymous file in memory, at its start."""
    file = os.fdopen(os.memfd_create("sandbox"), "w+b")
    file.write(content)
    file.seek(0)
    return file


def _read(
    process: subprocess.Popen[bytes], deadline: float, max_bytes: int, bound: MemoryBound
) -> tuple[Literal["time", "output", "memory", ""], str, str]:
    """Read a process's output until it ends or reaches a limit: the deadline on the monotonic clock, `max_bytes`, or
    `bound`. Returns the limit's name or "", stdout, and stderr."""
    assert process.stdout is not None
    assert process.stderr is not None
    pieces: dict[int, bytes] = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    why: Literal["time", "output", "memory", ""] = ""
    with selectors.DefaultSelector() as waiting:
        for pipe in pieces:
            waiting.register(pipe, selectors.EVENT_READ)
        looked = time.monotonic()
        while waiting.get_map() and not why:
            left = deadline - time.monotonic()
            if left <= 0:
                why = "time"
            for event, _ in waiting.select(max(min(left, _LOOK), 0)):
                piece = os.read(event.fd, _PIECE)
                pieces[event.fd] += piece
                if not piece:
                    waiting.unregister(event.fd)
            if sum(map(len, pieces.values())) > max_bytes:
                why = "output"
            if time.monotonic() - looked >= _LOOK:
                why, looked = ("memory" if bound.exceeded(process.pid) else why), time.monotonic()
    out, err = (piece[:max_bytes].decode(errors="replace") for piece in pieces.values())
    return why, out, err


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a sandbox: all of its processes end with the first one."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
