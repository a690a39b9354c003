"""The guards before the routes: who is let through, and bodies that are just within a bound and just beyond it."""

from __future__ import annotations

import asyncio
import json

import pytest
import zstandard

from fppo.serve.app import by_path
from fppo.serve.service import Bounds
from tests.serve.world import KEY, chat, parrot_world

CHAT = "/v1/chat/completions"
BODY = json.dumps(chat("find")).encode()
RIGHT = (b"authorization", f"Bearer {KEY}".encode())


def called(app, path=CHAT, *, headers=(RIGHT,), parts=(BODY,), kind="http", method="POST"):
    """Messages of an application for a body in parts."""
    left, sent = [*parts], []

    async def receive():
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": [*headers], "http_version": "1.1", "scheme": "http", "root_path": ""}
    asyncio.run(app(scope, receive, send))
    return sent


def length_of(number):
    return (b"content-length", str(number).encode())


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("parts", [(BODY,), (BODY[:9], BODY[9:])])
def test_a_body_may_have_as_many_bytes_as_its_bound_and_no_more(told, parts):
    headers = (RIGHT, *([length_of(len(BODY))] if told else []))
    for most, status in ((len(BODY), 200), (len(BODY) - 1, 413)):
        with parrot_world("lamp", bounds=Bounds(row_tokens=512, body_bytes=most)) as world:
            first = called(world.app, headers=headers, parts=parts)[0]
        assert first["status"] == status
        assert ((b"connection", b"close") in first["headers"]) == (status == 413)


def test_only_the_path_of_health_is_open():
    with parrot_world("lamp") as world:
        for headers in ((), (RIGHT,)):
            health = called(world.app, "/health", headers=headers, method="GET")
            assert [message["type"] for message in health] == ["http.response.start", "http.response.body"]
            assert (health[0]["status"], json.loads(health[1]["body"])) == (200, {"status": "ok"})
        for path in ("/healthy", "/health/v1/models", "/v1/health"):
            assert called(world.app, path, headers=())[0]["status"] == 401
        assert called(world.app, kind="websocket") == [{"type": "websocket.close", "code": 1008}]


def test_a_server_that_takes_no_requests_says_when_to_come_again():
    with parrot_world("lamp") as world:
        world.service.attach(None)
        response = world.post(CHAT, chat("find"))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_what_fails_in_the_server_is_an_error_without_its_text():
    with parrot_world("lamp") as world:
        world.service.chat = None  # what is called then raises
        response = world.post(CHAT, chat("find"))
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["type"], error["message"]) == ("server_error", "the server failed: TypeError")


def test_paths_are_those_of_one_application_or_of_the_other():
    seen = []

    def app_of(name):
        async def app(scope, receive, send):
            seen.append((name, scope["path"]))

        return app

    both = by_path("/api/", app_of("one"), app_of("other"))
    for path in ("/api/v1", "/v1/api/", "/"):
        called(both, path)
    assert seen == [("one", "/api/v1"), ("other", "/v1/api/"), ("other", "/")]


def test_compressed_bodies_are_bounded_once_they_are_written_out():
    guard = pytest.importorskip("fppo.serve.tinker.guard")
    whole = b"ab" * 500
    packed = zstandard.ZstdCompressor().compress(whole)
    assert guard.decompressed(packed, "zstd", 1000) == whole
    assert guard.decompressed(whole, "identity", 1000) == whole
    for body, encoding, most, status in (
        (packed, "zstd", 999, 413),
        (packed, "gzip", 1000, 415),
        (b"x" * 50, "zstd", 1000, 400),
    ):
        with pytest.raises(guard.Refusal) as raised:
            guard.decompressed(body, encoding, most)
        assert raised.value.status == status


def test_each_key_has_an_owner_of_its_own():
    guard = pytest.importorskip("fppo.serve.tinker.guard")
    decode = pytest.importorskip("fppo.serve.tinker.decode")
    sessions = pytest.importorskip("fppo.serve.tinker.sessions")
    owners = []

    async def app(scope, receive, send):
        owners.append(scope.get(guard.OWNER))
        assert (await receive())["body"] == BODY

    made = guard.KeyGuard(app, keys=("one", "two"), bounds=decode.TinkerBounds(body_bytes=len(BODY)))
    for key in ("one", "two"):
        called(made, headers=((b"x-api-key", key.encode()), length_of(len(BODY))))
    assert owners == [sessions.owner_of("one"), sessions.owner_of("two")]
    for headers in ((), ((b"x-api-key", b"three"),), ((b"x-api-key", b"one"),) * 2):
        assert called(made, headers=headers)[0]["status"] == 401
    assert called(made, headers=((b"x-api-key", b"one"),), parts=(BODY, b" "))[0]["status"] == 413
    for keys in ((), ("one", "")):
        with pytest.raises(ValueError, match="no key, or an empty one"):
            guard.KeyGuard(app, keys=keys, bounds=decode.TinkerBounds())
