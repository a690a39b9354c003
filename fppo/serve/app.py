"""The server's application, for any routes: it checks keys, bounds bodies, and gives errors in a protocol's form."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import attrs
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.routing import Match, Route

from fppo.serve.protocol import body_of, messages_body_of
from fppo.serve.refusal import Refusal
from fppo.serve.service import Bounds

T = TypeVar("T")
Scope = MutableMapping[str, Any]
_Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[_Message]]
Send = Callable[[_Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Refused = Callable[[Request, Exception], Awaitable[Response]]  # the response to what raised an error
HEALTH = "/health"
MESSAGES = "/v1/messages"  # paths that end so, or go on behind it, have errors in Anthropic's form
OWNER = "fppo.owner"  # in the scope of a request that was let through
CLOSING = (401, 408, 413)  # statuses after which the connection closes, without waiting for the rest of a body
_GONE = 499  # the status that servers note for a client that has gone; nobody reads it


def app_of(routers: Sequence[APIRouter], *, key: str, bounds: Bounds) -> App:
    """The application of these routes. A request without this key gets an error, and nothing else.

    GET /health answers without a key, by a router's own route or else with status "ok". Raises ValueError for an empty
    key.
    """
    if not key:
        raise ValueError("the server's key is empty: give one, or leave it to the server")
    health = APIRouter()
    health.add_api_route(HEALTH, _healthy)  # a router's own comes first
    return Guard(
        routed([*routers, health], _refused),
        _refused,
        owners={(b"authorization", f"Bearer {key}".encode()): "", (b"x-api-key", key.encode()): ""},
        advice="give the key that the server was started with, as Authorization: Bearer KEY, or as X-API-Key",
        free=lambda path: path == HEALTH,
        body_bytes=bounds.body_bytes,
        body_seconds=bounds.body_seconds,
    )


def routed(routers: Sequence[APIRouter], refused: Refused) -> App:
    """An application of routes, whose errors become responses by `refused`.

    It calls plain routes itself, which `add_route` adds: their endpoints take a request and return a response. The
    layers of FastAPI would cost more processor time than the rest of a short answer. An error of the server's own is
    raised again after the response, for its log.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for router in routers:
        app.include_router(router)
    for kind in (Refusal, AnyHTTPException, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
    routes = [route for router in routers for route in router.routes if type(route) is Route]

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        for route in routes if scope["type"] == "http" else ():
            match, more = route.matches(scope)
            if match is Match.FULL:
                await answer(route, {**scope, **more}, receive, send)
                return
        await app(scope, receive, send)

    async def answer(route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        request, raised = Request(scope, receive, send), None
        try:
            response = await route.endpoint(request)
        except Exception as error:
            raised, response = error, await refused(request, error)
        await response(scope, receive, send)
        if raised is not None and not isinstance(raised, Refusal | AnyHTTPException):
            raise raised

    return call


def by_path(prefix: str, app: App, other: App) -> App:
    """An application that answers paths beginning with `prefix` by one application, and all others by another."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        inside = str(scope.get("path", "")).startswith(prefix)
        await (app if inside else other)(scope, receive, send)

    return call


async def _healthy() -> JSONResponse:
    return health_response(None)


def health_response(problem: str | None) -> JSONResponse:
    """The response to a question for the server's health: its `problem` with status 503, or "ok" if it has none."""
    if problem is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "failed", "error": problem}, 503)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """An error in OpenAI's form, or in Anthropic's where the route is theirs."""
    if isinstance(error, AnyHTTPException):
        error = Refusal(str(error.detail), status=error.status_code)
    if not isinstance(error, Refusal):
        error = Refusal(f"the server failed: {type(error).__name__}", status=500)
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    path = str(request.scope.get("path", ""))
    theirs = path.endswith(MESSAGES) or f"{MESSAGES}/" in path
    return JSONResponse((messages_body_of if theirs else body_of)(error), error.status, headers)


@attrs.frozen(kw_only=True)
class Body:
    """A `receive` that first yields a body that has been read already, and then the messages after it."""

    body: bytes
    receive: Receive
    _read: list[bool] = attrs.field(factory=list)

    async def __call__(self) -> _Message:
        if self._read:
            return await self.receive()
        self._read.append(True)
        return {"type": "http.request", "body": self.body, "more_body": False}


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes | None:
    """The whole body of a request; None if the client goes away before its end. Raises Refusal for a body of over
    `max_bytes`, before all of it has come."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    parts, size, more = list[bytes](), int(length) if length.isdigit() else 0, True
    if size > max_bytes:
        raise Refusal(f"a body of {size:,} bytes; at most {max_bytes:,}", status=413)
    size = 0
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > max_bytes:
            raise Refusal(f"a body of over {max_bytes:,} bytes", status=413)
    return b"".join(parts)


class Guard:
    """Middleware that lets requests with a key through, with bodies that are within bounds and whole.

    `owners` are the owners of keys, by the header and its value; the one of a request is in its scope, as `OWNER`. Of
    several headers that a request has, the first one named in `owners` decides. Paths that are `free` need no key.
    `unpacked` decompresses a body, by its headers.
    """

    def __init__(
        self,
        app: App,
        refused: Refused,
        *,
        owners: Mapping[tuple[bytes, bytes], str],
        advice: str,
        free: Callable[[str], bool],
        body_bytes: int,
        body_seconds: float,
        unpacked: Callable[[bytes, Mapping[bytes, bytes]], bytes] = lambda body, headers: body,
    ) -> None:
        self._app, self._refused, self._free, self._unpacked = app, refused, free, unpacked
        self._owners, self._advice = owners, advice
        self._bytes, self._seconds = body_bytes, body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or any other event of the server."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or self._free(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            owner = self._owner(scope)
            async with asyncio.timeout(self._seconds):
                body = await read_body(scope, receive, self._bytes)
            whole = None if body is None else self._unpacked(body, dict(scope["headers"]))
        except TimeoutError:
            late = Refusal(f"the body had not come after {self._seconds:g} seconds", status=408)
            await self._refuse(late, scope, receive, send)
        except Refusal as error:
            await self._refuse(error, scope, receive, send)
        else:
            if whole is not None:
                await self._app({**scope, OWNER: owner}, Body(body=whole, receive=receive), send)

    def _owner(self, scope: Scope) -> str:
        """The owner of a request, by its key. Raises Refusal."""
        sent: Sequence[tuple[bytes, bytes]] = scope["headers"]
        header = next((name for name, _ in self._owners if any(name == other for other, _ in sent)), None)
        given = [value for name, value in sent if name == header]
        found = None
        for (name, key), owner in self._owners.items():  # all of them, so that the time tells nothing
            if name == header and len(given) == 1 and hmac.compare_digest(given[0], key):
                found = owner
        if found is None:
            raise Refusal(self._advice, status=401, code="invalid_api_key")
        return found

    async def _refuse(self, error: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._refused(Request(scope), error)
        if error.status in CLOSING:
            response.headers["connection"] = "close"
        await response(scope, receive, send)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await `work` for a client, and return its result. Once the client has gone, the work is cancelled, and Refusal
    raised."""
    waiting, left = asyncio.current_task(), list[bool]()
    assert waiting is not None
    gone = asyncio.ensure_future(_gone(request.receive))

    def leave(task: asyncio.Future[None]) -> None:
        if not task.cancelled() and task.exception() is None:
            left.append(True)
            waiting.cancel()

    gone.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError as error:
        if left and not waiting.uncancel():
            raise Refusal("the client has gone", status=_GONE) from error
        raise
    finally:
        gone.remove_done_callback(leave)
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events. `close` is called at its end, also if the client goes away before."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        del scope
        work, gone = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for each in (work, gone):
                each.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
