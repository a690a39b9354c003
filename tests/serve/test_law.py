"""Episodes that unmodified clients play are those of a loop over the library's own engine: ids, masks, log-probs."""

from __future__ import annotations

import asyncio
import contextlib
from functools import cache, partial

import attrs
import openai
import pytest
import torch

from fppo import models, quickstart
from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask
from fppo.rollout.requests import Request
from fppo.rollout.scores import Scores
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.runner import ToolRunner
from fppo.serve.rows import rollout_of_rows
from fppo.steps import Forward
from fppo_kernels.table import EXACT, INSIDE, Kernels, needs_cpp
from tests.serve.test_forced import READ, TOOLS, opening, texts_with
from tests.serve.world import END, MODEL, World, sampling, texts, tokenizer

TURNS, TOKENS, EPISODES = 3, 12, 12
STOPS = (1, END, *range(40, 60))  # a random model says the end of a turn too rarely


@cache
def policy(dtype=torch.float32, exact=False):
    model = quickstart.small_model(len(tokenizer()), width=32, positions=512)
    params = {name: 2 * x.to(dtype) for name, x in models.init_params(model, Key(1)).items()}
    kernels = exact_kernels(model) if exact else Forward(model).kernels
    return EmbeddedEngine(model=model, kernels=kernels, pad_token_id=0, exact=exact), params


def exact_kernels(model):
    """Kernels whose sums do not depend on other rows."""
    inside = [op for op in EXACT["cpu"] if op in INSIDE and not models.has_place(model.skeleton, op)]
    return Kernels.named(**{op: name for op, name in EXACT["cpu"].items() if op not in inside})


@pytest.mark.parametrize("kind", ["chats", "completions"])
def test_the_likeliest_tokens_stand_beside_each_token(kind):
    """Under softmax(logits), whatever the temperature, as a request of the engine's own has them."""
    engine, params = policy()
    body = {"max_tokens": 5, "temperature": 0.5, "return_token_ids": True}
    path, more = {
        "chats": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "find"}], "logprobs": True}),
        "completions": ("/v1/completions", {"prompt": "find the", "logprobs": 4}),
    }[kind]
    more |= {"top_logprobs": 4} if kind == "chats" else {}
    with World(engine, params=params) as world:
        (choice,) = world.post(path, {**body, **more}).json()["choices"]
    ids, whole = choice["token_ids"], (*choice["prompt_token_ids"], *choice["token_ids"])
    how = {"sampling": sampling(max_tokens=1), "key": Key(0), "scores": Scores(prompt=True, prompt_top=4)}
    with engine.open(params) as requests:
        requests.add([Request(name="a", ids=whole, **how)])
        (finished,) = requests.step().finished
    scores = finished.prompt_scores
    expected = scores.log_probs[-len(ids) :].tolist(), scores.top.log_probs[-len(ids) :].tolist()
    if kind == "chats":
        noted = choice["logprobs"]["content"]
        own, top = [x["logprob"] for x in noted], [[y["logprob"] for y in x["top_logprobs"]] for x in noted]
        shown = [[bytes(y["bytes"]) for y in x["top_logprobs"]] for x in noted]
        assert shown == [[texts().piece(token) for token in row] for row in scores.top.ids[-len(ids) :].tolist()]
    else:
        own = choice["logprobs"]["token_logprobs"]
        top = [[*row.values()] for row in choice["logprobs"]["top_logprobs"]]
    assert own == pytest.approx(expected[0], abs=1e-5)
    for got, row in zip(top, expected[1], strict=True):
        assert max(got) == pytest.approx(max(row), abs=1e-5)  # completions show two tokens of one text once
        assert len(got) == 4 or kind == "completions"


def test_drafts_change_no_answer_and_are_counted():
    engine, params = policy()
    body = {"prompt": "find the word lamp, find the word", "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    found = []
    for tokens in (0, 4):
        with World(attrs.evolve(engine, draft_tokens=tokens), params=params) as world:
            answer = world.post("/v1/completions", body).json()
        found.append((answer["choices"][0]["token_ids"], answer["usage"].pop("completion_tokens_details", None)))
        assert answer["usage"]["completion_tokens"] == len(found[-1][0])
    (plain, none), (drafted, counts) = found
    assert drafted == plain
    assert none is None
    assert counts["accepted_prediction_tokens"] > 0
    assert 0 <= counts["rejected_prediction_tokens"] < 24


def said(turn):
    return f"No {turn}, again"


async def play_forced(client, number, *, stream):
    """One that wants a call in every answer, and sends the tool's message."""
    messages = [{"role": "user", "content": f"find {number}"}]
    for turn in range(TURNS):
        how = {"model": MODEL, "messages": messages, "max_tokens": TOKENS, "tools": TOOLS, "tool_choice": READ}
        calls, finish = [], None
        if stream:
            async for chunk in await client.chat.completions.create(stream=True, **how):
                calls += chunk.choices[0].delta.tool_calls or ()
                finish = chunk.choices[0].finish_reason or finish
        else:
            answer = (await client.chat.completions.create(**how)).choices[0]
            calls, finish = answer.message.tool_calls or [], answer.finish_reason
        if finish == "length" or turn == TURNS - 1:
            return
        (call,) = [x.model_dump(exclude={"index"}) for x in calls]
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": said(turn)},
        ]


async def play(client, number, *, stream):
    """An agent that knows nothing but its client."""
    messages = [{"role": "user", "content": f"find {number}"}]
    for turn in range(TURNS):
        how = {"model": MODEL, "messages": messages, "max_tokens": TOKENS}
        if stream:
            content, finish = "", None
            async for chunk in await client.chat.completions.create(stream=True, **how):
                content += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason or finish
        else:
            answer = (await client.chat.completions.create(**how)).choices[0]
            content, finish = answer.message.content, answer.finish_reason
        if finish == "length" or turn == TURNS - 1:
            return
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": said(turn)}]


def played(world, *, stream, agent=play):
    """The rows of all episodes, played at once."""

    async def every():
        async with world.client() as http:
            clients = [
                openai.AsyncOpenAI(base_url=f"http://test/e/{n}/v1", api_key="secret", http_client=http, max_retries=0)
                for n in range(EPISODES)
            ]
            await asyncio.gather(*(agent(client, n, stream=stream) for n, client in enumerate(clients)))

    asyncio.run(every())
    return [world.episodes.rows(str(n)) for n in range(EPISODES)]


def respond(conversation, role="user"):
    turn = sum(message["role"] == "assistant" for message in conversation)
    return [{"role": role, "content": said(turn - 1)}]


def by_the_library(engine, params, key, of, *, forced):
    """The rollout of the same episodes by the library's own loop. What opens a forced call stands at the end of its
    prompts and observations."""
    tools, ids = (TOOLS, opening(of=of)) if forced else ((), ())
    template = attrs.evolve(of.template, options=attrs.evolve(of.options, tools=tools))
    prompts = [[*of.prompt([{"role": "user", "content": f"find {n}"}], tools), *ids] for n in range(EPISODES)]
    width = max(map(len, prompts))
    names = ("ids", "ground_truth", "source")
    rows = Prompts(
        tokens=torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts]),
        attention_mask=torch.tensor([[False] * (width - len(ids)) + [True] * len(ids) for ids in prompts]),
        row_ids=torch.arange(EPISODES),
        **{name: Column([None] * EPISODES) for name in names},
        extras=Column([{}] * EPISODES),
    )
    turns = TurnsEngine(
        engine=engine,
        tools=ToolRunner(partial(respond, role="tool" if forced else "user"), inline=True),
        encode=lambda messages, end: [*template(messages, end), *ids],
        tokenizer=of.tokenizer,
        max_turns=TURNS,
        turn_tokens=TOKENS,
        pad_token_id=0,
    )
    return turns.generate(params, Ask(rows, sampling(stop_token_ids=STOPS, max_tokens=400), key, version=3))


def check(world, engine, params, *, stream, tolerance, forced=False):
    rows = played(world, stream=stream, agent=play_forced if forced else play)
    assert [len(each) for each in rows] == [1] * EPISODES  # none was read anew
    rollout = rollout_of_rows([row for (row,) in rows], pad_token_id=0)
    expected = by_the_library(engine, params, world.sources.key, world.sources.texts, forced=forced)
    for name in ("attention_mask", "tokens", "response_mask", "turn_ids", "versions"):
        assert torch.equal(getattr(rollout, name), getattr(expected, name)), name
    for name in ("rollout_log_probs", "sampling_log_probs"):
        one, other = getattr(rollout, name), getattr(expected, name)
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= tolerance
    assert rollout.token_versions[rollout.response_mask].unique().tolist() == [3]
    assert len(rollout.turn_ids.amax(1).unique()) > 1
    assert list(rollout.finish) == list(expected.finish)
    assert any(request.after is not None for request in world.requests)  # what was read is not read again


class Noting:
    """An engine that notes what is added."""

    def __init__(self, engine):
        self.engine, self.requests = engine, []

    @contextlib.contextmanager
    def open(self, params, **how):
        with self.engine.open(params, **how) as opened:
            add = opened.add

            def noted(requests):
                self.requests += requests
                add(requests)

            opened.add = noted
            yield opened


def world_of(engine, params, **changes):
    noting = Noting(engine)
    world = World(noting, params=params, sampling=sampling(stop_token_ids=STOPS), **changes)
    world.requests = noting.requests
    return world


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_episodes_of_clients_are_those_of_the_librarys_own_loop(stream):
    engine, params = policy()
    with world_of(engine, params) as world:
        check(world, engine, params, stream=stream, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_they_are_so_where_clients_force_calls(stream):
    engine, params = policy()
    with world_of(engine, params, texts=texts_with("tags")) as world:
        check(world, engine, params, stream=stream, tolerance=1e-5, forced=True)


@pytest.mark.slow
@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("forced", [False, True])
def test_they_are_so_bit_for_bit_where_the_engine_is_exact(forced):
    engine, params = policy(exact=True)
    with world_of(engine, params, **({"texts": texts_with("tags")} if forced else {})) as world:
        check(world, engine, params, stream=False, tolerance=0.0, forced=forced)


@pytest.mark.slow
def test_another_key_draws_other_episodes():
    engine, params = policy()
    ids = []
    for key in (Key(5), Key(6)):
        with world_of(engine, params, key=key) as world:
            ids.append([row.ids for (row,) in played(world, stream=False)])
    assert ids[0] != ids[1]


@pytest.mark.slow
def test_answers_do_not_depend_on_who_else_asks():
    engine, params = policy(torch.float64)
    with world_of(engine, params) as world:
        together = [row.ids for (row,) in played(world, stream=False)]
    with world_of(engine, params) as world:

        async def alone():
            async with world.client() as http:
                how = {"api_key": "secret", "http_client": http, "max_retries": 0}
                await play(openai.AsyncOpenAI(base_url="http://test/e/7/v1", **how), 7, stream=False)

        asyncio.run(alone())
        ((row,),) = [world.episodes.rows("7")]
    assert row.ids == together[7]
