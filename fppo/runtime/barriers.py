"""Waiting of torch's CPU threads for one another, asleep or spinning. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

# variables for how long a thread of OpenMP spins: of the standard, of GNU's runtime, of LLVM's and Intel's
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def wait_asleep() -> None:
    """Let threads that wait for one another sleep, in this process and in those that it starts.

    A thread of OpenMP spins at the end of each operation until the others are there. Beside other programs it may spin
    on the very core that the last of them needs. Without effect where a variable of `WAITING` is set. Raises
    RuntimeError where torch is loaded, since OpenMP reads the variables when it is loaded with torch.
    """
    if "torch" in sys.modules:
        raise RuntimeError(
            "torch is loaded already, and OpenMP has read its settings; call wait_asleep() before the first import "
            "of torch, or start the script with OMP_WAIT_POLICY=PASSIVE"
        )
    choose_waiting(os.environ)


def choose_waiting(environment: MutableMapping[str, str]) -> None:
    """Set the variable for threads that sleep, unless one of `WAITING` is set."""
    if not any(environment.get(name) for name in WAITING):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
