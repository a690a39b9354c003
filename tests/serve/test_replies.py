"""Replies in the protocol's form, against that form written out by hand, whole and in chunks."""

from __future__ import annotations

import hashlib
import json
import math
import string

import attrs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.rollout.scores import DrawnScores, TopTokens
from fppo.serve.calls import ParsedTurn, ToolCall
from fppo.serve.replies import ReplyForm, event
from fppo.serve.service import AnswerPart, WholeAnswer
from tests.serve.test_recorded import answer
from tests.serve.world import SIZE, texts

HEAD = {"id": "x-1", "created": 7, "model": "m"}
PIECES = texts().pieces
TOKENS = st.lists(st.sampled_from([0, 5, 200, 201, SIZE - 1, SIZE + 3]), min_size=1, max_size=4)
TURNS = st.tuples(
    st.sampled_from(["", "lamp", "é"]),
    st.lists(st.sampled_from([ToolCall("read", "{}"), ToolCall("find", '{"a": 1}')]), max_size=2),
    st.sampled_from([None, "hm"]),
)
ANSWERS = st.lists(
    st.tuples(TOKENS, TURNS, st.sampled_from(["stop", "length"]), st.sampled_from([(1, 2), (3,)])),
    min_size=1,
    max_size=3,
)
FLAGS = st.tuples(st.booleans(), st.booleans(), st.booleans())


def form_of(flags):
    chat, log_probs, token_ids = flags
    return ReplyForm(chat=chat, log_probs=log_probs, token_ids=token_ids, texts=texts(), **HEAD)


def answers_of(drawn, top):
    """Answers whose second log-prob is that of an impossible token, with `top` likeliest tokens beside each draw."""
    found = []
    for index, (tokens, (content, calls, reasoning), end, prompt) in enumerate(drawn):
        finished = answer(tokens, f"r{index}", end=end)
        finished.log_probs[1:2] = -math.inf
        if top:
            ids = torch.tensor([[5, 5, 6][:top]] * len(tokens))
            scores = DrawnScores(finished.log_probs - 3, TopTokens(ids, -torch.arange(top).float().expand(ids.shape)))
            finished = attrs.evolve(finished, drawn_scores=scores)
        turn = ParsedTurn(content, tuple(calls), reasoning)
        own = {"tokens": tokens, "prompt": prompt, "origin": f"server/{index}"}
        found.append(WholeAnswer(index=index, turn=turn, finished=finished, **own))
    return found


def one(token, log_prob):
    piece = PIECES[token] if token < len(PIECES) else b""
    return {"token": piece.decode(errors="replace"), "logprob": max(log_prob, -9999.0), "bytes": list(piece)}


def noted(tokens, log_probs, top, chat):
    """Log-probs of tokens with `top` likeliest ones beside each, which are 5, 5 and 6."""
    each = [*map(one, tokens, log_probs)]
    beside = [*map(one, [5, 5, 6][:top], [0.0, -1.0, -2.0])]
    if chat:
        return {"content": [x | {"top_logprobs": beside} for x in each]}
    by_text = {x["token"]: x["logprob"] for x in reversed(beside)}  # of those with one text the likeliest
    columns = {"tokens": [x["token"] for x in each], "token_logprobs": [x["logprob"] for x in each]}
    return columns | {"top_logprobs": [by_text] * len(each) if top else None, "text_offset": None}


def calls_of(index, calls):
    return [
        {"id": id_of(index, place), "type": "function", "function": {"name": x.name, "arguments": x.arguments}}
        for place, x in enumerate(calls)
    ]


def id_of(index, place):
    """Nine digits to the base 62 of a digest."""
    number = int.from_bytes(hashlib.blake2b(f"server/{index}/{place}".encode(), digest_size=8).digest(), "little")
    return "".join((string.ascii_letters + string.digits)[number // 62**power % 62] for power in range(9))


def ended_by(calls, end):
    return "tool_calls" if calls and end == "stop" else end


def usage_of(drawn):
    read, made = sum(map(len, {prompt for *_, prompt in drawn})), sum(len(tokens) for tokens, *_ in drawn)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


@settings(max_examples=100)
@given(ANSWERS, FLAGS, st.sampled_from([0, 0, 1, 3]))
def test_whole_replies_have_the_protocols_form(drawn, flags, top):
    chat, log_probs, token_ids = flags
    choices = []
    for index, (each, (tokens, (content, calls, reasoning), end, prompt)) in enumerate(
        zip(answers_of(drawn, top), drawn, strict=True)
    ):
        own = each.finished.log_probs - (3 if top else 0)
        choice = {"index": index, "finish_reason": ended_by(calls, end), "logprobs": None}
        if log_probs:
            choice["logprobs"] = noted(tokens, own.tolist(), top, chat)
        if token_ids:
            choice |= {"token_ids": tokens, "prompt_token_ids": prompt}
        message = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls_of(index, calls)}
        message |= {} if reasoning is None else {"reasoning_content": reasoning}
        choices.append(choice | ({"message": message} if chat else {"text": content}))
    kind = "chat.completion" if chat else "text_completion"
    expected = HEAD | {"object": kind, "choices": choices, "usage": usage_of(drawn)}
    assert form_of(flags).whole(answers_of(drawn, top)) == expected


@settings(max_examples=100)
@given(ANSWERS, FLAGS, st.booleans(), st.sampled_from(["", "lamp"]))
def test_chunks_have_the_protocols_form(drawn, flags, shown, text):
    """`shown` says whether a text is shown as it comes; else it comes at the end."""
    (chat, log_probs, token_ids), form = flags, form_of(flags)

    def chunk(index, delta, *, tokens=(), note=None, finish=None):
        choice = {"index": index, "finish_reason": finish, "logprobs": note, "delta" if chat else "text": delta}
        choice |= {"token_ids": list(tokens)} if token_ids else {}
        kind = "chat.completion.chunk" if chat else "text_completion"
        return HEAD | {"object": kind, "choices": [choice]}

    first = [chunk(index, {"role": "assistant", "content": ""}) for index in range(2)]
    assert [*form.first([(), ()], with_text=shown)] == (first if chat else [])
    answers = answers_of(drawn, 0)
    for each, (tokens, (content, calls, reasoning), end, _) in zip(answers, drawn, strict=True):
        index, numbers = each.index, tuple(each.finished.log_probs.tolist())
        seen = text if shown else ""
        part = [*form.part(index, AnswerPart(text, tuple(tokens), numbers), with_text=shown)]
        note = noted(tokens, numbers, 0, chat) if log_probs else None
        expected = chunk(index, {"content": seen} if chat else seen, tokens=tokens, note=note)
        assert part == ([expected] if seen or log_probs or token_ids else [])
        nothing = [*form.part(index, AnswerPart(text, (), ()), with_text=shown)]
        assert bool(nothing) == bool(seen)
        if chat:
            last = [] if reasoning is None else [chunk(index, {"reasoning_content": reasoning})]
            last += [] if shown or not content else [chunk(index, {"content": content})]
            last += [
                chunk(index, {"tool_calls": [{"index": place, **call}]})
                for place, call in enumerate(calls_of(index, calls))
            ]
            last.append(chunk(index, {}, finish=ended_by(calls, end)))
            assert [*form.last(each, text_sent=shown)] == last
    kind = "chat.completion.chunk" if chat else "text_completion"
    usage = HEAD | {"object": kind, "choices": [], "usage": usage_of(drawn)}
    assert [*form.end(answers)] == []
    assert [*attrs.evolve(form, usage=True).end(answers)] == [usage]


def test_an_event_is_a_line_of_json():
    assert event({"a": "é\n漢"}) == 'data: {"a": "é\\n漢"}\n\n'
    assert json.loads(event({"a": 1}).removeprefix("data: ")) == {"a": 1}
