"""Tokenizers and vocabularies that do not fit."""

from __future__ import annotations

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig

from fppo import data
from fppo.data.tokenizers import encode_text, within
from fppo.rollout.turns.observations import PlainText, Within
from tests.data.rows import tokenizer


def config(size: int) -> LlamaConfig:
    return LlamaConfig(vocab_size=size)


def test_special_tokens():
    assert data.check_tokenizer(tokenizer()) == (0, 1)
    assert data.check_tokenizer(tokenizer(pad_token=None), pad_token="<eos>") == (1, 1)
    with pytest.raises(ValueError, match=r"no padding token; name .*<eos>' .in settings data\.pad_token"):
        data.check_tokenizer(tokenizer(pad_token=None))
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        data.check_tokenizer(tokenizer(eos_token=None))
    with pytest.raises(ValueError, match="pad_token = '<nope>' is not a token"):
        data.check_tokenizer(tokenizer(), pad_token="<nope>")


def test_a_tokenizer_that_ends_every_text_is_refused():
    ending = tokenizer()
    ending.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    rows = [data.Row("a", 1, {"prompt": "1", "answer": "1"}, "a")]
    with pytest.raises(ValueError, match="ends every text"):
        data.encode_rows(rows, ending)


def test_vocabularies():
    words = tokenizer()
    data.check_vocabulary(words, {"actor": config(20), "critic": config(20)})
    data.check_vocabulary(words, {"actor": config(20), "critic": config(32)}, tokenizers={"critic": tokenizer()})
    data.check_vocabulary(words, {"actor": config(19)})  # whether the last one is used, prompts say
    with pytest.raises(ValueError, match=r"the actor has 1 tokens, and the tokenizer's '<eos>' has the id 1"):
        data.check_vocabulary(words, {"actor": config(1)})
    with pytest.raises(ValueError, match=r"reference has 32 tokens, but the actor has 20; the critic has 24"):
        data.check_vocabulary(words, {"actor": config(20), "reference": config(32), "critic": config(24)})
    other = tokenizer()
    other.add_tokens(["more"])
    with pytest.raises(ValueError, match="the critic has another tokenizer's vocabulary"):
        data.check_vocabulary(words, {"actor": config(20), "critic": config(20)}, tokenizers={"critic": other})


def test_token_ids_outside_the_model():
    prompts = data.prompt_set([[1, 2], [3, 30]], pad_token_id=0)
    data.check_tokens(prompts, 31)
    with pytest.raises(ValueError, match="1: token id 30 is outside the model's vocabulary of 30"):
        data.check_tokens(prompts, 30)
    with pytest.raises(ValueError, match=r"the padding token 31 is outside .* name another token \(data\.pad_token\)"):
        data.check_tokens(data.prompt_set([[1, 2]], pad_token_id=31), 31)


def test_a_tokenizer_may_have_tokens_that_no_prompt_uses():
    """As Gemma 3's, of 270 M and 1 B parameters, has one for images."""
    words = tokenizer()
    with pytest.raises(ValueError, match=r"the actor has 19 tokens, and the tokenizer's '9' has the id 19"):
        data.check_vocabulary(words, {"actor": config(19)}, any_text=True)
    words.add_tokens(["<image>"], special_tokens=True)
    data.check_vocabulary(words, {"actor": config(20)}, any_text=True)
    data.check_vocabulary(words, {"actor": config(20), "critic": config(20)})
    rows = [data.Row("a", 1, {"prompt": prompt, "answer": "1"}, "a") for prompt in ("1 9", "1 <image>")]
    data.check_tokens(data.encode_rows(rows[:1], words), 20)
    with pytest.raises(ValueError, match="a:1: token id 20 is outside the model's vocabulary of 20"):
        data.check_tokens(data.encode_rows(rows, words), 20)
    assert PlainText(words)([{"role": "tool", "content": "1 <image> 2"}], 1) == [11, 20, 12]
    assert Within(PlainText(words), 20)([{"role": "tool", "content": "1 <image> 2"}], 1) == [11, 12]


def test_stop_tokens():
    assert data.stop_tokens(tokenizer()) == (1,)
    assert data.stop_tokens(tokenizer(pad_token=None), [":", "5", ":"], [11, 1]) == (1, 5, 15, 11)
    assert data.stop_tokens(tokenizer(), ["1 2"], turn_ends=[7, 1]) == (1, 7)  # a text of several is read as text
    with pytest.raises(ValueError, match=r"stop_token_ids = \[99\]"):
        data.stop_tokens(tokenizer(), [], [3, 99])


def test_tokens_below_a_vocabulary_and_none_below_zero():
    assert within([3, 0, 5, 4], 4) == [3, 0]
    with pytest.raises(ValueError, match="0: token id -1 is outside the model's vocabulary of 4"):
        data.check_tokens(data.prompt_set([[3, -1], [4]], pad_token_id=0), 4)
    with pytest.raises(ValueError, match="the padding token -1 is outside"):
        data.check_tokens(data.prompt_set([[3]], pad_token_id=-1), 4)
    data.check_tokens(data.prompt_set([[0, 3]], pad_token_id=3), 4)


@pytest.mark.parametrize("first", [(), (9,), (9, 6), (9, 6, 8, 3)])
@pytest.mark.parametrize("text", ["1 2", "x 1", "x Q 1", "x Q system user 1", "x x 1", "1 1", "x Q x Q 1"])
def test_a_text_begins_with_the_tokenizer_s_first_tokens_once(first, text):
    names = {9: "x", 6: "Q", 8: "system", 3: "user"}
    words, bare = tokenizer(), tokenizer().encode(text)
    if first:
        single = " ".join([*(names[token] for token in first), "$A"])
        special = [(names[token], token) for token in first]
        words.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    expected = bare if bare[: len(first)] == [*first] else [*first, *bare]
    assert encode_text(words, text) == expected
    assert data.prompt_set([text], words).tokens == (tuple(expected),)
