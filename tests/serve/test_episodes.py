"""Episodes: what goes on with a row, what begins another, and what is forgotten."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.rollout.requests import FinishedRequest
from fppo.serve.episodes import EpisodeRow, Episodes, RecordedTurn, of_ids, of_messages, of_text, row_number
from fppo.serve.rows import rollout_of_rows
from fppo.serve.service import Bounds
from tests.serve.world import END, chat, parrot_world, says, texts, tokenizer

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


def content(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_a_conversation_that_goes_on_is_one_row():
    with parrot_world("lamp", " which", "list") as world:
        first = content(world.post(f"/e/7{CHAT}", chat("find")))
        second = content(world.post(f"/e/7{CHAT}", chat("find", first, "again")))
        content(world.post(f"/e/7{CHAT}", chat("find", first, "again", second, "No")))
        (row,) = world.episodes.rows("7")
    assert [turn.text for turn in row.turns] == ["lamp", " which", "list"]
    prompt = texts().prompt([{"role": "user", "content": "find"}], ())
    assert row.prompt == tuple(prompt)
    expected = "<|im_start|>user\nfind<|im_end|>\n<|im_start|>assistant\nlamp<|im_end|>\n<|im_start|>user\nagain"
    assert tokenizer().decode(row.ids).startswith(expected)
    after = [request.after for request in world.engine.requests]
    names = [request.name for request in world.engine.requests]
    assert after == [None, names[0], names[1]]
    key = world.sources.key
    assert [request.key for request in world.engine.requests] == [key, key.fold("turn", 2), key.fold("turn", 3)]
    assert {(request.row, request.position) for request in world.engine.requests} == {(7, 0)}


def test_ids_never_go_through_text():
    """An answer whose text another tokenisation would spell otherwise stays as it was drawn."""
    letters = [tokenizer().convert_tokens_to_ids(x) for x in "find"]
    assert tokenizer().encode("find") != letters
    with parrot_world("x") as world:
        world.engine.says = lambda request, before: [*letters, END]
        first = content(world.post(f"/e/1{CHAT}", chat("find")))
        assert first == "find"
        content(world.post(f"/e/1{CHAT}", chat("find", first, "again")))
        (row,) = world.episodes.rows("1")
    assert row.turns[0].answer.tokens.tolist() == [*letters, END]
    assert row.ids[len(row.prompt) :][: len(letters)] == tuple(letters)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (chat("find", "something else", "again"), "an edited answer"),
        (chat("find it", "lamp", "again"), "an edited question"),
        (chat("find", "lamp", "again", "made up", "and"), "an answer of somebody else's behind it"),
        (chat("find"), "the beginning, again"),
        (chat("find", "lamp"), "nothing behind the answer"),
        (chat("find", "lamp", "again", tools=[TOOL]), "other tools"),
    ],
)
def test_anything_else_begins_another_row(body, why):
    with parrot_world("lamp") as world:
        content(world.post(f"/e/7{CHAT}", chat("find")))
        content(world.post(f"/e/7{CHAT}", body))
        rows = world.episodes.rows("7")
    assert [row.number for row in rows] == [0, 1], why
    assert rows[1].prompt == tuple(texts().prompt(body["messages"], body.get("tools", ())))
    requests = world.engine.requests
    assert requests[0].key != requests[1].key  # it has draws of its own


def test_two_that_go_on_with_one_answer_are_two_rows_with_its_ids():
    with parrot_world("lamp", "a", "b") as world:
        first = content(world.post(f"/e/7{CHAT}", chat("find")))
        content(world.post(f"/e/7{CHAT}", chat("find", first, "again")))
        content(world.post(f"/e/7{CHAT}", chat("find", first, "No")))
        one, other = world.episodes.rows("7")
    added = texts().observation(chat("find")["messages"], chat("No")["messages"], END, ())
    assert other.prompt == (*one.turns[0].ids, *added)  # and nothing of what came behind that answer
    mask = rollout_of_rows([one, other], pad_token_id=0).response_mask
    assert mask[1].sum() == len(other.turns[0].answer.tokens)  # the answer is trained on once


def test_messages_as_parts_and_with_null_fields_are_the_same():
    with parrot_world("lamp") as world:
        first = content(world.post(f"/e/7{CHAT}", chat("find")))
        again = chat("find", first, "again")
        again["messages"][0]["content"] = [{"type": "text", "text": "fi"}, {"type": "text", "text": "nd"}]
        again["messages"][1] |= {"refusal": None, "audio": None, "tool_calls": None, "annotations": []}
        content(world.post(f"/e/7{CHAT}", again))
        assert len(world.episodes.rows("7")) == 1


@pytest.mark.parametrize("how", ["path", "header", "user"])
def test_an_episode_has_the_name_that_the_client_gives(how):
    with parrot_world("lamp") as world:
        path = f"/e/mine{CHAT}" if how == "path" else CHAT
        headers = {"X-Session-ID": "mine"} if how == "header" else {}
        content(world.post(path, chat("find", **({"user": "mine"} if how == "user" else {})), headers=headers))
        assert world.episodes.names() == ["mine"]


def test_an_episode_without_a_name_is_found_by_its_conversation():
    with parrot_world("lamp", "a", "b", "c") as world:
        one = content(world.post(CHAT, chat("find")))
        other = content(world.post(CHAT, chat("list")))
        content(world.post(CHAT, chat("find", one, "again")))
        content(world.post(CHAT, chat("list", other, "again")))
        content(world.post(f"/e/named{CHAT}", chat("find", one, "again")))  # a named one's own conversations count
        assert world.episodes.names() == ["unnamed-0", "unnamed-1", "named"]
        assert [len(world.episodes.rows(name)[0].turns) for name in world.episodes.names()] == [2, 2, 1]
    assert len({request.row for request in world.engine.requests}) == 3  # the same question has other draws


def test_answers_to_one_request_are_rows_of_one_episode():
    with parrot_world() as world:
        response = world.post(f"/e/7{CHAT}", chat("find", n=3, max_tokens=9))
        texts_of = [choice["message"]["content"] for choice in response.json()["choices"]]
        rows = world.episodes.rows("7")
        assert [row.turns[0].text for row in rows] == texts_of
        assert len(set(texts_of)) == 3
        content(world.post(f"/e/7{CHAT}", chat("find", texts_of[1], "again")))
        assert [len(row.turns) for row in world.episodes.rows("7")] == [1, 2, 1]


def test_a_seed_draws_the_same_again():
    with parrot_world() as world:
        bodies = [chat("find", seed=seed, max_tokens=9, n=2) for seed in (3, 3, 4)]
        got = [[c["message"]["content"] for c in world.post(CHAT, body).json()["choices"]] for body in bodies]
    assert got[0] == got[1]
    assert got[0] != got[2]
    assert got[0][0] != got[0][1]


def test_prompts_of_ids_go_on_with_the_ids_of_an_answer():
    with parrot_world("lamp") as world:
        first = world.post("/e/7/v1/completions", {"prompt": [5, 6, 7], "return_token_ids": True}).json()
        ids = first["choices"][0]["token_ids"]
        again = {"prompt": [5, 6, 7, *ids, 9, 8]}
        assert world.post("/e/7/v1/completions", again).status_code == 200
        (row,) = world.episodes.rows("7")
        assert world.post("/e/7/v1/completions", {"prompt": [5, 6, 7, 9]}).status_code == 200
        assert len(world.episodes.rows("7")) == 2
    assert row.prompt == (5, 6, 7)
    assert row.turns[1].before == (9, 8)


def test_prompts_of_text_go_on_where_they_repeat_all_of_an_answer():
    with parrot_world("lamp") as world:
        world.engine.says = says("lamp", end=False)
        text = world.post("/v1/completions", {"prompt": "find the", "max_tokens": 20}).json()["choices"][0]["text"]
        assert text == "lamp"
        assert world.post("/v1/completions", {"prompt": f"find the{text} again"}).status_code == 200
        (name,) = world.episodes.names()
        (row,) = world.episodes.rows(name)
    assert row.turns[1].before == tuple(tokenizer().encode(" again"))


def asked(episodes, name, ids, *answers):
    """Answers to a prompt of ids, and to it with each answer and what is said to that, in turn."""
    starts = []
    for tokens, more in answers:
        conversation = of_ids(ids)
        start = episodes.begin(name, conversation)
        answer = FinishedRequest(
            name=f"{name} {len(ids)}",
            tokens=torch.tensor(tokens),
            log_probs=torch.zeros(len(tokens)),
            sampling_log_probs=torch.zeros(len(tokens)),
            versions=torch.zeros(len(tokens), dtype=torch.int32),
            end="stop",
            fed=0,
        )
        turn = RecordedTurn(tuple(ids[len(start.before) :]), answer, "")
        episodes.commit(start, turn, conversation.with_answer(of_ids(tokens).items))
        starts.append(start)
        ids = [*ids, *tokens, *more]
    return starts


def test_a_prompt_of_ids_goes_on_from_the_longest_answer_that_it_repeats():
    episodes = Episodes(1000)
    starts = asked(episodes, "a", [1, 2], ([3], [4]), ([5, 6], [7]), ([8], []))
    assert [(start.number, start.items_seen) for start in starts] == [(0, 0), (0, 3), (0, 6)]
    (row,) = episodes.rows("a")
    assert row.ids == (1, 2, 3, 4, 5, 6, 7, 8)


def test_an_episode_whose_answer_is_under_way_is_not_dropped():
    dropped = []
    episodes = Episodes(6, on_dropped=lambda name, rows: dropped.append(name))
    asked(episodes, "a", [1, 2], ([3], []))
    start = episodes.begin("a", of_ids([1, 2, 3, 4]))
    asked(episodes, "b", [1, 2, 3, 4, 5], ([3], []))
    assert dropped == []
    episodes.abandon(start)
    asked(episodes, "c", [1], ([2], []))
    assert "a" in dropped


def test_tokens_of_a_row_that_goes_on_count_once():
    """Three turns of together eight tokens, and one of two: ten are held, and a limit of nine is too small."""
    for most, expected in ((10, []), (9, ["a"])):
        dropped = []
        episodes = Episodes(most, on_dropped=lambda name, rows, to=dropped: to.append(name))
        asked(episodes, "a", [1, 2], ([3], [4]), ([5, 6], [7]), ([8], []))
        asked(episodes, "b", [1], ([9], []))
        assert dropped == expected


def test_what_is_held_is_bounded_and_the_oldest_goes():
    dropped = []
    bounds = Bounds(row_tokens=512, recorded_tokens=60)
    with parrot_world("lamp", bounds=bounds, on_dropped=lambda name, rows: dropped.append((name, len(rows)))) as world:
        for name in "abcd":
            content(world.post(f"/e/{name}{CHAT}", chat("find")))
        assert "d" in world.episodes.names()
        assert dropped
        assert dropped[0] == ("a", 1)
        assert not world.episodes.rows("a")
        content(world.post(f"/e/a{CHAT}", chat("find", "lamp", "again")))  # it begins anew
        assert len(world.episodes.rows("a")[0].turns) == 1
        assert sum(len(r.ids) for n in world.episodes.names() for r in world.episodes.rows(n)) <= 120


def test_kept_contexts_count_with_their_prompts():
    """Short answers to long prompts: one of them fits, and two do not."""
    with parrot_world("lamp", bounds=Bounds(row_tokens=512, kept_tokens=100)) as world:
        for name in "ab":
            content(world.post(f"/e/{name}{CHAT}", chat("find " * 20)))
        (first, second), (row,) = world.engine.requests, world.episodes.rows("a")
        assert 50 < len(row.ids) <= 100
    released = [names for name, names in world.engine.calls if name == "release"]
    assert (first.name,) in released
    assert (second.name,) not in released


def test_contexts_are_released_as_rows_go_on_and_where_there_are_many():
    with parrot_world("lamp", bounds=Bounds(row_tokens=512, kept_tokens=70)) as world:
        first = content(world.post(f"/e/0{CHAT}", chat("find")))
        content(world.post(f"/e/0{CHAT}", chat("find", first, "again")))
        for name in range(1, 5):
            content(world.post(f"/e/{name}{CHAT}", chat("find")))
        content(world.post(f"/e/1{CHAT}", chat("find", first, "again")))  # of a context that has gone
        (row,) = world.episodes.rows("1")
        assert len(row.turns) == 2
        last = world.engine.requests[-1]
        assert last.after is None
        assert last.ids == row.ids[: len(last.ids)]
        assert last.key == world.sources.key.fold("turn", 2)
    released = [name for call, names in world.engine.calls if call == "release" for name in names]
    assert world.engine.requests[0].name in released


def test_an_episode_is_to_be_had_and_taken_over_http():
    with parrot_world("lamp") as world:
        content(world.post(f"/e/7{CHAT}", chat("find")))

        async def both():
            async with world.client() as client:
                return await client.get("/e/7"), await client.delete("/e/7"), await client.get("/e/7")

        got, taken, gone = asyncio.run(both())
    assert got.json() == taken.json()
    (turn,) = got.json()["rows"][0]["turns"]
    assert turn["text"] == "lamp"
    assert turn["finish"] == "stop"
    assert len(turn["tokens"]) == len(turn["log_probs"]) == len(turn["versions"])
    assert gone.status_code == 404


def finished(name, tokens=(4,), version=0):
    numbers = torch.zeros(len(tokens))
    versions = torch.full((len(tokens),), version, dtype=torch.int32)
    how = {"log_probs": numbers, "sampling_log_probs": numbers, "versions": versions, "end": "stop", "fed": 0}
    return FinishedRequest(name=name, tokens=torch.tensor(tokens), **how)


def test_a_place_that_is_abandoned_is_as_if_it_had_never_been_opened():
    episodes, asked = Episodes(1000), of_ids([1, 2])
    start = episodes.begin("a", asked)
    busy = episodes.begin("a", asked)
    assert (start.number, busy.number) == (0, 1)
    episodes.abandon(start)
    assert episodes.begin("a", asked).number == 0
    episodes.commit(busy, RecordedTurn((1, 2), finished("x"), ""), of_ids([1, 2, 4]))
    going_on = episodes.begin("a", of_ids([1, 2, 4, 5]))
    assert (going_on.number, going_on.items_seen, going_on.after, going_on.end) == (1, 3, "x", 4)
    fork = episodes.begin("a", of_ids([1, 2, 4, 5]))
    assert (fork.number, fork.row, fork.prefix) == (2, None, (1, 2, 4))
    episodes.abandon(going_on)
    assert episodes.begin("a", of_ids([1, 2, 4, 5])).number == 1


SAID = st.tuples(st.sampled_from(["user", "assistant"]), st.sampled_from(["", "a", "aa", "aé"]))
ITEMS = {"ids": st.sampled_from([0, 1, 256]), "text": st.sampled_from("aé漢😀"), "chat": SAID}


def conversation(kind, items):
    if kind == "ids":
        return of_ids(items)
    return of_text("".join(items)) if kind == "text" else of_messages([{"role": r, "content": c} for r, c in items], ())


@pytest.mark.parametrize("kind", ITEMS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), repeats=st.booleans())
def test_a_conversation_is_found_by_those_that_begin_with_all_of_it(data, kind, repeats):
    items = st.lists(ITEMS[kind], max_size=4)
    more = st.lists(st.tuples(st.just("user"), st.text("aé", max_size=2)), max_size=2) if kind == "chat" else items
    answer = st.lists(ITEMS[kind], min_size=1, max_size=3)
    answer = st.just([("assistant", "a")]) if kind == "chat" else answer
    first, answer = data.draw(items), data.draw(answer)
    whole = [*first, *answer]
    later = [*whole, *data.draw(more)] if repeats else data.draw(items)
    episodes, asked = Episodes(1000), conversation(kind, first)
    turn = RecordedTurn((1,), finished("x"), "")
    episodes.commit(episodes.begin("a", asked), turn, asked.with_answer(conversation(kind, answer).items))
    last = len(whole)
    if kind == "chat":  # it goes on from its last answer alone
        last = max((n for n, (role, _) in enumerate(later, 1) if role == "assistant"), default=0)
    begins = last == len(whole) < len(later) and later[:last] == whole
    assert episodes.begin("a", conversation(kind, later)).items_seen == (last if begins else 0)


def test_numbers_of_names():
    assert row_number("17") == 17
    numbers = {row_number(name) for name in ("a", "b", "-1", "1.0", "\u0661", "9" * 40)}
    assert len(numbers) == 6
    assert all(0 <= x < 1 << 62 for x in numbers)


def test_a_chat_goes_on_from_its_last_answer_alone():
    def cuts(roles):
        return of_messages([{"role": role, "content": ""} for role in roles], ()).cuts

    assert cuts(["user"]) == []
    assert cuts(["user", "assistant"]) == []
    assert cuts(["user", "assistant", "tool", "user"]) == [2]


def test_a_row_has_the_version_of_its_first_token_and_each_token_its_own():
    turns = RecordedTurn((1, 2), finished("a", (3,), 4), ""), RecordedTurn((5,), finished("b", (6, 7), 9), "")
    rollout = rollout_of_rows([EpisodeRow(0, turns)], pad_token_id=0)
    assert rollout.versions.tolist() == [4]
    assert rollout.token_versions.tolist() == [[4, 0, 9, 9]]


@settings(max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=20, max_size=60), st.integers(4, 9))
def test_short_answers_count_by_the_memory_that_they_take(lengths, most):
    """Each takes 8 KiB and more, so that ever more of them do not add up. The newest are held."""
    episodes, dropped = Episodes(1 << 30, most_bytes=most << 13, on_dropped=lambda name, rows: dropped.append(name)), []
    for number, length in enumerate(lengths):
        asked = of_ids([number])
        start = episodes.begin(str(number), asked)
        turn = RecordedTurn((number,), finished(f"r{number}", [7] * length), "x" * length)
        episodes.commit(start, turn, asked.with_answer(of_ids([7] * length).items))
        held = episodes.names()
        assert held == [str(each) for each in range(number - len(held) + 1, number + 1)]
        assert len(held) * 8192 <= most << 13
    assert len(held) >= min(most // 2, len(lengths))
    assert len(held) + len(dropped) == len(lengths)
    for name in held:
        episodes.take(name)
    assert episodes.names() == []
