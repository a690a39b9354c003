"""Waiting of torch's CPU threads for one another, asleep or spinning. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

# variables for how long a thread of OpenMP spins: of the standard, of GNU's runtime, of LLVM's and Intel's
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def wait_asleep() -> None:
    """Let OpenMP's threads sleep while they wait for one another, in this process and in processes that it starts.

    A thread of OpenMP spins at the end of each operation until the other threads are there. Beside other programs it
    may spin on the very core that the last of them needs. Nothing changes if a variable of `WAITING` is set. Raises
    RuntimeError if torch is loaded, since OpenMP reads the variables when it is loaded with torch.
    """
    if "torch" in sys.modules:
        raise RuntimeError(
            "torch is loaded already, and OpenMP has read its settings; call wait_asleep() before the first import "
            "of torch, or start the script with OMP_WAIT_POLICY=PASSIVE"
        )
    choose_waiting(os.environ)


def choose_waiting(environment: MutableMapping[str, str]) -> None:
    """Set the variable in `environment` by which OpenMP's threads sleep while they wait, unless one of the variables
    `WAITING` is set there already."""
    if not any(environment.get(name) for name in WAITING):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
