"""Texts that end a response, read token by token, whatever the tokenizer makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from fppo import data
from fppo.data.stops import StopReader, StopTexts, token_pieces
from fppo.quickstart import bpe_tokenizer
from tests.data.rows import tokenizer as word_tokenizer

TEXTS = ["Question: what is 1 + 2?\n\nAnswer: 3\n", "</tool> naïve 你好 </tool>", "abc abd  abe\n\n\nQuestion"]
BYTES = bpe_tokenizer(TEXTS, size=330)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A tokenizer that writes spaces as Llama 2's does, with bytes for what it has no letters for."""
    letters = ["<unk>", "<eos>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefgh", "▁a", "ab"]
    vocabulary = {piece: i for i, piece in enumerate(letters)}
    merges = [("▁", "a"), ("a", "b")]
    model = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="<eos>", pad_token="<unk>")


KINDS = {"bytes": BYTES, "sentencepiece": sentencepiece_like(), "words": word_tokenizer()}
PIECES = {name: token_pieces(words) for name, words in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_pieces_join_to_the_text_that_the_tokenizer_decodes(kind, data):
    words, pieces = KINDS[kind], PIECES[kind]
    ids = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=1, max_size=12))
    before = words.encode("a", add_special_tokens=False)[-1:]
    whole = words.decode([*before, *ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    start = words.decode(before, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    joined = b"".join(pieces[i] for i in ids).decode(errors="replace")
    if "\ufffd" not in whole:
        assert start + joined == whole


@given(st.data())
def test_a_reader_finds_the_token_at_which_the_decoded_text_first_holds_a_text(data_of):
    texts = data_of.draw(st.lists(st.sampled_from(["\n\n", "Question:", "</tool>", "好", "1 +", "a"]), min_size=1))
    ids = BYTES.encode("".join(data_of.draw(st.lists(st.sampled_from([*TEXTS, "\n", "</to", "ol>", "你"])))))
    stops = StopTexts(tuple(text.encode() for text in texts), PIECES["bytes"])
    reader = StopReader(stops)
    read = next((i + 1 for i, token in enumerate(ids) if reader.ends(7, token)), None)
    decoded = (BYTES.decode(ids[:end], clean_up_tokenization_spaces=False) for end in range(1, len(ids) + 1))
    expected = next((end for end, text in enumerate(decoded, 1) if any(stop in text for stop in texts)), None)
    assert read == expected
    end = stops.end(ids)
    assert (end and end[0]) == expected
    if end is not None:
        assert stops.last(ids[: end[0]]) in texts
        assert end[0] == 1 or stops.last(ids[: end[0] - 1]) is None


def test_special_tokens_end_a_response_as_tokens_and_an_empty_text_is_refused():
    words = word_tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<end>"]})
    assert data.stop_texts(words, ["<end>"]) is None
    assert data.stop_tokens(words, ["<end>"])[-1] == words.convert_tokens_to_ids("<end>")
    assert data.stop_texts(words, []) is None
    with pytest.raises(ValueError, match="an empty text"):
        data.stop_texts(words, [""])


few = st.lists(st.sampled_from([b"a", b"b"]), max_size=3).map(b"".join)


@settings(max_examples=60)
@given(
    st.lists(few, min_size=1, max_size=4),
    st.lists(few.filter(bool), min_size=1, max_size=3, unique=True),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), min_size=1, max_size=12),
)
def test_texts_are_found_where_a_search_of_all_bytes_finds_them(pieces, texts, drawn):
    """Rows are read side by side; a token beyond the tokenizer's adds nothing."""
    stops, whole, ended = StopTexts(tuple(texts), tuple(pieces)), dict[int, list[int]](), set[int]()
    reader = StopReader(stops)
    for row, token in drawn:
        tokens = whole.setdefault(row, [])
        if row in ended:
            continue
        tokens.append(token)
        added = [pieces[each] if each < len(pieces) else b"" for each in tokens]
        read = b"".join(added)

        def completed(text, read=read, added=added):
            ends = (at + len(text) for at in range(len(read)) if read.startswith(text, at))
            return any(end > len(read) - len(added[-1]) for end in ends)

        expected = [text.decode() for text in texts if completed(text)]
        assert stops.last(tokens) == (expected[0] if expected else None)
        assert reader.ends(row, token) == bool(expected)
        ended |= {row} if expected else set()
        found = stops.end(tokens)
        if not expected:
            assert found is None
            continue
        ends = {text: read.index(text.encode()) + len(text) for text in expected}
        least = min(ends.values())
        assert found == (len(tokens), min(text for text, end in ends.items() if end == least))
        assert stops.end([*tokens, 0, 0]) == found


@settings(max_examples=60)
@given(
    st.lists(few, min_size=1, max_size=4),
    st.lists(few.filter(bool), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
)
def test_a_text_that_an_earlier_token_completed_is_not_the_last_one_s(pieces, texts, tokens):
    """Also where the response goes on behind it."""
    stops = StopTexts(tuple(texts), tuple(pieces))
    for end in range(1, len(tokens) + 1):
        added = [stops.piece(token) for token in tokens[:end]]
        before, whole = len(b"".join(added[:-1])), b"".join(added)
        ends = {text: [at + len(text) for at in range(len(whole)) if whole.startswith(text, at)] for text in texts}
        completed = [text.decode() for text in texts if any(place > before for place in ends[text])]
        assert stops.last(tokens[:end]) == (completed[0] if completed else None)


def test_texts_of_one_tokenizer_share_their_pieces():
    words = word_tokenizer()
    first = data.stop_texts(words, ["1 2", "x y", "1 2"])
    assert first.texts == (b"1 2", b"x y")
    assert first.pieces == PIECES["words"]
    again = data.stop_texts(words, ["é"], like=first)
    assert again.texts == ("é".encode(),)
    assert again.pieces is first.pieces
