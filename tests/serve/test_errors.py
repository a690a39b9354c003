"""Requests that are malformed, too large or not allowed get the protocol's errors, and nothing reaches the engine."""

import pytest

from fppo.serve.service import Bounds
from tests.serve.world import MODEL, SIZE, parrot_world

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "find"}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


def asked(**more):
    return {"messages": [USER], **more}


MALFORMED = {  # name: (path, body, status, parameter or part of the message)
    "no body": (CHAT, b"", 400, "no JSON"),
    "no json": (CHAT, b"{", 400, "no JSON"),
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
    "many answers": (CHAT, asked(n=100_000), 400, "n"),
    "many answers to two prompts": (COMPLETIONS, {"prompt": ["find", "list"], "n": 65}, 400, "n"),
    "a stop id beyond": (CHAT, asked(stop_token_ids=[SIZE]), 400, "stop_token_ids"),
    "those of completions": (COMPLETIONS, {"prompt": "x", "logprobs": 1, "stream": True}, 400, "logprobs"),
    "a temperature of almost nothing": (CHAT, asked(temperature=1e-40), 400, "temperature"),
    "a misspelled parameter": (CHAT, asked(temprature=1), 400, "did you mean 'temperature'"),
    "tools that are none": (CHAT, asked(tools=[{"type": "function"}]), 400, "tools[0]"),
    "a forced call of nothing": (CHAT, asked(tool_choice="required"), 400, "tool_choice"),
    "a choice that is none": (CHAT, asked(tools=[TOOL], tool_choice="any"), 400, "tool_choice"),
    "no prompt": (COMPLETIONS, {}, 400, "prompt"),
    "an empty prompt": (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    "ids beyond": (COMPLETIONS, {"prompt": [10**9]}, 400, "prompt"),
    "a mixture": (COMPLETIONS, {"prompt": ["x", 3]}, 400, "prompt[1]"),
    "another model": (CHAT, asked(model="gpt"), 404, "model"),
    "another route": ("/v1/embeddings", {}, 404, "Not Found"),
    "a long episode's name": (f"/e/{'x' * 300}/v1/chat/completions", asked(), 400, "300 characters"),
    "too long": (CHAT, {"messages": [{"role": "user", "content": "find " * 600}]}, 400, "context_length_exceeded"),
    "too large": (CHAT, b"x" * ((1 << 17) + 1), 413, "at most"),
}


@pytest.fixture(scope="module")
def server():
    with parrot_world("lamp", bounds=Bounds(row_tokens=512, body_bytes=1 << 17, requests=1)) as made:
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
    assert world.episodes.names() == []
    assert world.post(CHAT, asked()).status_code == 200  # others go on


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
