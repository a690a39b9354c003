"""Clients that come together, go away, or meet a server that ends: each gets its own, and nobody loses anything."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx2 as httpx
import openai
import pytest

from fppo.serve.server import address_of, bound_socket, is_loopback, new_key, serving
from fppo.serve.service import Bounds
from tests.serve.world import END, KEY, MODEL, chat, parrot_world, paused, scope_of, until

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_row_and_no_other(stream):
    with parrot_world(bounds=Bounds(row_tokens=512, requests=2)) as world:

        async def run():
            gone, sent = asyncio.Event(), []
            body = json.dumps(chat("find", stream=stream, max_tokens=400)).encode()
            first = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive():
                if first:
                    return first.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message):
                sent.append(message)

            with paused(world.engine):
                leaving = asyncio.create_task(world.app(scope_of(f"/e/gone{CHAT}", method="POST"), receive, send))
                await until(lambda: world.engine.requests)
                async with world.client() as client:
                    staying = asyncio.create_task(client.post(f"/e/stays{CHAT}", json=chat("list", max_tokens=9)))
                    await until(lambda: len(world.engine.requests) == 2)
                    gone.set()
                    await leaving
                    world.engine.free.set()
                    response = await staying
            return response

        response = asyncio.run(run())
        name = world.engine.requests[0].name
        assert response.status_code == 200
        assert world.episodes.names() == ["stays"]  # an answer that nobody read is no part of an episode
        assert ("cancel", (name,)) in world.engine.calls
        assert ("release", (name,)) in world.engine.calls
        again = world.post(f"/e/gone{CHAT}", chat("find", max_tokens=9, n=2))
        assert again.status_code == 200  # as many as there may be
    assert world.engine.requests[-2].key == world.engine.requests[0].key  # as if it had never been there


def test_a_retry_goes_on_with_the_same_row():
    with parrot_world("lamp", "a", "a") as world:
        first = world.post(f"/e/1{CHAT}", chat("find")).json()["choices"][0]["message"]["content"]

        async def run():
            async def receive():
                if not seen:
                    seen.append(1)
                    return {"type": "http.request", "body": body, "more_body": False}
                await until(lambda: len(world.engine.requests) == 2)
                return {"type": "http.disconnect"}

            async def send(message):
                del message

            body, seen = json.dumps(chat("find", first, "again")).encode(), []
            with paused(world.engine):
                await world.app(scope_of(f"/e/1{CHAT}", method="POST"), receive, send)

        asyncio.run(run())
        assert world.post(f"/e/1{CHAT}", chat("find", first, "again")).status_code == 200
        (row,) = world.episodes.rows("1")
        assert len(row.turns) == 2
    tried, retried = world.engine.requests[1:]
    assert (tried.after, tried.ids, tried.key) == (retried.after, retried.ids, retried.key)


def test_more_requests_than_may_wait_are_refused_at_once():
    with parrot_world(bounds=Bounds(row_tokens=512, requests=4)) as world:

        async def run():
            async with world.client() as client:
                with paused(world.engine):
                    posts = [client.post(f"/e/{n}{CHAT}", json=chat("find", max_tokens=5)) for n in range(9)]
                    tasks = [asyncio.create_task(post) for post in posts]
                    await until(lambda: sum(task.done() for task in tasks) == 5)
                    refused = [task.result() for task in tasks if task.done()]
                    world.engine.free.set()
                    return refused, [task.result() for task in tasks if await task and task.result() not in refused]

        refused, answered = asyncio.run(run())
        assert {response.status_code for response in refused} == {429}
        assert {response.json()["error"]["type"] for response in refused} == {"rate_limit_error"}
        assert refused[0].headers["retry-after"] == "1"
        assert [response.status_code for response in answered] == [200] * 4
        assert world.post(CHAT, chat("find", max_tokens=5, n=4)).status_code == 200


def test_what_the_engine_refuses_is_an_error_of_that_request_alone():
    with parrot_world("lamp", "lamp") as world:
        world.engine.says = lambda request, before: [5, END]

        async def run():
            async with world.client() as client:
                with paused(world.engine):
                    tasks = [asyncio.create_task(client.post(CHAT, json=chat(text))) for text in ("find", "list")]
                    await until(lambda: len(world.engine.requests) == before + 2)
                    world.engine.free.set()
                return await asyncio.gather(*tasks)

        first = world.post(f"/e/1{CHAT}", chat("find")).json()["choices"][0]["message"]["content"]
        world.loop.release([world.engine.requests[0].name])  # behind the service's back
        refused = world.post(f"/e/1{CHAT}", chat("find", first, "again"))
        assert refused.status_code == 400
        assert "not kept" in refused.json()["error"]["message"]
        before = len(world.engine.requests)
        assert [response.status_code for response in asyncio.run(run())] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_tells_all_who_wait(stream):
    with parrot_world() as world:

        async def run():
            async with world.client() as client:
                with paused(world.engine):
                    posts = [client.post(f"/e/{n}{CHAT}", json=chat("find", stream=stream)) for n in range(3)]
                    tasks = [asyncio.create_task(post) for post in posts]
                    await until(lambda: len(world.engine.requests) == 3)
                    world.engine.fails = RuntimeError("secret path")
                    world.engine.free.set()
                    return await asyncio.gather(*tasks), await client.post(CHAT, json=chat("find"))

        responses, later = asyncio.run(run())
        for response in responses:
            text = response.text.strip().split("\n\n")[-1].removeprefix("data: ")
            error = json.loads(text)["error"]
            assert error["type"] == "server_error"
            assert "secret" not in error["message"]
            assert response.status_code == (200 if stream else 500)
        assert later.status_code == 503
        assert isinstance(world.loop.failure, RuntimeError)
        assert world.episodes.names() == []


def test_a_server_that_ends_tells_all_who_wait():
    world = parrot_world()

    async def run():
        async with world.client() as client:
            with paused(world.engine):
                task = asyncio.create_task(client.post(CHAT, json=chat("find")))
                await until(lambda: world.engine.requests)
                await asyncio.to_thread(world.loop.stop)
                return await task

    with world:
        assert asyncio.run(run()).status_code == 503
    assert world.engine.calls[-1] == ("closed", ())


def test_hosts_that_others_reach_need_a_word():
    for host in ("0.0.0.0", "192.168.1.1", "::", "example.org"):
        with pytest.raises(ValueError, match="--public"):
            bound_socket(host, 0)
    assert is_loopback("localhost")
    assert is_loopback("127.0.0.2")
    assert is_loopback("::1")
    with bound_socket("127.0.0.1", 0) as listener:
        assert address_of(listener).startswith("http://127.0.0.1:")
        port = listener.getsockname()[1]
        listener.listen()
        with pytest.raises(ValueError, match=f"--port {port}"):
            bound_socket("127.0.0.1", port)
    with pytest.raises(ValueError, match="--port 99999"):
        bound_socket("127.0.0.1", 99999)
    with bound_socket("0.0.0.0", 0, public=True):
        pass
    assert len(new_key()) > 40
    assert new_key() != new_key()


def test_a_server_ends_with_its_context():
    listener = bound_socket("127.0.0.1", 0)
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    with parrot_world("lamp") as world, serving(world.app, listener) as url:
        assert url == address_of(listener)
        answer = httpx.get(f"{url}/health")
        assert answer.status_code == 200
        assert "server" not in answer.headers
    assert listener.fileno() == -1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    with bound_socket("::1", 0) as other:
        assert address_of(other) == f"http://[::1]:{other.getsockname()[1]}"


def test_a_real_server_and_unmodified_clients():
    """Threads of a synchronous client, a stream that is left, bytes that are no HTTP, and the end of the server."""
    with parrot_world() as world, serving(world.app, bound_socket("127.0.0.1", 0)) as url:
        texts = {}

        def one(number):
            with openai.OpenAI(base_url=f"{url}/e/{number}/v1", api_key=KEY, max_retries=0) as client:
                how = {"model": MODEL, "messages": [{"role": "user", "content": "find"}], "max_tokens": 12}
                if number % 2:
                    chunks = client.chat.completions.create(stream=True, **how)
                    texts[number] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                else:
                    texts[number] = client.chat.completions.create(**how).choices[0].message.content

        threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 5) as raw:
            raw.sendall(b"\x00\x01nonsense\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 400")
        for thread in threads:
            thread.join()
        for number in range(6):
            assert world.episodes.rows(str(number))[0].turns[0].text == texts[number]
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="temperature"):
                client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], temperature=-1)
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
            assert [model.id for model in client.models.list()] == [MODEL]
            world.engine.free.clear()  # the answer is to be under way when its reader leaves
            left = client.chat.completions.create(
                model=MODEL, user="left", messages=[{"role": "user", "content": "x"}], max_tokens=400, stream=True
            )
            asyncio.run(until(lambda: world.engine.requests[-1].sampling.max_tokens == 400))
            left.close()
        name = world.engine.requests[-1].name
        asyncio.run(until(lambda: ("cancel", (name,)) in world.engine.calls))
        world.engine.free.set()
        other = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
        with other, pytest.raises(openai.AuthenticationError):
            other.models.list()
        assert world.episodes.rows("left") == ()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
