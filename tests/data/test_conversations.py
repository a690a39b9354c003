"""Demonstrations: what is imitated of a row, and that it is what a policy would sample there."""

from __future__ import annotations

import json
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo.data import Fields, Imitated, Problems, Row, encode_demonstrations, imitated_conversation, prompt_set
from fppo.data.chat import ChatOptions, end_of_turn, render_chat
from fppo.data.conversations import Answers, digest_of_demonstrations
from tests.data import rows as chats
from tests.data.test_foreign_rows import tooled, with_bos
from tests.rollout import templates

TALKS = Answers(messages="talk")
PLAIN, CHAT = Fields(ground_truth=None), Fields(ground_truth=None, chat=True)


def encoded(rows, tokenizer, **given):
    made = [Row("train.jsonl", number, row, "train.jsonl") for number, row in enumerate(rows, 1)]
    return encode_demonstrations(made, tokenizer, **{"fields": PLAIN, **given})


def spans(row):
    """(tokens before, imitated tokens) of every stretch of imitated tokens of a row."""
    tokens, place, found = [*row.prompt, *row.response], len(row.prompt), []
    for wanted, each in groupby(row.mask):
        count = len(list(each))
        if wanted:
            found.append((tokens[:place], tokens[place : place + count]))
        place += count
    return found


def test_a_response_ends_with_the_end_token():
    found = encoded([{"prompt": "1 2", "response": "3"}, {"prompt": "4", "response": "5 6"}], chats.tokenizer())
    assert found.rows == (
        Imitated(prompt=(11, 12), response=(13, 1), mask=(True, True)),
        Imitated(prompt=(14,), response=(15, 16, 1), mask=(True, True, True)),
    )
    assert found.ids == ("train.jsonl:1", "train.jsonl:2")
    assert found.sources == ("train.jsonl", "train.jsonl")


def test_a_prompt_begins_as_that_of_a_rollout_does():
    """With the tokenizer's first token, once, and its response without."""
    rows = [{"prompt": text, "response": "3 4"} for text in ("1 2", "x 1 2", "1 x 2")]
    found = encoded(rows, with_bos())
    assert tuple(row.prompt for row in found.rows) == prompt_set([row["prompt"] for row in rows], with_bos()).tokens
    assert [row.prompt[0] for row in found.rows] == [9, 9, 9]
    assert {row.response for row in found.rows} == {(13, 14, 1)}


def test_prompts_and_responses_are_fields_or_templates():
    fields = Fields(prompt="Q {q}", ground_truth=None, source="from")
    rows = [{"q": "1", "why": "2", "answer": "3", "from": "sums"}]
    with pytest.raises(ValueError, match=r"sft\.response = '\{why' is not a template"):
        encoded(rows, chats.tokenizer(), fields=fields, answers=Answers(response="{why"))
    found = encoded(rows, chats.tokenizer(), fields=fields, answers=Answers(response="{why} A {answer}"))
    assert found.rows == (Imitated(prompt=(6, 11), response=(12, 7, 13, 1), mask=(True,) * 4),)
    assert found.sources == ("sums",)


TALK = [
    {"role": "user", "content": "What is 3 x 4?"},
    {"role": "assistant", "content": "<think> hm </think>The answer is 12."},
    {"role": "user", "content": "and then?"},
    {"role": "assistant", "content": "Oslo"},
    {"role": "user", "content": "What?"},
    {"role": "assistant", "content": "The answer is 1."},
]
KINDS = {name: text for name, text in templates.KINDS.items() if name != "parts"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turns", ["all", "last"])
def test_each_turn_is_imitated_behind_the_prompt_that_a_policy_answers(kind, turns):
    """The tokens before it are its prompt's, its own are what the template writes there, and its end is the last."""
    words = templates.tokenizer_of(KINDS[kind])
    end = end_of_turn(words)
    rows = imitated_conversation(words, TALK, turns=turns)
    found = [span for row in rows for span in spans(row)]
    places = [1, 3, 5] if turns == "all" else [5]
    assert len(found) == len(places)
    for (before, answer), place in zip(found, places, strict=True):
        prompt = render_chat(words, TALK[:place], generation=True)
        assert words.decode(before) == prompt
        assert answer[-1] == (words.eos_token_id if end is None else end)
        whole = render_chat(words, TALK[: place + 1], generation=False)
        written = words.decode(answer if end is not None else answer[:-1])
        assert "".join(whole.split()).startswith("".join((prompt + written).split()))
        assert TALK[place]["content"].split("</think>")[-1] in written


def test_a_template_that_appends_has_one_row_and_others_a_row_for_each_turn():
    counts = {kind: len(imitated_conversation(templates.tokenizer_of(x), TALK)) for kind, x in KINDS.items()}
    assert counts["strips"] == 1
    assert counts["forgets thinking"] == 3
    assert counts["another end, and calls"] == 3


def test_a_row_ends_with_a_turn_that_the_template_does_not_end():
    """The end token behind it is in no prompt, so the next turn has a row of its own, though the text only grows."""
    text = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    words = templates.tokenizer_of(text + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    rows = imitated_conversation(words, TALK)
    assert [row.response.count(words.eos_token_id) for row in rows] == [1, 1, 1]
    assert [all(row.mask) for row in rows] == [True, True, True]


@pytest.mark.slow
def test_every_template_that_trl_ships_gives_prompts_that_a_policy_answers():
    """Or is refused with the reason. None is imitated behind something else."""
    refused = {}
    for name, text in templates.shipped().items():
        words = templates.tokenizer_of(text)
        try:
            rows = imitated_conversation(words, TALK)
        except Exception as error:  # templates raise any exception
            refused[name] = str(error)
            continue
        for (before, _), place in zip((x for row in rows for x in spans(row)), (1, 3, 5), strict=True):
            assert words.decode(before) == render_chat(words, TALK[:place], generation=True), name
    assert len(refused) < 20, refused


def test_messages_and_prompts_with_responses_give_the_same():
    words = templates.tokenizer_of(KINDS["strips"])
    as_prompt = encoded([{"prompt": TALK[:1], "response": "Oslo"}], words, fields=CHAT)
    talk = [TALK[0], {"role": "assistant", "content": "Oslo"}]
    as_talk = encoded([{"talk": talk}], words, fields=CHAT, answers=TALKS)
    assert as_prompt.rows == as_talk.rows
    assert digest_of_demonstrations(as_prompt) == digest_of_demonstrations(as_talk)


def test_the_digest_tells_tokens_and_masks_apart():
    words = templates.tokenizer_of(KINDS["strips"])
    every, last = (
        encoded([{"talk": TALK}], words, fields=CHAT, answers=Answers(messages="talk", turns=x))
        for x in ("all", "last")
    )
    assert digest_of_demonstrations(every) != digest_of_demonstrations(last)


@given(st.integers(1, 6), st.sampled_from(["drop", "truncate"]))
def test_rows_that_are_too_long_are_dropped_or_cut(most, rule):
    rows = [
        {"prompt": "1 2", "response": "3 4 5"},
        {"prompt": "1", "response": "2"},
        {"prompt": "1", "response": "2 3"},
    ]
    whole = encoded(rows, chats.tokenizer())
    lengths = [len(x.prompt) + len(x.response) for x in whole.rows]
    kept = [x for x, n in zip(whole.rows, lengths, strict=True) if n <= most]
    if rule == "truncate":
        kept = [
            Imitated(prompt=x.prompt, response=x.response[:left], mask=x.mask[:left])
            for x in whole.rows
            if (left := most - len(x.prompt)) > 0
        ]
    if not kept:
        with pytest.raises(ValueError, match="holds no demonstrations"):
            encoded(rows, chats.tokenizer(), max_tokens=most, over_long=rule)
        return
    found = encoded(rows, chats.tokenizer(), max_tokens=most, over_long=rule)
    assert list(found.rows) == kept
    assert found.num_dropped == len(rows) - len(kept)
    cut = sum(n > most for n in lengths) - found.num_dropped
    assert found.num_truncated == (cut if rule == "truncate" else 0)


@pytest.mark.parametrize(
    ("row", "given", "text"),
    [
        ({"prompt": "1", "response": ""}, {}, "field 'response': a str, not text, or empty"),
        ({"prompt": "1", "response": "2 3"}, {"max_tokens": 3}, "the row has 4 tokens, more than max_tokens = 3"),
        ({"talk": TALK[:1]}, {"fields": CHAT, "answers": TALKS}, "ends with a message of the user"),
        ({"talk": "hello"}, {"fields": CHAT, "answers": TALKS}, "not a list of messages"),
        ({"talk": [{"role": "assistant"}]}, {"fields": CHAT, "answers": TALKS}, "no text as 'role' and 'content'"),
    ],
)
def test_faulty_rows_are_named_with_their_line(row, given, text):
    words = templates.tokenizer_of(KINDS["strips"]) if "fields" in given else chats.tokenizer()
    with pytest.raises(ValueError, match=r"train\.jsonl:1: ") as caught:
        encoded([row], words, problems=Problems(), **given)
    assert text in str(caught.value)


def test_white_space_between_a_prompt_and_its_answer_is_not_imitated(monkeypatch):
    """Templates may end a prompt with a space or a line end that they do not write before an answer."""
    words = chats.tokenizer()
    words.chat_template = (
        "{% for m in messages %}{{ m.role }} :{{ '\\n\\n' }}{{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant :{{ ' ' }}{% endif %}"
    )
    monkeypatch.setattr(words, "encode", lambda text, **_: [*map(ord, text)])
    (row,) = imitated_conversation(words, TALK[:2])
    assert row.response == (*map(ord, f"{TALK[1]['content']} "), words.eos_token_id)


def test_a_template_with_another_header_than_its_prompt_is_refused():
    text = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot|>{% endfor %}"
    words = templates.tokenizer_of(text + "{% if add_generation_prompt %}<|assistant|><think>{% endif %}")
    with pytest.raises(ValueError, match="otherwise than behind its own prompt"):
        imitated_conversation(words, TALK)


def test_nulls_that_arrow_fills_in_are_left_out_of_conversations_and_those_of_text_stay():
    def talk(**arguments):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [TALK[0], asked, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "4"}]

    def rows_of(value, *, filled):
        row = Row("a.parquet", 1, {"talk": value}, "a", filled)
        return encode_demonstrations([row], tooled(), fields=CHAT, answers=TALKS).rows

    plain, with_null = rows_of(talk(a=1), filled=False), rows_of(talk(a=1, b=None), filled=False)
    assert plain != with_null
    assert rows_of(talk(a=1, b=None), filled=True) == plain
    assert rows_of(json.dumps(talk(a=1, b=None)), filled=True) == with_null


def test_a_template_that_does_not_read_its_arguments_is_refused_for_demonstrations_too():
    row = Row("a.jsonl", 1, {"talk": TALK}, "a")
    chat = ChatOptions(arguments={"moods": 1})
    with pytest.raises(ValueError, match=r"does not read \['moods'\]; leave them out"):
        encode_demonstrations([row], tooled(), fields=CHAT, answers=TALKS, chat=chat)


LARGE = "1 " * 700_000
TALKS_ON = [{"role": role, "content": "1"} for _ in range(40) for role in ("user", "assistant")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "given", "said"),
    [
        ({"prompt": "1", "response": LARGE}, {}, "the row has 1,400,001 characters, more than max_tokens = 40"),
        ({"prompt": LARGE, "response": "1"}, {}, "the row has 1,400,001 characters, more than max_tokens = 40"),
        ({"talk": [{**TALK[0], "content": LARGE}, TALK[1]]}, {"fields": CHAT, "answers": TALKS}, "characters, more"),
        ({"talk": TALKS_ON}, {"fields": CHAT, "answers": TALKS}, "the row has 80 messages, more than max_tokens = 40"),
        ({"talk": json.dumps(TALKS_ON)}, {"fields": CHAT, "answers": TALKS}, "the row has 80 messages, more than"),
    ],
)
def test_rows_that_no_tokenizer_should_be_given_are_told_by_their_characters(monkeypatch, row, given, said):
    """Templates and tokenizers would take minutes for them."""
    words = templates.tokenizer_of(KINDS["strips"]) if "fields" in given else chats.tokenizer()
    small = {**row, "prompt": "1", "response": "2"} if "fields" not in given else {"talk": TALK[:2]}
    whole = type(words).__call__
    longest: list[int] = []
    monkeypatch.setattr(
        type(words), "__call__", lambda self, text, **how: longest.append(len(text)) or whole(self, text, **how)
    )
    with pytest.raises(ValueError, match=said):
        encoded([row, small], words, max_tokens=40, **given)
    dropped = encoded([row, small], words, max_tokens=40, over_long="drop", **given)
    assert (len(dropped), dropped.num_dropped) == (1, 1)
    assert max(longest, default=0) < 1_000_000
    cut = encoded([small, row], words, max_tokens=40, over_long="truncate", **given)
    assert all(x.num_tokens <= 40 for x in cut.rows)
