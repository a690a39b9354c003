"""Texts that are encoded one behind the other have the tokens of the whole, whatever a tokenizer puts before a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo import data
from fppo.data import Fields, Row, encode_demonstrations, imitated_conversation
from fppo.data.chat import end_of_turn, render_chat
from fppo.data.tokenizers import encode_after
from fppo.pipeline.truth import right_answers
from fppo.rollout.engine import Sampling
from fppo.rollout.turns.observations import PlainText, chat_template
from tests.data import pieces
from tests.rollout.templates import tokenizer_of

SAID = ["add two and three", "the answer is five", "say again", "five"]
TALK = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(SAID)]
texts = st.lists(st.sampled_from(["the", "five", " ", "  ", "\n", "=", "24>>", "[INST]", "é"]), max_size=5).map("".join)


def whole_of(words, text):
    return words.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", pieces.KINDS)
@given(before=texts, text=texts)
def test_tokens_behind_a_text_are_those_of_the_whole_or_spell_the_text(kind, before, text):
    words = pieces.tokenizer(kind)
    head, found = whole_of(words, before), encode_after(words, text, before)
    whole = whole_of(words, before + text)
    if head and whole[: len(head)] == head:
        assert [*head, *found] == whole
    anchor = whole_of(words, "x")
    assert words.decode([*anchor, *found]).removeprefix("x") == text


@pytest.mark.parametrize("kind", pieces.KINDS)
def test_an_imitated_conversation_has_the_tokens_of_the_whole(kind):
    words = pieces.tokenizer(kind)
    (row,) = imitated_conversation(words, TALK)
    assert [*row.prompt, *row.response] == whole_of(words, render_chat(words, TALK, generation=False))
    assert words.decode([x for x, own in zip(row.response, row.mask, strict=True) if own]).count("</s>") == 2


@pytest.mark.parametrize("kind", pieces.KINDS)
def test_a_response_to_a_text_has_the_tokens_of_both(kind):
    words = pieces.tokenizer(kind)
    row = Row("a.jsonl", 1, {"prompt": "two and three =", "response": " five"}, "a")
    (made,) = encode_demonstrations([row], words, fields=Fields(ground_truth=None)).rows
    assert [*made.prompt, *made.response] == [*whole_of(words, "two and three = five"), words.eos_token_id]


@pytest.mark.parametrize("kind", pieces.KINDS)
def test_what_stands_behind_a_turn_has_the_tokens_of_the_whole(kind):
    words = pieces.tokenizer(kind)
    whole = whole_of(words, render_chat(words, TALK[:3], generation=True))
    behind = whole[whole.index(words.eos_token_id) + 1 :]
    assert chat_template(words)(TALK[2:3], words.eos_token_id) == behind
    *head, end = whole_of(words, "two and three =")
    assert [*head, end, *PlainText(words)([{"role": "tool", "content": "24>>"}], end)] == whole_of(
        words, "two and three =24>>"
    )


@pytest.mark.parametrize("kind", pieces.KINDS)
def test_a_right_answer_stands_behind_its_prompt(kind):
    words = pieces.tokenizer(kind)
    asked = data.prompt_set(["two and three ="], words, ground_truths=["24"])
    sampling = Sampling(max_tokens=8, stop_token_ids=(words.eos_token_id,))
    tokens, mask = right_answers(data.collate(asked, [0]), tokenizer=words, sampling=sampling)
    assert [*asked.tokens[0], *tokens[0][mask[0]].tolist()] == [
        *whole_of(words, "two and three =24"),
        words.eos_token_id,
    ]


def test_the_end_of_a_turn_is_found_where_a_space_is_put_before_it():
    assert {end_of_turn(pieces.tokenizer(kind)) for kind in pieces.KINDS} == {2}


def test_tokens_that_would_cross_the_border_stay_apart():
    """The prompt has been read: its last token is not joined by the first of the answer."""
    words = tokenizer_of("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert whole_of(words, "The answer")[: len(whole_of(words, "The answ"))] != whole_of(words, "The answ")
    assert words.decode(encode_after(words, "er is", "The answ")) == "er is"
    assert encode_after(words, "", "The") == []
