"""The server's application, for any routes: it checks the key, bounds bodies, and gives errors in the protocol's
form."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeVar

import attrs
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.routing import Match, Route

from fppo.serve.protocol import ApiError
from fppo.serve.service import Bounds

T = TypeVar("T")
Scope = MutableMapping[str, Any]
_Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[_Message]]
Send = Callable[[_Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
HEALTH = "/health"
CLOSING = (401, 408, 413)  # statuses after which the connection closes, without waiting for the rest of a body
_GONE = 499  # the status that servers note for a client that has gone; nobody reads it


def app_of(routers: Sequence[APIRouter], *, key: str, bounds: Bounds) -> App:
    """The application of these routes. A request without this key gets an error, and nothing else.

    GET /health answers without a key, by a router's own route or else with status "ok". Raises ValueError for an empty
    key.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for router in routers:
        app.include_router(router)
    app.add_api_route(HEALTH, _healthy)  # a router's own comes first
    for kind in (ApiError, AnyHTTPException, HTTPException, Exception):
        app.add_exception_handler(kind, _refused)
    plain = by_plain_routes(routers, app, _refused, known=(ApiError, AnyHTTPException))
    return Guard(plain, key=key, bounds=bounds)


def by_plain_routes(
    routers: Sequence[APIRouter],
    app: App,
    refused: Callable[[Request, Exception], Awaitable[Response]],
    *,
    known: tuple[type[Exception], ...],
) -> App:
    """An application that calls the routers' plain routes itself, and leaves all else to `app`.

    Plain routes are those that `add_route` adds: their endpoints take a request and return a response. The layers of
    FastAPI would cost more processor time than the rest of a short answer. `refused` makes a response from an error. An
    error of none of the `known` kinds is raised again after the response, for the server's log.
    """
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
        if raised is not None and not isinstance(raised, known):
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
    """An error in the protocol's form."""
    del request
    if isinstance(error, AnyHTTPException):
        error = ApiError(error.status_code, str(error.detail))
    if not isinstance(error, ApiError):
        error = ApiError(500, f"the server failed: {type(error).__name__}", kind="server_error")
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body, error.status, headers)


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


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes | None:
    """The whole body of a request; None if the client goes away before its end. Raises ValueError for a body of over
    `most` bytes, before all of it has come."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    parts, size, more = list[bytes](), int(length) if length.isdigit() else 0, True
    if size > most:
        raise ValueError(f"a body of {size:,} bytes; at most {most:,}")
    size = 0
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > most:
            raise ValueError(f"a body of over {most:,} bytes")
    return b"".join(parts)


class Guard:
    """Middleware that lets requests with the right key through, with bodies that are within bounds and whole."""

    def __init__(self, app: App, *, key: str, bounds: Bounds) -> None:
        if not key:
            raise ValueError("the server's key is empty: give one, or leave it to the server")
        self._app, self._key, self._bounds = app, f"Bearer {key}".encode(), bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or any other event of the server."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or scope["path"] == HEALTH:
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            async with asyncio.timeout(self._bounds.body_seconds):
                body = await read_body(scope, receive, self._bounds.body_bytes)
        except TimeoutError:
            error = ApiError(408, f"the body had not come after {self._bounds.body_seconds:g} seconds")
            await self._refuse(error, scope, receive, send)
            return
        except ValueError as error:
            await self._refuse(ApiError(413, str(error)), scope, receive, send)
            return
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        if body is not None:
            await self._app(scope, Body(body=body, receive=receive), send)

    def _check_key(self, scope: Scope) -> None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(given[0], self._key):
            text = "give the key that the server was started with, as Authorization: Bearer KEY"
            raise ApiError(401, text, kind="authentication_error", code="invalid_api_key")

    @staticmethod
    async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"connection": "close"} if error.status in CLOSING else None
        await JSONResponse(error.body, error.status, headers)(scope, receive, send)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await `work` for a client, and return its result. Once the client has gone, the work is cancelled, and ApiError
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
            raise ApiError(_GONE, "the client has gone") from error
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
