"""Processes that are new Pythons, and that end when the one that started them does, however that ends. No torch."""

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
    """Where this process finds modules, for processes that may work in other directories."""
    return [os.getcwd() if entry == "" else entry for entry in sys.path]


def start_python(
    target: str, *arguments: object, pass_fds: Sequence[int], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a Python that calls `target`, a "module:function", with the arguments as texts.

    It has this one's module path, these descriptors, and this environment or the own. It is in a session of its own, as
    ctrl-C is for the parent, and what it starts ends with `kill_session`. What it prints is not to mix with a command's
    own output, and goes to standard error.
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
    """Kills what `start_python` has started, with all that it started, and does not wait for that."""
    with contextlib.suppress(OSError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def in_words(status: int | None) -> str:
    """How a process ended that has this exit status, which is minus the number of a signal."""
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
