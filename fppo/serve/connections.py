"""The connections of a server: how many there may be, and how long one may wait without a request.

uvicorn has neither bound. Whoever has no key could take all descriptors of the process with connections that say
nothing, and its accepting would then fail again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Callable
from typing import cast

from fppo.serve.app import App, Receive, Scope, Send

_log = logging.getLogger("fppo.serve")
_AT_ONCE = 16  # connections that are accepted at a time, before others are read
_AGAIN = 1.0  # seconds until accepting is tried again after it failed
_HEAD_BYTES = 1 << 20  # the most bytes that may come before a request's head is complete
_SPARE = 64  # descriptors that are left to everything else
_MOST = 8192

Address = tuple[str, int]


def most_connections() -> int:
    """The number of connections that this process may have open: most of its free descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = _SPARE
    return max(_SPARE // 4, min(soft - used - _SPARE, _MOST))


class Connection(asyncio.Protocol):
    """A connection that passes its bytes to another protocol, and is closed if a request does not come in time."""

    def __init__(self, inner: asyncio.Protocol, acceptor: Acceptor) -> None:
        self._inner, self._acceptor = inner, acceptor
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._size, self.busy, self.served = 0, 0, False
        self.address: Address | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        host, port, *_ = transport.get_extra_info("peername") or ("", 0)
        self.address = str(host), int(port)
        self._acceptor.add(self)
        self._within(self._acceptor.head_seconds)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self.busy:
            if self._size == 0:
                self._within(self._acceptor.head_seconds)
            self._size += len(data)
            if self._size > _HEAD_BYTES:
                self.abort()
                return
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._within(None)
        self._inner.connection_lost(exc)
        self._acceptor.remove(self)

    def begin(self) -> None:
        """Note that a request is being answered."""
        self.busy, self._size = self.busy + 1, 0
        self._within(None)

    def end(self) -> None:
        """Note that a request has been answered."""
        self.busy, self.served = self.busy - 1, True
        if not self.busy and self._transport is not None and not self._transport.is_closing():
            self._within(self._acceptor.idle_seconds)

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _within(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)


class Acceptor:
    """An acceptor of a listener's connections, up to `max_connections`. Beyond that, an idle connection is closed for
    the next one: first those that never had a request, the oldest first."""

    def __init__(
        self, listener: socket.socket, *, max_connections: int, head_seconds: float, idle_seconds: float
    ) -> None:
        listener.setblocking(False)
        listener.listen(128)  # clients that come before `open` wait
        self._listener, self._most = listener, max_connections
        self.head_seconds, self.idle_seconds = head_seconds, idle_seconds
        self._open: dict[Address | None, Connection] = {}  # in the order in which they came
        self._coming: set[asyncio.Task[None]] = set()
        self._reads, self._closed, self._said = False, False, set[str]()
        self._made: Callable[[], asyncio.Protocol] | None = None

    def watched(self, app: App) -> App:
        """Wrap the application, so that each request is noted in its connection."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            connection = self._open.get(scope.get("client")) if scope["type"] == "http" else None
            if connection is None:
                await app(scope, receive, send)
                return
            connection.begin()
            try:
                await app(scope, receive, send)
            finally:
                connection.end()

        return call

    def open(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections from now on, each with a protocol of its own."""
        self._made = protocol
        self._resume()

    def close(self) -> None:
        """Accept no more."""
        self._closed = True
        self._pause()

    def add(self, connection: Connection) -> None:
        """Register an open connection."""
        self._open[connection.address] = connection

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is lost, and accept others again."""
        if self._open.get(connection.address) is connection:
            del self._open[connection.address]
        self._resume()

    def _resume(self) -> None:
        if not self._reads and not self._closed:
            self._reads = True
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._come)

    def _pause(self) -> None:
        if self._reads:
            self._reads = False
            asyncio.get_running_loop().remove_reader(self._listener.fileno())

    def _come(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._open) + len(self._coming) >= self._most:
                self._make_room()
                return
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # of a client that has gone
                continue
            except OSError as error:
                self._say(f"no connection can be accepted: {error}; it is tried again each second")
                self._pause()
                asyncio.get_running_loop().call_later(_AGAIN, self._resume)
                return
            task = asyncio.ensure_future(self._connect(client))
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)

    def _make_room(self) -> None:
        """Close one idle connection. The next client is accepted once any connection has ended."""
        self._say(f"{self._most} connections are open, the most: those without a request make room for others")
        self._pause()
        waiting = [each for each in self._open.values() if not each.busy]
        if self._coming:  # one of these may be the one to close
            asyncio.get_running_loop().call_soon(self._resume)
        elif waiting:
            min(waiting, key=lambda each: each.served).abort()  # the oldest, those never served first

    async def _connect(self, client: socket.socket) -> None:
        made = self._made
        assert made is not None
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: Connection(made(), self), client)
        except OSError:  # the client has gone
            with contextlib.suppress(OSError):
                client.close()

    def _say(self, text: str) -> None:
        """Log a warning, each text once."""
        if text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)
