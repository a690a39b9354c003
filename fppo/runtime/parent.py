"""Processes of a new Python interpreter that end with their parent, however it ends. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

LAUNCHER = "FPPO_LAUNCHER"  # the process id of this rank's launcher
_CALL = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); module, name = sys.argv[2].split(':'); "
    "getattr(importlib.import_module(module), name)(*sys.argv[3:])"
)


def module_path() -> list[str]:
    """This process's module search path, for processes that may work in other directories."""
    return [os.getcwd() if entry == "" else entry for entry in sys.path]


def start_python(
    target: str, *arguments: object, pass_fds: Sequence[int], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a Python interpreter that calls `target`, a "module:function", with the arguments as texts.

    It inherits the module path, the descriptors `pass_fds`, and `environment` or this process's own. It is in a session
    of its own: ctrl-C goes to the parent alone, and `kill_session` ends its children too. Its output goes to standard
    error, so that it does not mix with a command's own output.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _CALL, json.dumps(module_path()), target, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=pass_fds,
        start_new_session=True,
        env=environment,
    )


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that `start_python` started and all of its children, without waiting."""
    with contextlib.suppress(OSError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def in_words(status: int | None) -> str:
    """Describe how a process with this exit status ended; a negative status is a signal's number."""
    if status is None or status >= 0:
        return f"with status {status}"
    hint = ", perhaps for want of memory" if status == -signal.SIGKILL else ""
    return f"by {signal.Signals(-status).name}{hint}"


def end_with_launcher() -> None:
    """End this rank when its launcher ends; a no-op in other processes.

    The variable is removed: children of the rank have another parent.
    """
    if (launcher := os.environ.pop(LAUNCHER, None)) is not None:
        end_with(int(launcher))


def end_with(parent: int) -> None:
    """End this process when its parent ends, even within a busy loop."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
