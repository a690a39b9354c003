"""The routes: whose episode an answer is of, what a recorded episode shows, and answers of which one fails."""

from __future__ import annotations

import asyncio
import gc
import json
import time

import pytest

from fppo.rollout.requests import QueueFull
from fppo.serve.service import Bounds
from tests.serve.world import MODEL, chat, parrot_world

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "header", "user", "name"),
    [
        ("p", "h", "u", "p"),
        (None, "h", "u", "h"),
        (None, None, "u", "u"),
        (None, None, None, "unnamed-0"),
        (None, None, "", "unnamed-0"),
        (None, None, "u" * 256, "u" * 256),
    ],
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_an_episode_is_that_of_the_path_or_the_header_or_the_user(path, header, user, name, route):
    body = (chat("find") if route == CHAT else {"prompt": "find"}) | ({} if user is None else {"user": user})
    headers = {} if header is None else {"x-session-id": header}
    with parrot_world("lamp") as world:
        assert world.post(f"{'' if path is None else f'/e/{path}'}{route}", body, headers=headers).status_code == 200
        assert world.episodes.names() == [name]


def test_a_name_is_bounded_and_a_model_is_the_servers():
    with parrot_world("lamp") as world:
        for route, body in ((CHAT, chat("find")), (COMPLETIONS, {"prompt": "find"})):
            assert world.post(route, body | {"user": "u" * 257}).status_code == 400
            refused = world.post(route, body | {"model": "other"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
            assert world.post(route, body | {"model": MODEL}).status_code == 200


def test_a_recorded_episode_shows_all_of_its_rows():
    with parrot_world("lamp", "which") as world:
        first = world.post(f"/e/7{CHAT}", chat("find")).json()["choices"][0]["message"]["content"]
        world.post(f"/e/7{CHAT}", chat("find", first, "again"))
        world.post(f"/e/7{CHAT}", chat("list"))
        rows = world.episodes.rows("7")

        async def get():
            async with world.client() as client:
                shown = (await client.get("/e/7")).json()
                taken = (await client.delete("/e/7")).json()
                return shown, taken

        shown, taken = asyncio.run(get())
        assert world.episodes.names() == []
    assert shown == taken
    assert shown == {
        "episode": "7",
        "rows": [
            {
                "number": row.number,
                "turns": [
                    {
                        "before": list(turn.before),
                        "opened": 0,
                        "tokens": turn.answer.tokens.tolist(),
                        "log_probs": turn.answer.log_probs.tolist(),
                        "sampling_log_probs": turn.answer.sampling_log_probs.tolist(),
                        "versions": [3] * len(turn.answer.tokens),
                        "text": turn.text,
                        "finish": "stop",
                    }
                    for turn in row.turns
                ],
            }
            for row in rows
        ],
    }
    assert [len(row["turns"]) for row in shown["rows"]] == [2, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_answers_one_that_fails_ends_the_others(stream):
    """Nothing is left that waits for them, in the server or in the engine."""
    with parrot_world(bounds=Bounds(row_tokens=512, requests=3)) as world:
        left = []

        async def run():
            async with world.client() as client:
                world.loop.submit, submit = once(world.loop.submit), world.loop.submit
                response = await client.post(CHAT, json=chat("find", n=3, max_tokens=400, stream=stream))
                world.loop.submit = submit
                await asyncio.sleep(0)
                gc.collect()
                left.extend(task for task in asyncio.all_tasks() if task is not asyncio.current_task())
                return response

        def once(submit):
            def one(request, receive, *, along):
                if request.name != "request-1":
                    submit(request, receive, along=along)
                else:
                    asyncio.get_running_loop().call_soon(receive, QueueFull("full"))

            return one

        response = asyncio.run(run())
        error = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
        assert error["code"] == "queue_full"
        assert response.status_code == (200 if stream else 429)
        assert world.episodes.names() == []
        assert world.post(CHAT, chat("find", n=3, max_tokens=5)).status_code == 200
    cancelled = {name for call, names in world.engine.calls if call == "cancel" for name in names}
    assert {"request-0", "request-2"} <= cancelled
    assert left == []


def test_replies_have_names_of_their_own_also_beside_those_of_other_servers():
    before, names = int(time.time()), []
    for _ in range(2):
        with parrot_world("lamp") as world:
            for route, body in ((CHAT, chat("find")), (COMPLETIONS, {"prompt": "find"}), (CHAT, chat("find"))):
                reply = world.post(route, body).json()
                names.append(reply["id"])
                assert before <= reply["created"] <= time.time()
    assert len({*names}) == len(names) == 6
    assert [name.partition("-")[0] for name in names[:3]] == ["chatcmpl", "cmpl", "chatcmpl"]


@pytest.mark.parametrize("before", ["", "/e/7"])
def test_models_are_told_as_the_protocol_has_them(before):
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "fppo"}
    with parrot_world("lamp") as world:

        async def get():
            async with world.client() as client:
                return [await client.get(f"{before}/v1/models{path}") for path in ("", f"/{MODEL}", "/other/one")]

        every, one, other = asyncio.run(get())
    assert every.json() == {"object": "list", "data": [model]}
    assert one.json() == model
    assert (other.status_code, other.json()["error"]["message"]) == (404, "there is no model 'other/one'")
