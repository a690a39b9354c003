"""Checks of a tokenizer: its special tokens, and the match of its vocabulary with the models'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_PREFIX = 4  # tokens that tokenizers put before a text, at most
_BORDER = 1000  # characters before a text on which its tokens may depend
_ANCHORS = ("\n", "a", ".", "0", ")")  # texts after which another one is encoded
_UNKNOWN = "\ufdd0"  # a noncharacter, in no vocabulary


class SpecialTokens(NamedTuple):
    """The ids that padding and stopping use."""

    pad_token_id: int
    eos_token_id: int


def check_tokenizer(tokenizer: Any, *, pad_token: str | None = None) -> SpecialTokens:
    """The tokenizer's padding and end token.

    `pad_token` names a padding token of its vocabulary. Raises ValueError without an end or padding token.
    """
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError(f"the tokenizer {name} has no end-of-sequence token; set tokenizer.eos_token and save it")
    pad = tokenizer.pad_token_id
    if pad_token is not None:
        pad = tokenizer.get_vocab().get(pad_token)
        if pad is None:
            raise ValueError(f"pad_token = {pad_token!r} is not a token of the tokenizer {name}")
    if pad is None:
        raise ValueError(
            f"the tokenizer {name} has no padding token; name a token to pad with, such as its end token: "
            f"pad_token = {tokenizer.eos_token!r} (in settings data.pad_token). Padding is masked, so any will do"
        )
    return SpecialTokens(pad, eos)


def vocabulary_size(config: Any) -> int:
    """The rows of a model's embedding, by its Hugging Face configuration."""
    return config.get_text_config().vocab_size


def check_vocabulary(
    tokenizer: Any,
    configs: Mapping[str, Any],
    *,
    tokenizers: Mapping[str, Any] | None = None,
    any_text: bool = False,
) -> None:
    """Raise ValueError, naming all mismatches, unless the models fit the tokenizer and each other.

    `configs` holds the models' Hugging Face configurations by name (actor, reference, critic); the others are compared
    with the first. `tokenizers` holds the others' own tokenizers, if any: an equal vocabulary then allows embeddings
    padded to another size.

    Each model needs an embedding for the tokenizer's end and padding token. The tokenizer may have more tokens, as
    Gemma 3's has an image token that its text models lack: `check_tokens` checks those of prompts. Models that read
    `any_text` need an embedding for every token but added ones, which `within` leaves out.
    """
    needed = [x for x in (tokenizer.eos_token_id, tokenizer.pad_token_id) if x is not None]
    if any_text:
        needed.append(max(set(tokenizer.get_vocab().values()) - set(tokenizer.get_added_vocab().values()), default=0))
    names = {token: tokenizer.convert_ids_to_tokens(token) for token in needed}
    sizes = {name: vocabulary_size(config) for name, config in configs.items()}
    wrong = [
        f"the {name} has {size} tokens, and the tokenizer's {text!r} has the id {token}"
        for name, size in sizes.items()
        for token, text in names.items()
        if size <= token
    ]
    first = next(iter(sizes), "")
    for name, size in list(sizes.items())[1:]:
        other = (tokenizers or {}).get(name)
        if other is not None and other.get_vocab() != tokenizer.get_vocab():
            wrong.append(f"the {name} has another tokenizer's vocabulary than the {first}")
        elif other is None and size != sizes[first]:
            wrong.append(f"the {name} has {size} tokens, but the {first} has {sizes[first]}")
    if wrong:
        raise ValueError("the models' vocabularies do not match: " + "; ".join(wrong))


def stop_tokens(
    tokenizer: Any, stop: Sequence[str] = (), stop_token_ids: Sequence[int] = (), *, turn_ends: Sequence[int] = ()
) -> tuple[int, ...]:
    """The ids that end a response, without duplicates: the tokenizer's end token, `turn_ends` (the model's own), the
    tokens among `stop` (`stop_texts` takes its other texts), and `stop_token_ids`.

    Raises ValueError for `stop_token_ids` that the tokenizer does not have.
    """
    vocabulary = tokenizer.get_vocab()
    end = check_tokenizer(tokenizer, pad_token=tokenizer.eos_token).eos_token_id
    tokens = [vocabulary[text] for text in stop if text in vocabulary]
    known = set(vocabulary.values())
    unknown = [i for i in stop_token_ids if i not in known]
    if unknown:
        raise ValueError(f"stop_token_ids = {unknown}: the tokenizer has no such ids; they go up to {max(known)}")
    return tuple(dict.fromkeys([end, *turn_ends, *tokens, *stop_token_ids]))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a whole text, with the tokenizer's first tokens (BOS), but not twice (`begun_once`)."""
    return begun_once(tokenizer, text, list(tokenizer(text)["input_ids"]))


def encode_after(tokenizer: Any, text: str, before: str = "") -> list[int]:
    """Encode a text that follows the text `before`, and return its tokens alone.

    A tokenizer may put a space before a text that is encoded by itself, as SentencePiece's do. So `before` is encoded
    with it. But it has been read or sampled already, so its tokens must not change. If a token would cross the border,
    or if `before` is "", the text is encoded after one of `_ANCHORS` with which it does not merge.
    """

    def encoded(whole: str) -> list[int]:
        return list(tokenizer.encode(whole, add_special_tokens=False))

    unknown = encoded(_UNKNOWN)[-1:]
    for anchor in (before[-_BORDER:], *_ANCHORS):
        head = encoded(anchor) if anchor else []
        if head[-1:] in ([], unknown):  # an unknown token may merge with the next
            continue
        whole = encoded(anchor + text)
        if whole[: len(head)] == head:
            return whole[len(head) :]
    return encoded(text)


def begun_once(tokenizer: Any, text: str, ids: list[int]) -> list[int]:
    """The tokens `ids` of a text, without the tokenizer's first ones (BOS) if the text itself begins with them, as a
    rendered chat template does."""
    if not any(ids[:count] == ids[count : 2 * count] for count in range(1, min(_PREFIX, len(ids) // 2) + 1)):
        return ids
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    before = ids[: len(ids) - len(bare)]
    return bare if before and ids == [*before, *bare] and bare[: len(before)] == before else ids


def within(ids: Iterable[int], vocabulary: int) -> list[int]:
    """The ids below `vocabulary`, the rows of a model's embedding: a tokenizer may have more."""
    return [token for token in ids if token < vocabulary]
