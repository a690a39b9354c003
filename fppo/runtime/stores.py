"""Key-value stores for the rendezvous of ranks: their addresses, and prefixes of keys.

torch's store has neither passwords nor encryption: any client that reaches its port may read and write all keys. So it
listens on the ranks' interface alone, and their keys begin with a secret token.
"""

from __future__ import annotations

import os
import secrets
import socket

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

LOOPBACK = "127.0.0.1"
TOKEN = "FPPO_STORE_TOKEN"  # environment variable: the secret token that prefixes the keys of ranks started together
GLOO = "GLOO_SOCKET_IFNAME"  # gloo's variable: the interface to listen on, by default that of the machine's name
_BACKLOG = 2048  # the most simultaneous connections of ranks


def listening(host: str = LOOPBACK) -> TCPStore:
    """A store in this process that listens on one address of this machine, on a free port.

    Raises OSError for an address of another machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as place:
        place.bind((host, 0))
        place.listen(_BACKLOG)
        port = place.getsockname()[1]
        return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=place.detach())


def loopback_only() -> dict[str, str]:
    """Environment variables with which ranks of this machine communicate over its loopback interface; {} if there is
    none, or the user has set another."""
    names = [name for _, name in socket.if_nameindex()]
    return {} if "lo" not in names or os.environ.get(GLOO) else {GLOO: "lo"}


def new_token() -> str:
    """Make a secret random token, 32 hexadecimal digits: the prefix of the store's keys for ranks started together."""
    return secrets.token_hex(16)


def own_keys(store: Store, token: str | None = None, *, attempt: str = "0") -> Store:
    """A view of a store in which all keys have the prefix of `token` and `attempt`. `token` is shared by ranks started
    together; None takes it from the environment, where torchrun sets none, so that it is empty. `attempt` counts
    restarts of these ranks: torchrun keeps its store when it restarts them."""
    word = os.environ.get(TOKEN, "") if token is None else token
    return PrefixStore(f"{word}attempt_{attempt}", store)
