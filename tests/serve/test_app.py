"""The layers around the routes, called as a server calls them: bodies, streams, clients that go, errors."""

from __future__ import annotations

import asyncio
import json

import pytest
from fastapi import APIRouter, HTTPException
from fastapi.responses import JSONResponse, Response

from fppo.serve.app import Body, EventStream, app_of, by_path, read_body, unless_gone
from fppo.serve.refusal import Refusal
from fppo.serve.service import Bounds
from tests.serve.world import KEY, RIGHT, scope_of


def message(body=b"", *, more=False):
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


class Wire:
    """The messages from a client, and those that are sent to it."""

    def __init__(self, *messages):
        self.left, self.sent = [*messages], []

    async def receive(self):
        if not self.left:
            await asyncio.Event().wait()
        return self.left.pop(0)

    async def send(self, given):
        self.sent.append(given)

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def error(self):
        return json.loads(self.sent[1]["body"])["error"]


def called(app, wire, scope=None):
    asyncio.run(app(scope or scope_of(), wire.receive, wire.send))
    return wire


def test_a_body_is_put_together_and_what_follows_comes_as_it_does():
    wire = Wire(message(b"ab", more=True), {"type": "http.request"}, GONE)

    async def read():
        whole = await read_body(scope_of(), wire.receive, 2)
        body = Body(body=whole, receive=wire.receive)
        return whole, await body(), await body()

    whole, first, second = asyncio.run(read())
    assert (whole, first, second) == (b"ab", message(b"ab"), GONE)
    assert asyncio.run(read_body(scope_of(), Wire(message(b"a", more=True), GONE).receive, 9)) is None


@pytest.mark.parametrize("length", [b"4", b"99", b"many", b"-1", None])
def test_a_body_is_bounded_by_what_it_is_and_by_what_it_says(length):
    headers = () if length is None else ((b"content-length", length),)
    wire = Wire(message(b"abc", more=True), message(b"d"), message(b"e"))

    def read(most):
        wire.left = [message(b"abc", more=True), message(b"d")]
        return asyncio.run(read_body(scope_of(headers=headers), wire.receive, most))

    if length == b"99":
        with pytest.raises(Refusal, match="a body of 99 bytes; at most 50"):
            read(50)
        assert len(wire.left) == 2  # none of it was read
        return
    assert read(4) == b"abcd"
    with pytest.raises(Refusal, match=r"a body of (over 3|4) bytes"):
        read(3)


def test_the_guard_lets_whole_bodies_with_the_key_through():
    router, bodies = APIRouter(), []

    async def plain(request):
        bodies.append(await request.body())
        return Response(b"fine")

    router.add_route("/x", plain)
    guard = app_of([router], key=KEY, bounds=Bounds(body_bytes=5, body_seconds=0.05))
    assert called(guard, Wire(message(b"ab", more=True), message(b"c"))).status == 200
    for headers in ((), ((b"authorization", b"Bearer kex"),), (RIGHT, RIGHT), ((b"authorization", b"key"),)):
        wire = called(guard, Wire(message(b"abc")), scope_of(headers=headers))
        assert (wire.status, wire.error["type"], wire.error["code"]) == (401, "authentication_error", "invalid_api_key")
        assert (b"connection", b"close") in wire.sent[0]["headers"]
        assert wire.left  # its body was not read
    late = called(guard, Wire(message(b"ab", more=True)))
    assert (late.status, (b"connection", b"close") in late.sent[0]["headers"]) == (408, True)
    assert late.error["message"] == "the body had not come after 0.05 seconds"
    large = called(guard, Wire(message(b"abcdef")))
    assert (large.status, (b"connection", b"close") in large.sent[0]["headers"]) == (413, True)
    assert called(guard, Wire(message(b"a", more=True), GONE)).sent == []
    socket = called(guard, Wire(), scope_of(kind="websocket"))
    assert socket.sent == [{"type": "websocket.close", "code": 1008}]
    assert bodies == [b"abc"]
    for path, status in (("/health", 200), ("/healthy", 401), ("/health/v1/models", 401), ("/v1/health", 401)):
        assert called(guard, Wire(message()), scope_of(path, headers=())).status == status
    with pytest.raises(ValueError, match="key is empty"):
        app_of([], key="", bounds=Bounds())


def whole_app():
    """An application with plain routes and others, which fail as their paths say."""
    router, other = APIRouter(), APIRouter()

    async def plain(request):
        what = request.path_params["what"]
        if what == "known":
            raise Refusal("full", status=429, code="queue_full")
        if what == "http":
            raise HTTPException(418, "tea")
        if what == "broken":
            raise KeyError("secret")
        return JSONResponse({"what": what, "body": (await request.body()).decode()})

    router.add_route("/plain/{what}", plain, methods=["POST"])

    @other.get("/wrapped/{what}")
    async def wrapped(what: str):
        if what == "known":
            raise Refusal("stopped", status=503)
        if what == "http":
            raise HTTPException(418, "tea")
        return {"what": what}

    return app_of([router, other], key=KEY, bounds=Bounds())


def test_routes_answer_and_their_errors_have_the_protocols_form():
    app = whole_app()
    wire = called(app, Wire(message(b"hi")), scope_of("/plain/x", method="POST"))
    assert json.loads(wire.sent[1]["body"]) == {"what": "x", "body": "hi"}
    assert json.loads(called(app, Wire(message()), scope_of("/wrapped/y")).sent[1]["body"]) == {"what": "y"}
    assert json.loads(called(app, Wire(message()), scope_of("/health")).sent[1]["body"]) == {"status": "ok"}
    for path, method, status, text, waits in (
        ("/plain/known", "POST", 429, "full", True),
        ("/wrapped/known", "GET", 503, "stopped", True),
        ("/plain/http", "POST", 418, "tea", False),
        ("/wrapped/http", "GET", 418, "tea", False),
        ("/nothing", "GET", 404, "Not Found", False),
        ("/plain/x", "GET", 405, "Method Not Allowed", False),
    ):
        wire = called(app, Wire(message()), scope_of(path, method=method))
        assert (wire.status, wire.error["message"]) == (status, text)
        assert ((b"retry-after", b"1") in wire.sent[0]["headers"]) == waits
    wire = Wire(message())
    with pytest.raises(KeyError):  # for the server's log
        called(app, wire, scope_of("/plain/broken", method="POST"))
    assert (wire.status, wire.error["message"]) == (500, "the server failed: KeyError")
    assert wire.error["type"] == "server_error"


def streamed(events, *messages):
    """The messages that a stream of events sends to a client, how often it was closed, and its error."""
    closed, wire = [], Wire(*messages)
    stream = EventStream(events, lambda: closed.append(1))
    error = None
    try:
        called(stream, wire)
    except RuntimeError as raised:
        error = raised
    return wire.sent, len(closed), error


def test_a_stream_sends_its_events_and_is_closed_once():
    async def events():
        yield "a\n"
        yield "é"

    (start, *bodies), closed, error = streamed(events())
    headers = dict(start["headers"])
    assert (start["type"], start["status"], headers[b"cache-control"]) == ("http.response.start", 200, b"no-cache")
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    assert [(x["body"], x["more_body"]) for x in bodies] == [(b"a\n", True), ("é".encode(), True), (b"", False)]
    assert (closed, error) == (1, None)


def test_a_stream_ends_where_its_client_goes_and_where_it_fails():
    ended = []

    async def endless():
        try:
            yield "a"
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    sent, closed, error = streamed(endless(), message(), GONE)
    assert (sent[-1]["more_body"], closed, error) == (True, 1, None)
    assert ended == [1]

    async def fails():
        yield "a"
        raise RuntimeError("broken")

    sent, closed, error = streamed(fails())
    assert (len(sent), closed, str(error)) == (2, 1, "broken")


class Asked:
    def __init__(self, wire):
        self.receive = wire.receive


def test_work_for_a_client_that_goes_is_left():
    cancelled = []

    async def work():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    async def done():
        await asyncio.sleep(0)
        return 7

    async def play():
        assert await unless_gone(Asked(Wire()), done()) == 7
        with pytest.raises(Refusal, match="the client has gone"):
            await unless_gone(Asked(Wire(message(), GONE)), work())
        assert cancelled == [1]
        assert asyncio.current_task().cancelling() == 0
        outer = asyncio.create_task(unless_gone(Asked(Wire()), work()))
        await asyncio.sleep(0)
        outer.cancel()  # by somebody else
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert cancelled == [1, 1]
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(play())


def test_paths_are_those_of_one_application_or_of_the_other():
    seen = []

    def noting(name):
        async def app(scope, receive, send):
            seen.append((name, scope["path"]))

        return app

    both = by_path("/api/", noting("one"), noting("other"))
    for path in ("/api/v1", "/v1/api/", "/"):
        called(both, Wire(), scope_of(path))
    assert seen == [("one", "/api/v1"), ("other", "/v1/api/"), ("other", "/")]
