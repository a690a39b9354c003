"""Stores in which ranks meet: who can reach them, and whose keys are whose.

torch's store has neither passwords nor encryption: whoever reaches its port may read and write all that it holds. So it
listens where the ranks are and nowhere else, and their keys begin with a word that nobody can guess.
"""

from __future__ import annotations

import os
import secrets
import socket

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

LOOPBACK = "127.0.0.1"
TOKEN = "FPPO_STORE_TOKEN"  # the environment variable with the word that the keys of a start of ranks begin with
GLOO = "GLOO_SOCKET_IFNAME"  # gloo's variable: the interface that it listens at, by default that of the machine's name
_BACKLOG = 2048  # ranks that may come at a time


def listening(host: str = LOOPBACK) -> TCPStore:
    """A store in this process that listens at one address of this machine, on a port of its own.

    Raises OSError for an address that is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as place:
        place.bind((host, 0))
        place.listen(_BACKLOG)
        port = place.getsockname()[1]
        return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=place.detach())


def loopback_only() -> dict[str, str]:
    """The environment with which ranks of this machine talk to each other over its loopback interface alone, where it
    has one and no other interface is asked for."""
    names = [name for _, name in socket.if_nameindex()]
    return {} if "lo" not in names or os.environ.get(GLOO) else {GLOO: "lo"}


def new_token() -> str:
    """A word for the keys of one start of ranks."""
    return secrets.token_hex(16)


def own_keys(store: Store, token: str | None = None, *, attempt: str = "0") -> Store:
    """The part of a store that belongs to one attempt of one start of ranks: that of this process' environment, or of a
    `token`. torchrun keeps its store when it starts the ranks again, and gives none."""
    word = os.environ.get(TOKEN, "") if token is None else token
    return PrefixStore(f"{word}attempt_{attempt}", store)
