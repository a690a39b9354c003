"""Rows to prompts: templates, chat templates, length limits; every faulty row is named before anything runs."""

from __future__ import annotations

import datetime
import math
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from fppo.data.chat import PLAIN, ChatOptions, check_chat_template, encode_chat
from fppo.data.problems import Problems
from fppo.data.prompt_set import PromptSet, check_prompt_set, share
from fppo.data.read import PathLike, Row, read_rows
from fppo.data.tokenizers import check_tokenizer

OverLong = Literal["error", "drop", "truncate"]

MESSAGES = "prompt_messages"  # the key under which extras hold a prompt's chat messages


class _Bad(Exception):
    """What is wrong with one field of one row."""


@attrs.frozen(kw_only=True)
class Fields:
    """Which of a row's fields are what. A dot reaches into a field: "reward_model.style".

    prompt: a field, or a template like "Question: {question}".
    ground_truth: the field that a reward compares with, any JSON value but null; None: there is none.
    source: the field that names the row's data set; else `source_name`, else the file's name.
    chat: the prompt is the field's messages, or its text as one message of the user, for a chat template.
    """

    prompt: str = "prompt"
    ground_truth: str | None = "answer"
    source: str | None = None
    source_name: str | None = None
    chat: bool = False


FIELDS = Fields()


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
) -> PromptSet:
    """`encode_rows` of `read_rows`: prompts from files, directories or a data set's name. One error names all."""
    problems = Problems()
    return encode_rows(
        read_rows(paths, split=split, problems=problems),
        tokenizer,
        fields=fields,
        max_prompt_tokens=max_prompt_tokens,
        over_long=over_long,
        pad_token=pad_token,
        chat=chat,
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
    problems: Problems | None = None,
) -> PromptSet:
    """The prompt set of `rows`, whose `fields` are named; the tokenizer's chat template makes prompts of messages.

    over_long: what happens to prompts of more than `max_prompt_tokens`: "error" names them, "drop" leaves them out,
        "truncate" keeps their last tokens; both are counted in the result.
    pad_token: the token to pad with, for a tokenizer that has none of its own.
    chat: what the chat template gets beside the messages.
    problems: what was wrong with rows that are not among `rows`, to be named in the same error.

    The row's other fields become `extras`, with a chat's messages as "prompt_messages". Raises ValueError naming file,
    line and field of every faulty row, and for a tokenizer that lacks what is needed.
    """
    if over_long not in ("error", "drop", "truncate"):
        raise ValueError(f"over_long = {over_long!r}; there are 'error', 'drop' and 'truncate'")
    special = check_tokenizer(tokenizer, pad_token=pad_token)
    if fields.chat:
        check_chat_template(tokenizer, options=chat)
    problems = Problems() if problems is None else problems
    read = ((row, _example(row, fields, problems)) for row in rows)
    asked = [(row, example) for row, example in read if example is not None]
    tokens = _tokens(asked, tokenizer, chat, problems)
    if over_long == "error":
        for (row, _), ids in zip(asked, tokens, strict=True):
            if len(ids) > max_prompt_tokens:
                text = f"the prompt has {len(ids)} tokens, more than max_prompt_tokens = {max_prompt_tokens}"
                problems.add(f"{row.place}: {text} (over_long can drop or truncate it)")
    problems.check("data")
    return _assemble(asked, tokens, special.pad_token_id, max_prompt_tokens, drop=over_long == "drop")


@attrs.frozen(kw_only=True)
class _Example:
    prompt: str | list[dict[str, Any]]
    ground_truth: Any
    source: str
    extras: dict[str, Any]
    left_out: tuple[str, ...]


def _example(row: Row, fields: Fields, problems: Problems) -> _Example | None:
    """What a row holds; None, and its problems noted, if something is wrong with it."""
    values: dict[str, Any] = {}
    readers = {"prompt": _prompt, "ground_truth": _ground_truth, "source": _source}
    for name, read in readers.items():
        try:
            values[name] = read(row, fields)
        except _Bad as error:
            problems.add(f"{row.place}: {error}")
    if len(values) < len(readers):
        return None
    used = {fields.prompt, fields.ground_truth, fields.source}
    extras, left_out = {}, []
    for name, value in row.fields.items():
        if name in used:
            continue
        try:
            extras[name] = plain(value)
        except ValueError:
            left_out.append(name)
    if fields.chat:
        extras[MESSAGES] = values["prompt"]
    return _Example(extras=extras, left_out=tuple(left_out), **values)


def _prompt(row: Row, fields: Fields) -> str | list[dict[str, Any]]:
    if "{" in fields.prompt:
        text = fill(fields.prompt, row.fields)
        return [{"role": "user", "content": text}] if fields.chat else text
    value = lookup(row.fields, fields.prompt)
    if isinstance(value, str):
        if not value:
            raise _Bad(f"field {fields.prompt!r}: empty")
        return [{"role": "user", "content": value}] if fields.chat else value
    if isinstance(value, (list, tuple)) and fields.chat:
        return _messages(value, fields.prompt)
    hint = "; messages need the chat template (chat = true)" if isinstance(value, list) else ""
    raise _Bad(f"field {fields.prompt!r}: a {_kind(value)}, not text{hint}")


def _ground_truth(row: Row, fields: Fields) -> Any:
    if fields.ground_truth is None:
        return None
    value = lookup(row.fields, fields.ground_truth)
    if value is None:
        raise _Bad(f"field {fields.ground_truth!r}: null")
    try:
        return plain(value)
    except ValueError as error:
        raise _Bad(f"field {fields.ground_truth!r}: {error}") from error


def _source(row: Row, fields: Fields) -> str:
    if fields.source is None:
        return row.source if fields.source_name is None else fields.source_name
    value = lookup(row.fields, fields.source)
    if not isinstance(value, str) or not value:
        raise _Bad(f"field {fields.source!r}: a {_kind(value)}, not the name of a source")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return "empty text" if value == "" else type(value).__name__


def lookup(fields: Mapping[str, Any], name: str) -> Any:
    """A field by its name, or by a path with dots into nested fields."""
    if name in fields:
        return fields[name]
    value: Any = fields
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise _Bad(f"field {name!r}: missing; the row has {sorted(map(str, fields))}")
        value = value[part]
    return value


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """The template with each {field} replaced by its text; {{ and }} are braces."""
    texts = []
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"prompt = {template!r} is not a template: {error}; write {{{{ for a brace") from error
    for text, name, specification, conversion in pieces:
        texts.append(text)
        if name is None:
            continue
        if not name or specification or conversion:
            raise ValueError(f"prompt = {template!r}: each {{}} holds the name of a field and nothing else")
        value = lookup(fields, name)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise _Bad(f"field {name!r}: a {_kind(value)}, not text")
        texts.append(str(value))
    return "".join(texts)


def _messages(value: Sequence[Any], name: str) -> list[dict[str, Any]]:
    if not value:
        raise _Bad(f"field {name!r}: no messages")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise _Bad(f"field {name!r}: message {number} has no text as 'role' and 'content'")
    try:
        return [plain({k: v for k, v in message.items() if v is not None}) for message in value]
    except ValueError as error:
        raise _Bad(f"field {name!r}: {error}") from error


def _tokens(
    asked: Sequence[tuple[Row, _Example]], tokenizer: Any, chat: ChatOptions, problems: Problems
) -> list[list[int]]:
    """The token ids of every prompt; [] for one that the tokenizer or its chat template refuses, with a problem."""
    texts = [example.prompt for _, example in asked if isinstance(example.prompt, str)]
    try:
        at_once = iter(tokenizer(texts)["input_ids"] if texts else ())
    except Exception:  # one at a time, then, to name those at fault
        at_once = None
    if texts and at_once is not None:
        check_open_end(texts[0], tokenizer)
    result: list[list[int]] = []
    for row, example in asked:
        ids: list[int] = []
        try:
            if not isinstance(example.prompt, str):
                ids = encode_chat(tokenizer, example.prompt, options=chat)
            else:
                ids = list(next(at_once) if at_once is not None else tokenizer(example.prompt)["input_ids"])
            if not ids:
                problems.add(f"{row.place}: the prompt has no tokens")
        except Exception as error:  # tokenizers and chat templates raise what they like
            problems.add(f"{row.place}: the tokenizer refuses the prompt: {error}")
        result.append(ids)
    return result


def check_open_end(text: str, tokenizer: Any) -> None:
    """Raises ValueError for a tokenizer that ends every text with its end token: a prompt is to be continued."""
    eos = [tokenizer.eos_token_id]
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer(text)["input_ids"][-1:] == eos and bare[-1:] != eos:
        raise ValueError("the tokenizer ends every text with its end token; set add_eos_token=False and save it")


def _assemble(
    asked: Sequence[tuple[Row, _Example]], tokens: Sequence[list[int]], pad_token_id: int, limit: int, *, drop: bool
) -> PromptSet:
    """The prompt set, without the prompts of more than `limit` tokens or with the last `limit` tokens of them."""
    long = [len(ids) > limit for ids in tokens]
    kept = [i for i, over in enumerate(long) if not (over and drop)]
    shared: dict[int, int] = {}
    return check_prompt_set(
        PromptSet(
            tokens=tuple(share(tokens[i][-limit:], shared) for i in kept),
            ids=tuple(asked[i][0].name for i in kept),
            ground_truths=tuple(asked[i][1].ground_truth for i in kept),
            sources=tuple(asked[i][1].source for i in kept),
            extras=tuple(asked[i][1].extras for i in kept),
            pad_token_id=pad_token_id,
            num_dropped=len(tokens) - len(kept),
            num_truncated=0 if drop else sum(long),
            left_out=tuple(sorted({name for i in kept for name in asked[i][1].left_out})),
        )
    )


def plain(value: Any) -> Any:
    """The value as JSON would bring it back: nan is None, a date is text, a tuple a list. Else ValueError."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return plain(value.tolist())
    raise ValueError(f"a {type(value).__name__} does not fit JSON")
