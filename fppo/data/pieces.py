"""The text that each token of a response adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode tokens, special ones included."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def decode_all(tokenizer: Any, rows: Sequence[Sequence[int]]) -> list[str]:
    """Decode the tokens of many rows, special ones included."""
    return tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def pieces_of(tokenizer: Any, rows: Sequence[Sequence[int]], texts: Sequence[str]) -> list[list[str]]:
    """The `pieces` of many rows; `texts` are the decoded rows. Each distinct token is decoded only for the first place
    of a row, by itself, and for later places, after itself. Rows whose texts do not join from these are decoded by
    `pieces`."""
    distinct = sorted({token for row in rows for token in row})
    alone = dict(zip(distinct, decode_all(tokenizer, [[token] for token in distinct]), strict=True))
    twice = decode_all(tokenizer, [[token, token] for token in distinct])
    later = {token: both[len(alone[token]) :] for token, both in zip(distinct, twice, strict=True)}
    result = []
    for row, text in zip(rows, texts, strict=True):
        joined = [*(alone[token] for token in row[:1]), *(later[token] for token in row[1:])]
        result.append(joined if "".join(joined) == text and "\ufffd" not in text else pieces(tokenizer, row))
    return result


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; joined, they are the decoded text.

    A character spelled by several tokens belongs to the last of them. A token is decoded after the tokens of the piece
    before it, since some tokenizers drop the space before a first word.
    """
    pieces: list[str] = []
    start = done = 0  # tokens [start, done) are decoded and kept as context
    for end in range(1, len(ids) + 1):
        before = decode(tokenizer, ids[start:done]) if done > start else ""
        text = decode(tokenizer, ids[start:end])
        if text.endswith("\ufffd") and end < len(ids):  # an unfinished character
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        start, done = done, end
    return pieces
