"""Stop texts for engines, which know tokens alone: matched token by token, in bytes."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import attrs

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # sentencepiece's name of a byte


@attrs.frozen(eq=False, repr=False)
class StopTexts:
    """Stop texts: a response ends with the token that completes the first of them.

    `pieces[i]` are the bytes that token i adds to a text. Made from a tokenizer by `stop_texts`.
    """

    texts: tuple[bytes, ...]
    pieces: tuple[bytes, ...]

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds; none for ids beyond the tokenizer's, as padded vocabularies have."""
        return self.pieces[token] if token < len(self.pieces) else b""

    def end(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """The number of tokens up to and including the first that completes a stop text, and that text; None without
        one."""
        pieces = [self.piece(token) for token in tokens]
        whole = b"".join(pieces)
        ends = [(place + len(text), text) for text in self.texts if (place := whole.find(text)) >= 0]
        if not ends:
            return None
        end, text = min(ends)
        return bisect_left(list(accumulate(map(len, pieces))), end) + 1, text.decode()

    def last(self, tokens: Sequence[int]) -> str | None:
        """The text completed by the last of the tokens; None if it completes none."""
        pieces = [self.piece(token) for token in tokens]
        whole, size = b"".join(pieces), len(pieces[-1])
        ends = (text for text in self.texts if text in whole[max(len(whole) - size - len(text) + 1, 0) :])
        return next((text.decode() for text in ends), None)


class StopReader:
    """Match stop texts in responses as they are sampled, one token of each row at a time."""

    def __init__(self, stops: StopTexts) -> None:
        self._stops, self._keep = stops, max(map(len, stops.texts)) - 1
        self._tails: dict[int, bytes] = {}

    def ends(self, row: int, token: int) -> bool:
        """Whether the row's next `token` completes a stop text."""
        read = self._tails.get(row, b"") + self._stops.piece(token)
        self._tails[row] = read[len(read) - self._keep :] if len(read) > self._keep else read
        return any(text in read for text in self._stops.texts)


def stop_texts(tokenizer: Any, texts: Iterable[str], *, like: StopTexts | None = None) -> StopTexts | None:
    """Stop texts from those of `texts` that are not added tokens (`stop_tokens` has those); None if there is none.

    `like` holds stop texts of the same tokenizer, whose `pieces` are reused: computing them takes a while. Raises
    ValueError for an empty text.
    """
    texts = list(texts)
    if "" in texts:
        raise ValueError("stop = '': an empty text would end every response; leave it out")
    added = tokenizer.get_added_vocab()
    plain = tuple(dict.fromkeys(text.encode() for text in texts if text not in added))
    if not plain:
        return None
    return StopTexts(plain, token_pieces(tokenizer) if like is None else like.pieces)


def token_pieces(tokenizer: Any) -> tuple[bytes, ...]:
    """The bytes that each token adds to a text; of a character spelled by several tokens, each has its part."""
    count = 1 + max(tokenizer.get_vocab().values())
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]  # some drop the space before a first word

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    start, alphabet = text(before), _byte_alphabet()
    pieces = []
    for token, name in enumerate(tokenizer.convert_ids_to_tokens(list(range(count)))):
        both = text([*before, token]) if name is not None else start
        piece = both[len(start) :] if both.startswith(start) else text([token])
        spelled = _bytes_of(name, alphabet) if name is not None and "\ufffd" in piece else None
        pieces.append(piece.encode() if spelled is None else spelled)
    return tuple(pieces)


def _bytes_of(name: str | bytes, alphabet: dict[str, int]) -> bytes | None:
    """The bytes spelled by a token's name, for tokens that are part of a character; None if it spells none."""
    if isinstance(name, bytes):
        return name
    if match := _BYTE.fullmatch(name):
        return bytes([int(match[1], 16)])
    return bytes(alphabet[letter] for letter in name) if all(letter in alphabet for letter in name) else None


def _byte_alphabet() -> dict[str, int]:
    """The bytes by the letters that stand for them in byte-level tokenizers (GPT-2)."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}
