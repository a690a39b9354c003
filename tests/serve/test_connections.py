"""Connections that ask for nothing: they have a deadline, are bounded in number, and are in nobody's way."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading

import httpx2 as httpx
import pytest

from fppo.serve.connections import most_connections
from fppo.serve.server import bound_socket, serving
from tests.serve.world import KEY, chat, parrot_world

CHAT = "/v1/chat/completions"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
RIGHT = {"authorization": f"Bearer {KEY}"}


def opened(url, sent=b""):
    """A connection that sends these bytes and no more."""
    host, port = url.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)), 30)
    raw.sendall(sent)
    return raw


def all_of(raw):
    """All that comes before the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError), raw:
        while part := raw.recv(4096):
            parts.append(part)
    return b"".join(parts)


def healthy(raw):
    """Whether the connection answers so; the head and the body may come apart."""
    answer = b""
    while not answer.endswith(b'{"status":"ok"}') and (part := raw.recv(4096)):
        answer += part
    return answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"GET /hea", b""),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx-more: ", b""),
        (HEALTH + b"GET /hea", b"HTTP/1.1 200"),
        (b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 90\r\n\r\n{", b"HTTP/1.1 405"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 90\r\n\r\n{", b"HTTP/1.1 401"),
    ],
)
def test_a_connection_that_does_not_go_on_is_closed(sent, status):
    with (
        parrot_world("lamp") as world,
        serving(world.app, bound_socket("127.0.0.1", 0), head_seconds=0.05, idle_seconds=0.05) as url,
    ):
        answer = all_of(opened(url, sent))
    assert answer.startswith(status)
    assert bool(answer) == bool(status)


def test_who_is_being_answered_has_no_deadline():
    with parrot_world("lamp") as world:
        world.engine.free.clear()
        with serving(world.app, bound_socket("127.0.0.1", 0), head_seconds=0.05) as url:
            gone, answers = opened(url), []
            ask = lambda: answers.append(httpx.post(url + CHAT, json=chat("find"), headers=RIGHT, timeout=60))  # noqa: E731
            thread = threading.Thread(target=ask)
            thread.start()
            assert all_of(gone) == b""  # for as long as that took, and as long again
            assert all_of(opened(url)) == b""
            world.engine.free.set()
            thread.join()
    assert answers[0].status_code == 200


def test_a_head_without_an_end_is_not_read():
    lines = b"".join(b"x-%d: " % number + b"y" * 4096 + b"\r\n" for number in range(1 << 12))
    with parrot_world("lamp") as world, serving(world.app, bound_socket("127.0.0.1", 0)) as url:
        raw = opened(url, b"GET /health HTTP/1.1\r\n")
        with raw, pytest.raises((ConnectionResetError, BrokenPipeError)):
            raw.sendall(lines)


def test_connections_without_a_request_make_room_for_others(caplog):
    """Those that wait longest go first, those that were answered before last; it is said once."""
    with parrot_world("lamp") as world, serving(world.app, bound_socket("127.0.0.1", 0), max_connections=4) as url:
        known = opened(url, HEALTH)
        assert healthy(known)
        idle = [opened(url) for _ in range(12)]
        assert [all_of(each) for each in idle[:9]] == [b""] * 9
        with httpx.Client(headers=RIGHT) as client:
            assert [client.post(url + CHAT, json=chat("find")).status_code for _ in range(3)] == [200] * 3
        known.sendall(HEALTH)
        assert healthy(known)
        for each in (*idle[9:], known):
            each.close()
    said = [record.getMessage().split(":")[0] for record in caplog.records if record.name.startswith("fppo.")]
    assert said == ["4 connections are open, the most"]


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/nowhere"])
def test_the_connection_closes_behind_a_wrong_key(path):
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer no\r\ncontent-length: 0\r\n\r\n".encode()
    with parrot_world("lamp") as world, serving(world.app, bound_socket("127.0.0.1", 0)) as url:
        answer = all_of(opened(url, head * 2)).decode()
    assert answer.startswith("HTTP/1.1 401")
    assert answer.count("HTTP/1.1") == 1
    assert "connection: close" in answer.lower()


SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from fppo.serve.connections import most_connections
from fppo.serve.server import bound_socket, serving
from tests.serve.world import parrot_world
with parrot_world(*["lamp"] * 9) as world, serving(world.app, bound_socket("127.0.0.1", 0)) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def test_a_process_may_have_as_many_connections_as_it_has_descriptors_to_spare():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 164, most[1]))
        found = most_connections()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert 90 <= found <= 100


@pytest.mark.slow
def test_more_idle_connections_than_descriptors_are_in_nobodys_way():
    command = [sys.executable, "-c", SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        url = next(line.strip() for line in process.stdout if line.startswith("http"))
        idle = [opened(url) for _ in range(300)]
        with httpx.Client(headers=RIGHT) as client:
            statuses = [client.post(url + CHAT, json=chat("find")).status_code for _ in range(3)]
        health = httpx.get(f"{url}/health").json()
        for each in idle:
            each.close()
        _, said = process.communicate("")
    assert (statuses, health) == ([200] * 3, {"status": "ok"})
    assert process.returncode == 0
    lines = [line for line in said.splitlines() if "connection" in line or "Traceback" in line]
    assert len(lines) == 1, json.dumps(lines)
