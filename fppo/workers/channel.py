"""Messages between a pool and its processes, over sockets that user code may find among its descriptors.

Each message begins with a secret and carries a digest. So bytes that somebody else writes there are noticed at once,
and nothing of them is unpickled. The pool's end never waits: an incomplete message is kept until the rest comes.
"""

from __future__ import annotations

import hashlib
import os
import socket

SECRET = 16  # bytes
CUT = 74  # exit status of a process if its own code closed its end of the channel
_DIGEST, _LENGTH = 16, 8  # bytes
_HEAD = SECRET + _LENGTH + _DIGEST
_MOST = 1 << 34  # bytes of a message
_PIECE, _PIECES = 1 << 18, 256  # bytes of one read, and the most reads before other channels have their turn


class ForeignBytes(Exception):
    """Bytes in a channel that its other end has not sent."""


class Channel:
    """The pool's end of a channel. Its methods raise OSError if the other end is gone."""

    def __init__(self, end: socket.socket, secret: bytes) -> None:
        end.setblocking(False)
        self._end, self._secret = end, secret
        self._outbox, self._inbox = bytearray(), bytearray()

    def fileno(self) -> int:
        """The descriptor to wait for; -1 once the channel is closed."""
        return self._end.fileno()

    @property
    def secret(self) -> str:
        """The secret for the other end, in hexadecimal digits."""
        return self._secret.hex()

    @property
    def unsent(self) -> bool:
        """Whether `flush` has something left to send."""
        return bool(self._outbox)

    def send(self, message: bytes) -> None:
        """Send a message, or as much of it as fits now; `flush` sends the rest."""
        self._outbox += _head(message, self._secret) + message
        self.flush()

    def flush(self) -> None:
        """Send as much of the unsent messages as fits now."""
        try:
            while self._outbox:
                del self._outbox[: self._end.send(self._outbox)]
        except BlockingIOError:
            pass

    def receive(self) -> list[bytes]:
        """Return all complete messages so far; an empty list if there are none. Raises EOFError once the other end is
        closed and all its messages were received, and ForeignBytes for bytes that it has not sent."""
        messages: list[bytes] = []
        ended = False
        try:
            for _ in range(_PIECES):
                piece = self._end.recv(_PIECE)
                ended = not piece
                if ended:
                    break
                self._inbox += piece
                messages += self._whole()
        except BlockingIOError:
            pass
        except ConnectionError:
            ended = True
        if ended and not messages:
            raise EOFError
        return messages

    def _whole(self) -> list[bytes]:
        """Remove the complete messages from the inbox, and return them."""
        messages: list[bytes] = []
        while (size := _size(self._inbox, self._secret)) is not None and len(self._inbox) >= _HEAD + size:
            messages.append(_checked(bytes(self._inbox[: _HEAD + size])))
            del self._inbox[: _HEAD + size]
        return messages

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._end.close()


class WorkerChannel:
    """The worker's end of a channel, with calls that block. A copy of the process that user code makes by `os.fork`
    cannot use this end, and exits if it tries."""

    def __init__(self, descriptor: int, secret: bytes) -> None:
        os.set_inheritable(descriptor, False)
        self._end, self._secret, self._process = socket.socket(fileno=descriptor), secret, os.getpid()
        self._end.setblocking(True)
        os.register_at_fork(after_in_child=self._end.close)

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._end.fileno()

    def send(self, message: bytes) -> None:
        """Send a message."""
        self._check()
        self._end.sendall(_head(message, self._secret) + message)

    def receive(self) -> bytes:
        """Wait for the next message. Raises EOFError if the pool has closed its end, and ForeignBytes for bytes that it
        has not sent."""
        self._check()
        head = self._exactly(_HEAD)
        size = _size(head, self._secret)
        assert size is not None
        return _checked(head + self._exactly(size))

    def _check(self) -> None:
        if os.getpid() != self._process:
            os._exit(0)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._end.recv(min(size - len(data), _PIECE))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


def _head(message: bytes, secret: bytes) -> bytes:
    return secret + len(message).to_bytes(_LENGTH, "little") + _digest(message)


def _digest(message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=_DIGEST).digest()


def _size(data: bytes | bytearray, secret: bytes) -> int | None:
    """The size in bytes of the message that `data` begins with; None if its head is incomplete."""
    if data[:SECRET] != secret[: len(data[:SECRET])]:
        raise ForeignBytes("bytes that are no message")
    if len(data) < _HEAD:
        return None
    size = int.from_bytes(data[SECRET : SECRET + _LENGTH], "little")
    if size > _MOST:
        raise ForeignBytes(f"a message of {size:,} bytes, where {_MOST:,} are the most")
    return size


def _checked(data: bytes) -> bytes:
    message = data[_HEAD:]
    if data[SECRET + _LENGTH : _HEAD] != _digest(message):
        raise ForeignBytes("a message that was written into")
    return message
