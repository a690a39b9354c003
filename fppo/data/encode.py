"""Encode rows as prompts: templates, chat templates, length limits; every faulty row is named before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import attrs

from fppo.data.chat import PLAIN, ChatOptions, EndlessTemplate, check_chat_template, encode_chat, opening_of
from fppo.data.examples import FIELDS, Example, Fields, check_fields, example_of
from fppo.data.images import ImageReader, ReadInputs, ReadRow
from fppo.data.problems import Problems
from fppo.data.prompts import PromptSet, check_prompt_set, share
from fppo.data.read import PathLike, Row, read_rows
from fppo.data.tokenizers import begun_once, check_tokenizer, encode_text

_KEPT = 1 << 30  # bytes of processed images kept in memory
_SHORT = 1 << 20  # characters up to which a prompt is tokenized whatever its limit
OverLong = Literal["error", "drop", "truncate"]


def load_prompts(
    paths: PathLike | Sequence[PathLike],
    tokenizer: Any,
    *,
    fields: Fields = FIELDS,
    split: str = "train",
    max_prompt_tokens: int = 512,
    over_long: OverLong = "error",
    pad_token: str | None = None,
    chat: ChatOptions = PLAIN,
    images: ImageReader | None = None,
) -> PromptSet:
    """Read and encode prompts from files, directories or a data set's name: `encode_rows` of `read_rows`.

    Raises one ValueError that names every faulty row.
    """
    problems = Problems()
    return encode_rows(
        read_rows(paths, split=split, problems=problems),
        tokenizer,
        fields=fields,
        max_prompt_tokens=max_prompt_tokens,
        over_long=over_long,
        pad_token=pad_token,
        chat=chat,
        images=images,
        problems=problems,
    )


def encode_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    fields: Fields = FIELDS,
    max_prompt_tokens: int = 512,
    over_long: OverLong = "error",
    pad_token: str | None = None,
    chat: ChatOptions = PLAIN,
    images: ImageReader | None = None,
    problems: Problems | None = None,
) -> PromptSet:
    """Encode `rows` by their `fields` into a prompt set; messages go through the tokenizer's chat template.

    over_long: the rule for prompts of more than `max_prompt_tokens`: "error" names them, "drop" leaves them out,
        "truncate" keeps their last tokens; both are counted in the result.
    pad_token: the padding token, for a tokenizer without one.
    chat: the chat template's arguments besides the messages.
    images: the reader of the images of `fields.images` and the videos of `fields.videos`, with its own template.
    problems: faults of rows outside `rows`, to be named in the same error.

    The row's other fields become `extras`, with a chat's messages as "prompt_messages". Raises ValueError naming file,
    line and field of every faulty row, and for a tokenizer without an end or padding token or chat template.
    """
    if over_long not in ("error", "drop", "truncate"):
        raise ValueError(f"over_long = {over_long!r}; there are 'error', 'drop' and 'truncate'")
    _check_images(fields, images, over_long)
    special = check_tokenizer(tokenizer, pad_token=pad_token)
    if fields.chat:
        check_chat_template(tokenizer if images is None else images.processor, options=chat)
    problems = Problems() if problems is None else problems
    check_fields(rows, fields.needed, problems)
    read = ((row, example_of(row, fields, problems)) for row in rows)
    asked = [(row, example) for row, example in read if example is not None]
    seen: list[ReadRow] = []
    if fields.chat:
        _check_unrendered(asked, opening_of(tokenizer, options=chat), problems)
    huge = _too_long(asked, tokenizer, max_prompt_tokens, over_long, problems)
    if images is None:
        tokens = _tokens_or_zeros(asked, huge, max_prompt_tokens, tokenizer, chat, problems)
    else:
        tokens, seen = _tokens_with_images(asked, images, fields, problems)
    if over_long == "error":
        _note_over_long(asked, tokens, max_prompt_tokens, problems)
    problems.check("data")
    prompts = _assemble(asked, tokens, special.pad_token_id, max_prompt_tokens, drop=over_long == "drop")
    if images is None:
        return prompts
    kept = [x for x, ids in zip(seen, tokens, strict=True) if len(ids) <= max_prompt_tokens]
    return attrs.evolve(prompts, inputs=ReadInputs(images, kept))


def _too_long(
    examples: Sequence[tuple[Row, Example]], tokenizer: Any, limit: int, over_long: OverLong, problems: Problems
) -> set[int]:
    """Indices of the prompts that have more characters than `limit` tokens can have, so that they need not be
    tokenized, which takes minutes for many megabytes. Empty if prompts are to be truncated.

    Raises ValueError that names them, after all problems noted so far, if `over_long` is "error".
    """
    if over_long == "truncate":
        return set()
    sizes = [_characters(example.prompt) for _, example in examples]
    if max(sizes, default=0) <= _SHORT:
        return set()
    most = most_characters(tokenizer, limit)
    huge = [number for number, size in enumerate(sizes) if size > most]
    if huge and over_long == "error":
        for number in huge:
            text = f"the prompt has {sizes[number]:,} characters, more than max_prompt_tokens = {limit} tokens can have"
            problems.add(f"{text} (over_long can drop or truncate it)", at=examples[number][0].place)
        problems.check("data")
    return set(huge)


def most_characters(tokenizer: Any, limit: int) -> int:
    """An upper bound of the characters in a text of `limit` tokens, at least `_SHORT`."""
    return max(_SHORT, limit * max(map(len, tokenizer.get_vocab())))


def _note_over_long(
    examples: Sequence[tuple[Row, Example]], tokens: Sequence[list[int]], limit: int, problems: Problems
) -> None:
    """Note prompts of more than `limit` tokens."""
    for (row, _), ids in zip(examples, tokens, strict=True):
        if len(ids) > limit:
            text = f"the prompt has {len(ids)} tokens, more than max_prompt_tokens = {limit}"
            problems.add(f"{text} (over_long can drop or truncate it)", at=row.place)


def _characters(prompt: str | Sequence[Mapping[str, Any]]) -> int:
    """The number of characters of a text, or of all texts in messages."""
    if isinstance(prompt, str):
        return len(prompt)
    contents = [message.get("content") for message in prompt]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    texts = [*contents, *(part.get("text") for part in parts if isinstance(part, Mapping))]
    return sum(len(text) for text in texts if isinstance(text, str))


def _check_images(fields: Fields, images: ImageReader | None, over_long: OverLong) -> None:
    """Raise ValueError for images and videos without a reader, and for settings that exclude them."""
    if bool(fields.seen) != (images is not None):
        raise ValueError(
            "fields.images or fields.videos, and images go together: the field, and the ImageReader of the model's "
            "processor"
        )
    if images is not None and not fields.chat:
        raise ValueError("images and videos need the chat template of the model's processor: give chat = true")
    if images is not None and fields.tools is not None:
        raise ValueError("fields.tools: rows with images or videos have no tools of their own yet; leave one out")
    if images is not None and over_long == "truncate":
        raise ValueError("over_long = 'truncate' would cut through images and videos; give 'error' or 'drop'")


def _tokens_with_images(
    examples: Sequence[tuple[Row, Example]], reader: ImageReader, fields: Fields, problems: Problems
) -> tuple[list[list[int]], list[ReadRow]]:
    """The token ids of every prompt ([] and a problem if its images or text are refused), and its row for reading
    inputs again, which keeps processed inputs up to `_KEPT` bytes in total."""
    for kind, name in fields.seen.items():
        there = any(name.split(".")[0] in row.fields for row, _ in examples) and len(fields.seen) > 1
        if examples and not there and not any(getattr(example, f"{kind}s") for _, example in examples):
            problems.add(f"no row has {kind}s in the field {name!r}; the first has {sorted(examples[0][0].fields)}")
    names = " and ".join(map(repr, fields.seen.values()))
    result: list[list[int]] = []
    seen: list[ReadRow] = []
    size = 0
    for row, example in examples:
        ids: list[int] = []
        assert not isinstance(example.prompt, str)
        try:
            ids, inputs = reader.encode(example.prompt, example.images, example.videos)
            size += 0 if inputs is None else sum(x.nbytes for x in inputs.named().values())
            kept = inputs if size <= _KEPT else None
            seen.append(ReadRow(example.prompt, example.images, example.videos, kept))
        except EndlessTemplate as error:
            raise ValueError(f"{row.place}: {error}") from None
        except Exception as error:  # processors and chat templates raise any exception
            problems.add(f"field {names}: {' '.join(str(error).split()) or type(error).__name__}", at=row.place)
        result.append(ids)
    return result, seen


def _check_unrendered(examples: Sequence[tuple[Row, Example]], opening: str, problems: Problems) -> None:
    """Note messages whose text begins with the chat template's first token, `opening`."""
    for row, example in examples:
        for message in example.prompt:
            content = message["content"] if isinstance(message, dict) else ""
            if opening and isinstance(content, str) and content.lstrip().startswith(opening):
                text = f"begins with {opening!r}, as the chat template does: it is rendered already; give chat = false"
                problems.add(f"the text of a message {text}, or messages without the template's tokens", at=row.place)
                break


def _tokens(
    examples: Sequence[tuple[Row, Example]], tokenizer: Any, chat: ChatOptions, problems: Problems
) -> list[list[int]]:
    """The token ids of every prompt; [] for one that the tokenizer or its chat template refuses, with a problem."""
    texts = [example.prompt for _, example in examples if isinstance(example.prompt, str)]
    try:
        at_once = iter(tokenizer(texts)["input_ids"] if texts else ())
    except Exception:  # then one at a time, to name the faulty ones
        at_once = None
    if texts and at_once is not None:
        check_open_end(texts[0], tokenizer)
    result: list[list[int]] = []
    for row, example in examples:
        ids: list[int] = []
        try:
            if not isinstance(example.prompt, str):
                own = chat if example.tools is None else attrs.evolve(chat, tools=example.tools)
                ids = encode_chat(tokenizer, example.prompt, options=own)
            elif at_once is None:
                ids = encode_text(tokenizer, example.prompt)
            else:
                ids = begun_once(tokenizer, example.prompt, list(next(at_once)))
            if not ids:
                problems.add("the prompt has no tokens", at=row.place)
        except EndlessTemplate as error:
            raise ValueError(f"{row.place}: {error}") from None
        except Exception as error:  # tokenizers and chat templates raise any exception
            problems.add(f"the tokenizer refuses the prompt: {error}", at=row.place)
        result.append(ids)
    return result


def _tokens_or_zeros(
    examples: Sequence[tuple[Row, Example]],
    huge: Collection[int],
    limit: int,
    tokenizer: Any,
    chat: ChatOptions,
    problems: Problems,
) -> list[list[int]]:
    """The token ids of every prompt; for those whose indices are in `huge`, not tokenized, `limit` + 1 zeros."""
    ids = iter(_tokens([x for number, x in enumerate(examples) if number not in huge], tokenizer, chat, problems))
    return [[0] * (limit + 1) if number in huge else next(ids) for number in range(len(examples))]


def check_open_end(text: str, tokenizer: Any) -> None:
    """Raise ValueError for a tokenizer that appends its end token to every text: prompts are to be continued."""
    eos = [tokenizer.eos_token_id]
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer(text)["input_ids"][-1:] == eos and bare[-1:] != eos:
        raise ValueError("the tokenizer ends every text with its end token; set add_eos_token=False and save it")


def _assemble(
    examples: Sequence[tuple[Row, Example]], tokens: Sequence[list[int]], pad_token_id: int, limit: int, *, drop: bool
) -> PromptSet:
    """The prompt set; prompts of more than `limit` tokens are left out (`drop`) or cut to their last `limit`."""
    long = [len(ids) > limit for ids in tokens]
    kept = [i for i, over in enumerate(long) if not (over and drop)]
    shared: dict[int, int] = {}
    return check_prompt_set(
        PromptSet(
            tokens=tuple(share(tokens[i][-limit:], shared) for i in kept),
            ids=tuple(examples[i][0].name for i in kept),
            ground_truths=tuple(examples[i][1].ground_truth for i in kept),
            sources=tuple(examples[i][1].source for i in kept),
            extras=tuple(examples[i][1].extras for i in kept),
            pad_token_id=pad_token_id,
            num_dropped=len(tokens) - len(kept),
            num_truncated=0 if drop else sum(long),
            left_out=tuple(sorted({name for i in kept for name in examples[i][1].left_out})),
        )
    )
