"""Processes that end when the one that started them does, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

LAUNCHER = "FPPO_LAUNCHER"  # the process id of what started this one as a rank


def end_with_launcher() -> None:
    """Makes a rank end when its launcher does; in other processes this does nothing.

    The variable goes: what the rank starts has another parent.
    """
    if (launcher := os.environ.pop(LAUNCHER, None)) is not None:
        end_with(int(launcher))


def end_with(parent: int) -> None:
    """Makes this process end when its parent does, even amid a loop that never looks up."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before this
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
