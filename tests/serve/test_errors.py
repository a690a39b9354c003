"""Requests that are malformed, too large or not allowed get the protocol's errors, and nothing reaches the engine."""

import json

import pytest

from fppo.serve.service import Bounds
from tests.serve.world import KEY, MODEL, SIZE, parrot_world

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "find"}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


def asked(**more):
    return {"messages": [USER], **more}


MALFORMED = {  # name: (path, body, status, parameter or part of the message)
    "no body": (CHAT, b"", 400, "no JSON"),
    "no json": (CHAT, b"{", 400, "no JSON"),
    "no utf-8": (CHAT, b'{"messages": "\xff"}', 400, "no JSON"),
    "a list": (CHAT, b"[]", 400, "not an object"),
    "nan": (CHAT, b'{"messages": [], "temperature": NaN}', 400, "no JSON"),
    "deep": (CHAT, b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, "no JSON"),
    "half a pair": (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "surrogate"),
    "no messages": (CHAT, {}, 400, "messages"),
    "empty messages": (CHAT, {"messages": []}, 400, "messages"),
    "a text for messages": (CHAT, {"messages": "find"}, 400, "messages"),
    "a message that is none": (CHAT, {"messages": ["find"]}, 400, "messages[0]"),
    "a message without a role": (CHAT, {"messages": [{"content": "find"}]}, 400, "messages[0].role"),
    "an unknown role": (CHAT, {"messages": [{"role": "god", "content": "x"}]}, 400, "messages[0].role"),
    "a message without content": (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    "a number for content": (CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content"),
    "an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages[0].content[0]",
    ),
    "a call without a function": (
        CHAT,
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        400,
        "messages[1].tool_calls[0]",
    ),
    "temperature": (CHAT, asked(temperature=-1), 400, "temperature"),
    "a temperature of almost nothing": (CHAT, asked(temperature=1e-40), 400, "temperature"),
    "a text for temperature": (CHAT, asked(temperature="hot"), 400, "temperature"),
    "true for temperature": (CHAT, asked(temperature=True), 400, "temperature"),
    "top_p": (CHAT, asked(top_p=0), 400, "top_p"),
    "no tokens": (CHAT, asked(max_tokens=0), 400, "max_tokens"),
    "half a token": (CHAT, asked(max_tokens=1.5), 400, "max_tokens"),
    "no answer": (CHAT, asked(n=0), 400, "n"),
    "many answers": (CHAT, asked(n=100_000), 400, "n"),
    "many answers to two prompts": (COMPLETIONS, {"prompt": ["find", "list"], "n": 65}, 400, "n"),
    "an empty stop": (CHAT, asked(stop=""), 400, "stop"),
    "many stops": (CHAT, asked(stop=["x"] * 100), 400, "stop"),
    "a stop id beyond": (CHAT, asked(stop_token_ids=[SIZE]), 400, "stop_token_ids"),
    "seed": (CHAT, asked(seed=2**70), 400, "seed"),
    "top_logprobs alone": (CHAT, asked(top_logprobs=3), 400, "top_logprobs"),
    "likeliest tokens of a stream": (CHAT, asked(logprobs=True, top_logprobs=3, stream=True), 400, "top_logprobs"),
    "those of completions": (COMPLETIONS, {"prompt": "x", "logprobs": 1, "stream": True}, 400, "logprobs"),
    "too many likeliest tokens": (CHAT, asked(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    "stream_options alone": (CHAT, asked(stream_options={"include_usage": True}), 400, "stream_options"),
    "a penalty": (CHAT, asked(presence_penalty=0.5), 400, "presence_penalty"),
    "a bias": (CHAT, asked(logit_bias={"5": 10}), 400, "logit_bias"),
    "a format": (CHAT, asked(response_format={"type": "json_object"}), 400, "response_format"),
    "a misspelled parameter": (CHAT, asked(temprature=1), 400, "temprature"),
    "tools that are none": (CHAT, asked(tools=[{"type": "function"}]), 400, "tools[0]"),
    "a forced call of nothing": (CHAT, asked(tool_choice="required"), 400, "tool_choice"),
    "a choice that is none": (CHAT, asked(tools=[TOOL], tool_choice="any"), 400, "tool_choice"),
    "no prompt": (COMPLETIONS, {}, 400, "prompt"),
    "an empty prompt": (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    "an empty list": (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    "ids below 0": (COMPLETIONS, {"prompt": [-1]}, 400, "prompt[0]"),
    "ids beyond": (COMPLETIONS, {"prompt": [10**9]}, 400, "prompt"),
    "huge ids": (COMPLETIONS, {"prompt": [10**30]}, 400, "prompt"),
    "a mixture": (COMPLETIONS, {"prompt": ["x", 3]}, 400, "prompt[1]"),
    "echo": (COMPLETIONS, {"prompt": "x", "echo": True}, 400, "echo"),
    "another model": (CHAT, asked(model="gpt"), 404, "model"),
    "another route": ("/v1/embeddings", {}, 404, "Not Found"),
    "a long episode's name": (f"/e/{'x' * 300}/v1/chat/completions", asked(), 400, "300 characters"),
    "too long": (CHAT, {"messages": [{"role": "user", "content": "find " * 600}]}, 400, "messages"),
    "too large": (CHAT, b"x" * ((1 << 17) + 1), 413, "at most"),
}


@pytest.fixture(scope="module")
def server():
    with parrot_world("lamp", bounds=Bounds(row_tokens=512, body_bytes=1 << 17)) as made:
        yield made


@pytest.fixture
def world(server):
    """The server, with no episode of another test's."""
    for episode in server.episodes.names():
        server.episodes.take(episode)
    return server


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_gets_an_error_of_the_protocol(world, name):
    path, body, status, part = MALFORMED[name]
    before = len(world.engine.requests)
    response = world.post(path, body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert part in (error["param"], error["code"]) or part in error["message"]
    assert len(world.engine.requests) == before
    assert world.service._open == 0
    assert world.episodes.names() == []
    assert world.post(CHAT, asked()).status_code == 200  # others go on


def test_too_many_tokens_have_the_code_that_clients_know(world):
    response = world.post(CHAT, {"messages": [{"role": "user", "content": "find " * 600}]})
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_misspelled_parameter_is_answered_with_the_nearest(world):
    assert "did you mean 'temperature'" in world.post(CHAT, asked(temprature=1)).json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", KEY)],
        [("authorization", f"Bearer {KEY}")] * 2,
        [("authorization", f"bearer {KEY}x")],
        [("authorization", "Bearer \xe9")],
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/e/x", "/nowhere"])
def test_nothing_is_to_be_had_without_the_key(world, headers, path):
    import asyncio

    sent = []

    async def receive():
        raise AssertionError("the body of a request without a key was read")

    async def send(message):
        sent.append(message)

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": raw, "http_version": "1.1", "scheme": "http", "root_path": ""}
    asyncio.run(world.app(scope, receive, send))
    assert sent[0]["status"] == 401
    assert json.loads(sent[1]["body"])["error"]["code"] == "invalid_api_key"


def test_what_changes_nothing_is_passed_over(world):
    more = {
        "metadata": {"a": "b"},
        "store": False,
        "presence_penalty": 0,
        "logit_bias": {},
        "user": None,
        "model": MODEL,
    }
    more |= {"response_format": {"type": "text"}, "parallel_tool_calls": True, "top_p": 1, "n": 1}
    assert world.post(CHAT, asked(**more)).status_code == 200


def test_an_episode_without_an_answer_is_not_found(world):
    assert world.post("/e/nobody", {}).status_code == 405
    import asyncio

    async def get():
        async with world.client() as client:
            return await client.get("/e/nobody"), await client.get("/health"), await client.get("/v1/models")

    missing, health, models = asyncio.run(get())
    assert missing.json()["error"]["code"] == "episode_not_found"
    assert health.json() == {"status": "ok"}
    assert [x["id"] for x in models.json()["data"]] == [MODEL]


def test_an_error_of_the_server_itself_is_told_and_raised_for_its_log(world, monkeypatch):
    def fails(*_):
        raise KeyError("planted")

    monkeypatch.setattr(world.service, "chat", fails)
    response = world.post(CHAT, asked())
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the server failed: KeyError"
    monkeypatch.setattr(world, "raises", True)
    with pytest.raises(KeyError, match="planted"):
        world.post(CHAT, asked())


def test_a_wrong_method_is_answered_with_those_that_there_are(world):
    import asyncio

    async def get():
        async with world.client() as client:
            return await client.get(CHAT)

    response = asyncio.run(get())
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_server_wants_a_key():
    from fppo.serve.app import app_of

    with pytest.raises(ValueError, match="key is empty"):
        app_of([], key="", bounds=Bounds())
