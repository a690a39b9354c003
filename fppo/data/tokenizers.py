"""What a tokenizer must have, and whether models share its vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_PREFIX = 4  # tokens that tokenizers put before a text, at most


class SpecialTokens(NamedTuple):
    """The ids that padding and stopping use."""

    pad_token_id: int
    eos_token_id: int


def check_tokenizer(tokenizer: Any, *, pad_token: str | None = None) -> SpecialTokens:
    """The tokenizer's padding and end token.

    Raises ValueError if it has no end token, or neither a padding token nor a `pad_token`, one of its vocabulary.
    """
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError(f"the tokenizer {name} has no end-of-sequence token; set tokenizer.eos_token and save it")
    pad = tokenizer.pad_token_id
    if pad_token is not None:
        pad = tokenizer.get_vocab().get(pad_token)
        if pad is None:
            raise ValueError(f"pad_token = {pad_token!r} is no token of the tokenizer {name}")
    if pad is None:
        raise ValueError(
            f"the tokenizer {name} has no padding token; name a token to pad with, as its end token: "
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
    """Raises ValueError if models do not fit the tokenizer or each other, naming all that is wrong.

    `configs` holds the models' Hugging Face configurations by name (actor, reference, critic); the first is the one
    that the others are compared with. `tokenizers` holds those that came with the others, where there are any: an equal
    vocabulary then allows embeddings padded to another size.

    Each model needs an embedding for the tokenizer's end and padding token. The tokenizer may have more tokens than
    that, as Gemma 3's has one for images that its text models lack: `check_tokens` looks at those of prompts. Models
    that read `any_text` need one for every token but added ones, which `within` leaves out.
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
    """The ids that end a response: the tokenizer's end token, `turn_ends`, those of `stop` that are tokens, and
    `stop_token_ids`, none twice. `turn_ends` are the model's own ends; `stop_texts` reads what of `stop` is text.

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
    """The tokens of a text that stands alone, begun as the tokenizer begins texts, and not twice (`begun_once`)."""
    return begun_once(tokenizer, text, list(tokenizer(text)["input_ids"]))


def begun_once(tokenizer: Any, text: str, ids: list[int]) -> list[int]:
    """The tokens `ids` of a text, without those that the tokenizer put before it if the text begins with the same
    itself, as a prompt does that a chat template has rendered."""
    if not any(ids[:count] == ids[count : 2 * count] for count in range(1, min(_PREFIX, len(ids) // 2) + 1)):
        return ids
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    before = ids[: len(ids) - len(bare)]
    return bare if before and ids == [*before, *bare] and bare[: len(before)] == before else ids


def within(ids: Iterable[int], vocabulary: int) -> list[int]:
    """The tokens that a model with as many rows of embeddings has: a tokenizer may have more."""
    return [token for token in ids if token < vocabulary]
