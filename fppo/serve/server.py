"""A server of an application, on a socket of this machine's own."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import cast

import uvicorn

from fppo.serve.app import App
from fppo.serve.connections import Acceptor, most_connections

LOOPBACK = "127.0.0.1"
_STARTS, _ENDS = 30.0, 5  # seconds


def new_key() -> str:
    """A key that nobody can guess."""
    return secrets.token_urlsafe(32)


def check_key(key: str, name: str) -> None:
    """Raise ValueError for a key that no client could send; the error calls the key `name`."""
    if not key:
        raise ValueError(f"{name} is empty, so nobody could be let in: give it a key, or leave it out for a new one")
    if not all("!" <= letter <= "~" for letter in key):
        raise ValueError(f"{name} holds a space, or what is no printable ASCII, which no client can send in a header")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound_socket(host: str, port: int, *, public: bool = False) -> socket.socket:
    """A socket that listens at the port (0: any that is free). Raises ValueError for a host that other machines reach,
    unless it is to be `public`, and for an address that cannot be had."""
    if not public and not is_loopback(host):
        text = "other machines could reach it, and nothing is encrypted: give 127.0.0.1, or --public if they are to"
        raise ValueError(f"--host {host}: {text}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"--host {host} --port {port}: {error}; give another one, or --port 0") from error
    return listener


def address_of(listener: socket.socket) -> str:
    """The URL of the address that a socket listens on."""
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def serving(
    app: App,
    listener: socket.socket,
    *,
    max_connections: int | None = None,
    head_seconds: float = 10.0,
    idle_seconds: float = 120.0,
) -> Iterator[str]:
    """A context in which a thread serves the application; it yields the URL.

    At most `max_connections` connections are open, by default as many as the process has descriptors for. A connection
    is closed if the head of a request has not come after `head_seconds`, or if none comes for `idle_seconds` after the
    last request, since an agent's tools may take long. At the end open connections have a few seconds to finish.
    """
    acceptor = Acceptor(
        listener,
        max_connections=max_connections or most_connections(),
        head_seconds=head_seconds,
        idle_seconds=idle_seconds,
    )
    config = uvicorn.Config(
        acceptor.watched(app),
        log_level="error",  # warnings are of what clients send
        ws="none",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(idle_seconds),
        timeout_graceful_shutdown=_ENDS,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=_run, args=(server, acceptor), name="fppo-server", daemon=True)
    thread.start()
    try:
        waiting = threading.Event()
        for _ in range(int(_STARTS / 0.01)):
            if server.started or not thread.is_alive():
                break
            waiting.wait(0.01)
        if not server.started:
            raise RuntimeError("the server did not start; its log has the reason")
        yield address_of(listener)
    finally:
        server.should_exit = True
        thread.join(_STARTS)
        listener.close()


def _run(server: uvicorn.Server, acceptor: Acceptor) -> None:
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, acceptor))


async def _serve(server: uvicorn.Server, acceptor: Acceptor) -> None:
    """Serve until the server is to exit. The acceptor `acceptor` accepts its connections, so that it has no sockets
    itself."""
    config = server.config
    config.load()
    made = cast(Callable[..., asyncio.Protocol], config.http_protocol_class)
    work = asyncio.ensure_future(server.serve(sockets=[]))
    while not server.started and not work.done():
        await asyncio.sleep(0.002)
    if server.started:
        own = {"config": config, "server_state": server.server_state, "app_state": server.lifespan.state}
        acceptor.open(lambda: made(**own))
    while not server.should_exit and not work.done():
        await asyncio.sleep(0.02)
    acceptor.close()
    await work
