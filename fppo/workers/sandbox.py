"""Run untrusted Python in a sandbox: programs that a policy wrote, for code rewards and tools. Linux with bubblewrap.

A program runs as an unprivileged user in namespaces of its own: no network, no other processes, no files but a
read-only view of the system's and a small directory for itself, no variables of this process. Its time, memory,
processes and output are bounded. Where that cannot be had it is refused, with the reason.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from typing import IO, Any, Literal, NamedTuple

import attrs

from fppo._errors import printable
from fppo.fields import Check, above, at_least

PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")  # a Python that another user can read
NOBODY = 65534
_SPACE = 16 << 20  # bytes of the program's own directory, and of a file
_PIECE = 1 << 16
# sets limits inside the sandbox, where only its own processes count, and then becomes the program
_LAUNCH = """
import os, resource, sys
memory, seconds, processes, space = map(int, sys.argv[1:5])
for name, most in dict(AS=memory, CPU=seconds, FSIZE=space, CORE=0, NOFILE=128, NPROC=processes).items():
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
os.execv(sys.executable, [sys.executable, "-I", "/box/main.py"])
"""


class SandboxRun(NamedTuple):
    """The end of a program: its exit status, a signal, or a limit of time or output."""

    why: Literal["exit", "signal", "time", "output"]
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
    """Limits of a program: wall-clock seconds, bytes of memory of each process, processes, and bytes of stdout and
    stderr together."""

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
        with _in_memory(program) as source, _in_memory(stdin) as given:
            view = _view(bwrap, ["--ro-bind-data", str(source.fileno()), "/box/main.py"])
            process = _started([*view, python, "-I", "-S", "-c", _LAUNCH, *map(str, limits)], source, given)
            try:
                why, out, err = _read(process, began + self.seconds, self.output)
            finally:
                _end(process)
        code = process.wait()
        how = why or ("signal" if code < 0 or code > 128 else "exit")
        if how == "exit" and code and err.startswith("bwrap: "):
            raise RuntimeError(f"untrusted programs are not run: {printable(err.strip())}")
        return SandboxRun(how, code, out, err, time.monotonic() - began)


def _started(command: list[str], source: IO[bytes], given: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            env={},  # bwrap is process 1 in the sandbox, and /proc/1/environ shows its initial environment
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(source.fileno(),),
            start_new_session=True,
            user=NOBODY if _is_root() else None,
            group=NOBODY if _is_root() else None,
            extra_groups=[] if _is_root() else None,
        )
    except OSError as error:
        user = f" as the user {NOBODY}" if _is_root() else ""
        raise RuntimeError(f"{command[0]} does not start{user}: {error.strerror}") from error


def refusal() -> str | None:
    """The reason why this machine has no sandbox; None if it has one."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "bubblewrap is not installed (its command is bwrap; as: apt-get install bubblewrap)"
    if (python := interpreter()) is None:
        return f"there is no Python that any user can read, as {' or '.join(PYTHONS)}"
    command = [*_view(bwrap, []), python, "-I", "-S", "-c", ""]
    try:
        with _in_memory("") as nothing:
            tried = _started(command, nothing, nothing)
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


def _view(bwrap: str, more: list[str]) -> list[str]:
    """The bwrap command that starts another command in the sandbox."""
    links = [x for name in ("lib", "lib64", "bin") for x in ("--symlink", f"usr/{name}", f"/{name}")]
    return [
        *(bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--clearenv", "--setenv", "PATH", "/usr/bin", "--setenv", "HOME", "/tmp"),
        *("--setenv", "PYTHONDONTWRITEBYTECODE", "1", "--uid", str(NOBODY), "--gid", str(NOBODY)),
        *("--hostname", "sandbox", "--ro-bind", "/usr", "/usr", *links, "--proc", "/proc", "--dev", "/dev"),
        *("--remount-ro", "/dev"),  # memory only, and without a limit
        *("--size", str(_SPACE), "--tmpfs", "/tmp", *more, "--chdir", "/tmp", "--remount-ro", "/"),
    ]


def _is_root() -> bool:
    """Whether this process runs as root, whose processes have no limits: programs then run as nobody."""
    return os.getuid() == 0


def _in_memory(text: str) -> IO[bytes]:
    """An anonymous file in memory with this text, at its start."""
    file = os.fdopen(os.memfd_create("sandbox"), "w+b")
    file.write(text.encode(errors="replace"))
    file.seek(0)
    return file


def _read(
    process: subprocess.Popen[bytes], deadline: float, most: int
) -> tuple[Literal["time", "output", ""], str, str]:
    """Read a process's output until it ends or reaches a limit. Returns the limit's name or "", stdout, and stderr."""
    assert process.stdout is not None
    assert process.stderr is not None
    pieces: dict[int, bytes] = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    why: Literal["time", "output", ""] = ""
    with selectors.DefaultSelector() as waiting:
        for pipe in pieces:
            waiting.register(pipe, selectors.EVENT_READ)
        while waiting.get_map() and not why:
            left = deadline - time.monotonic()
            if left <= 0:
                why = "time"
            for event, _ in waiting.select(max(min(left, 0.1), 0)):
                piece = os.read(event.fd, _PIECE)
                pieces[event.fd] += piece
                if not piece:
                    waiting.unregister(event.fd)
            if sum(map(len, pieces.values())) > most:
                why = "output"
    out, err = (piece[:most].decode(errors="replace") for piece in pieces.values())
    return why, out, err


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a sandbox: all of its processes end with the first one."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
