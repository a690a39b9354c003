"""The guard before the protocol's routes: it checks keys, bounds bodies, and decompresses them."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping, Sequence

import zstandard
from fastapi.responses import JSONResponse

from fppo.serve.app import CLOSING, App, Body, Receive, Scope, Send, read_body
from fppo.serve.tinker.decode import TinkerBounds
from fppo.serve.tinker.encode import error_of
from fppo.serve.tinker.futures import Refusal
from fppo.serve.tinker.sessions import owner_of

OWNER = "fppo.owner"  # in the scope of a request that was let through
_STEP = 512  # bytes that are decompressed at a time, to 16 MiB at most


class KeyGuard:
    """Middleware that lets requests with one of the keys through, as their owner's, with bodies within bounds.

    Paths that begin with one of `free` need no key. Keys come in the header X-API-Key.
    """

    def __init__(self, app: App, *, keys: Sequence[str], bounds: TinkerBounds, free: Sequence[str] = ()) -> None:
        if not keys or not all(keys):
            raise ValueError("the server has no key, or an empty one: give some, or leave them to the server")
        self._app, self._bounds, self._free = app, bounds, tuple(free)
        self._owners = {key.encode(): owner_of(key) for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or any other event of the server."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or scope["path"].startswith(self._free):
            await self._app(scope, receive, send)
            return
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        try:
            owner = self._owner(scope)
            try:
                async with asyncio.timeout(self._bounds.body_seconds):
                    body = await read_body(scope, receive, self._bounds.body_bytes)
            except TimeoutError as error:
                raise Refusal(
                    f"the body had not come after {self._bounds.body_seconds:g} seconds", status=408
                ) from error
            except ValueError as error:
                raise Refusal(str(error), status=413) from error
            if body is None:
                return
            whole = decompressed(body, headers.get(b"content-encoding", b"").decode("latin-1"), self._bounds.body_bytes)
        except Refusal as error:
            await refusal_response(error)(scope, receive, send)
            return
        scope = {**scope, OWNER: owner}
        await self._app(scope, Body(body=whole, receive=receive), send)

    def _owner(self, scope: Scope) -> str:
        """The owner of a request, by its key. Raises Refusal."""
        given = [value for name, value in scope["headers"] if name == b"x-api-key"]
        found = None
        for key, owner in self._owners.items():  # all of them, so that the time tells nothing
            if len(given) == 1 and hmac.compare_digest(given[0], key):
                found = owner
        if found is None:
            raise Refusal("give one of the keys that the server was started with, as X-API-Key", status=401)
        return found


def refusal_response(error: Refusal) -> JSONResponse:
    """The response to a request that is refused, in the protocol's form."""
    headers = {"connection": "close"} if error.status in CLOSING else None
    return JSONResponse(error_of(error.outcome), error.status, headers)


def decompressed(body: bytes, encoding: str, most: int) -> bytes:
    """Decompress a body to at most `most` bytes. Raises Refusal."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise Refusal(f"content-encoding: {encoding[:40]!r}: give zstd, or nothing", status=415)
    parts, size, place = list[bytes](), 0, 0
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    try:
        while place < len(body) and not reader.eof:
            parts.append(reader.decompress(body[place : place + _STEP]))
            place, size = place + _STEP, size + len(parts[-1])
            if size > most:
                raise Refusal(f"a body of over {most:,} bytes, decompressed", status=413)
    except zstandard.ZstdError as error:
        raise Refusal(f"the body is no zstd: {error}"[:300]) from error
    if not reader.eof:
        raise Refusal(f"the body is no whole zstd: it breaks off after {len(body):,} bytes")
    if place < len(body) or reader.unused_data:
        raise Refusal("the body has bytes behind its zstd frame: send one frame")
    return b"".join(parts)
