"""Processes that end with their parent, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

LAUNCHER = "FPPO_LAUNCHER"  # the process id of this rank's launcher


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
