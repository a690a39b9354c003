"""Requests of clients, as the engine gets them: that of every answer against one written out by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.key import Key
from fppo.serve.episodes import Episodes
from fppo.serve.protocol import chat_request, completion_request
from fppo.serve.refusal import Refusal
from fppo.serve.service import Bounds, Service, Sources
from tests.serve.test_recorded import answer
from tests.serve.world import END, MODEL, chat, sampling, texts, tokenizer


class Noting:
    """An engine's loop that notes what it gets."""

    def __init__(self):
        self.asked, self.released, self.cancelled = [], [], []

    def submit(self, request, receive, *, along):
        self.asked.append((request, receive, along))

    def release(self, names):
        self.released += names

    def cancel(self, name):
        self.cancelled.append(name)


def service_of(*, bounds=None, how=None, **changes):
    bounds = bounds or Bounds(row_tokens=512)
    own = {"texts": texts(), "sampling": how or sampling(), "key": Key(5), "bounds": bounds, "model": MODEL}
    service = Service(Sources(**{**own, **changes}), Episodes(1 << 20))
    service.attach(Noting())  # pyright: ignore[reportArgumentType]
    return service


def ended(service, open_answer, tokens, end="stop"):
    """The whole answer, once the engine has drawn these tokens."""
    name = open_answer.plan.request.name
    receive = next(receive for request, receive, _ in service.loop.asked if request.name == name)
    receive(answer(tokens, name, end=end))
    return asyncio.run(open_answer.whole())


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 0.5, 1]),
        "top_p": st.sampled_from([0.5, 1]),
        "top_k": st.sampled_from([-1, 7]),
        "min_p": st.sampled_from([0, 0.25]),
        "max_tokens": st.sampled_from([1, 5, 10_000]),
        "n": st.sampled_from([1, 2]),
        "stop": st.sampled_from(["lamp", ["say", "zz"], "<|im_start|>"]),
        "stop_token_ids": st.sampled_from([[], [77, 1]]),
        "seed": st.sampled_from([0, 3, -1]),
        "stream": st.booleans(),
    },
)
OWN = st.sampled_from([sampling(), sampling(temperature=0.7, top_k=9), sampling(greedy=True, top_p=0.9, min_p=0.1)])
BOUNDS = st.sampled_from(
    [
        Bounds(row_tokens=512),
        Bounds(row_tokens=60, answer_tokens=7),
        Bounds(row_tokens=512, answer_tokens=9, response_tokens=40),
        Bounds(row_tokens=80, response_tokens=70),
    ]
)
KINDS = st.sampled_from(["chat", "ids", "text"])


def how_it_is_drawn(own, given: dict[str, Any], most, *, kind, keeps):
    """The sampling of an answer: what the request says, else what the server does."""
    changes = {}
    if not keeps:
        changes = {name: given[name] for name in ("top_p", "top_k", "min_p") if name in given}
        changes |= {"top_k": None} if changes.get("top_k") == -1 else {}
        if given.get("temperature") == 0:
            changes |= {"greedy": True}
        elif "temperature" in given:
            changes |= {"greedy": False, "temperature": given["temperature"]}
    stop = given.get("stop", [])
    named: list[Any] = [tokenizer().get_vocab().get(text) for text in ([stop] if isinstance(stop, str) else stop)]
    of_turns: list[Any] = [END] if kind == "chat" else []
    ends = {x for x in named if x is not None}.union(own.stop_token_ids, given.get("stop_token_ids", ()), of_turns)
    return attrs.evolve(own, n=1, max_tokens=most, **changes), ends


def asked_by(service, kind, said, ids, given):
    """The answers to a conversation of episode 7: texts of user and assistant in turn, these ids, or one text."""
    if kind == "chat":
        return service.chat(chat_request(chat(*said, **given)), "7")
    return service.completions(completion_request({"prompt": ids if kind == "ids" else "".join(said), **given}), "7")


@pytest.mark.slow
@settings(max_examples=80)
@given(KINDS, OPTIONS, OPTIONS, OWN, BOUNDS, st.booleans())
def test_the_engine_gets_what_a_client_asks(kind, first, second, own, bounds, keeps):
    """In two turns of a row: ids, sampling, room, keys, contexts. Answers to one request are rows of one episode."""
    service = service_of(bounds=bounds, how=own, keeps_sampling=keeps)
    ids = texts().prompt(chat("find the file")["messages"], ()) if kind == "chat" else encoded("find the file")
    answers = asked_by(service, kind, ["find the file"], ids, first)
    assert len(answers) == first.get("n", 1)
    drawn = [*encoded(" lamp"), *([END] if kind == "chat" else [])]
    limit = bounds.response_tokens or bounds.row_tokens
    for index, each in enumerate(answers):
        most = min(first.get("max_tokens", bounds.answer_tokens), bounds.row_tokens - len(ids), limit)
        request, plan = each.plan.request, each.plan
        check(request, own, first, most, kind, keeps)
        assert (request.ids, plan.prompt, plan.new) == (tuple(ids),) * 3
        key = Key(5) if index == 0 else Key(5).fold("row", index)
        check_draws(request, first, key, 7, index)
        assert (request.after, request.keep, plan.index) == (None, True, index)
    assert [along for *_, along in service.loop.asked] == [first.get("stream", False)] * len(answers)
    whole = [ended(service, each, drawn) for each in answers]
    assert [each.index for each in whole] == [*range(len(answers))]
    assert {each.prompt for each in whole} == {tuple(ids)}
    behind = encoded("\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n" if kind == "chat" else " again")
    said = ["find the file", whole[0].turn.content, "again"] if kind == "chat" else ["find the file", " lamp", " again"]
    room = min(bounds.row_tokens - len(ids) - len(drawn), limit - len(drawn)) - len(behind)
    if room < 1:
        with pytest.raises(Refusal) as raised:
            asked_by(service, kind, said, [*ids, *drawn, *behind], second)
        assert raised.value.code == "context_length_exceeded"
        return
    each = asked_by(service, kind, said, [*ids, *drawn, *behind], second)[0]
    last = len(answers) - 1  # of answers that are alike the later
    request, plan = each.plan.request, each.plan
    assert plan.start.number == last
    assert plan.new == tuple(behind)
    assert plan.prompt == (*ids, *drawn, *behind)
    check(request, own, second, min(second.get("max_tokens", bounds.answer_tokens), room), kind, keeps)
    key = (Key(5) if last == 0 else Key(5).fold("row", last)).fold("turn", 2)
    check_draws(request, second, key, 7, 0)
    assert (request.ids, request.after) == (tuple(behind), whole[last].finished.name)


def encoded(text):
    return tokenizer().encode(text, add_special_tokens=False)


def check(request, own, given, most, kind, keeps):
    expected, ends = how_it_is_drawn(own, given, most, kind=kind, keeps=keeps)
    assert {*request.sampling.stop_token_ids} == ends
    is_text = given.get("stop", "<|im_start|>") != "<|im_start|>"  # which is a token, and ends by it
    assert (request.sampling.stop_texts is not None) == is_text
    got = attrs.evolve(request.sampling, stop_token_ids=own.stop_token_ids, stop_texts=None)
    assert got == expected


def check_draws(request, given, key, row, index):
    """With a seed the draws are those of the seed and the answer's number alone."""
    if "seed" in given:
        key, row = Key(given["seed"] % 2**64).fold("seed"), index
    assert (request.key, request.row) == (key, row)


def test_an_answer_that_nobody_reads_is_ended_once_and_leaves_nothing():
    service = service_of(bounds=Bounds(row_tokens=512, requests=2))
    full = lambda: pytest.raises(Refusal, match="2 answers are being drawn, and at most 2 may be")  # noqa: E731
    ask = lambda name, **more: service.completions(  # noqa: E731
        completion_request({"prompt": encoded("find"), **more}), name
    )
    one, other = ask("7", n=2)
    with full():
        ask("8")
    for _ in range(2):
        one.cancel()
    assert service.loop.cancelled == [one.plan.request.name]
    (again,) = ask("7")
    assert again.plan.start.number == 0  # whose place is free
    with full():
        ask("8")
    ended(service, other, encoded(" lamp"))
    other.cancel()
    assert service.loop.cancelled == [one.plan.request.name]
    assert [row.number for row in service.episodes.rows("7")] == [1]
    ask("8")


def test_a_prompt_that_is_refused_leaves_no_answer_to_those_before_it():
    service = service_of(bounds=Bounds(row_tokens=512, requests=4))
    with pytest.raises(Refusal, match="beyond the policy's"):
        service.completions(completion_request({"prompt": ["find", [10**8]], "n": 2}), "7")
    assert service.loop.cancelled == [request.name for request, *_ in service.loop.asked]
    assert (len(service.loop.cancelled), service.episodes.names()) == (2, [])
    assert len(service.completions(completion_request({"prompt": ["find", "list"], "n": 2}), "7")) == 4


ASKS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=30)
@given(ASKS, st.sampled_from([40, 100]))
def test_the_contexts_that_are_kept_are_those_that_were_used_last(asks, most):
    """A row's context is gone on with while it is kept; of all together at most so many tokens are, but for one."""
    service = service_of(bounds=Bounds(row_tokens=512, kept_tokens=most))
    kept, released, rows = {}, [], {}
    for name, size, anew in asks:
        ids = [5] * size if anew or name not in rows else [*rows[name], *[6] * size]
        (each,) = service.completions(completion_request({"prompt": ids}), name)
        request = each.plan.request
        before = each.plan.start.after
        if before in kept:
            kept[before] = kept.pop(before)
        assert request.after == (before if before in kept else None)
        assert request.ids == tuple(ids[each.plan.start.items_seen :] if request.after else ids)
        ended(service, each, [8, 9])
        rows[name] = [*ids, 8, 9]
        kept[request.name] = len(rows[name])
        if each.plan.start.row is not None and before in kept:
            released.append(before)
            del kept[before]
        while sum(kept.values()) > most and len(kept) > 1:
            released.append(next(iter(kept)))
            del kept[released[-1]]
        assert service.loop.released == released
