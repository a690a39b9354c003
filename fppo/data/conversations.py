"""Demonstrations: rows of prompts with the responses to imitate, or of whole conversations, as tokens with masks."""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from fppo._errors import check_depth
from fppo.data.chat import (
    PLAIN,
    ChatOptions,
    EndlessTemplate,
    check_chat_template,
    encode_chat,
    end_of_turn,
    render_chat,
)
from fppo.data.encode import OverLong, most_characters
from fppo.data.examples import (
    Answers,
    Fields,
    ImitatedTurns,
    check_fields,
    example_of,
    fields_in,
    fill,
    from_text,
    lookup,
    messages_of,
)
from fppo.data.plain import BadField
from fppo.data.problems import Problems
from fppo.data.read import Row
from fppo.data.tokenizers import check_tokenizer, encode_after, encode_text

Message = Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Imitated:
    """A row to imitate: the tokens before the first imitated one, and those from there on with a mask over them."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    mask: tuple[bool, ...]  # of the response: True where a token is imitated

    @property
    def num_tokens(self) -> int:
        """The number of the row's tokens, prompt and response."""
        return len(self.prompt) + len(self.response)


RESPONSE = Answers()


@attrs.frozen(kw_only=True)
class DemonstrationSet:
    """Encoded demonstrations. Columns have one entry per row; `num_dropped` and `num_truncated` rows were too long."""

    rows: tuple[Imitated, ...]
    ids: tuple[str, ...]  # origin of each row, such as "train.jsonl:17"
    sources: tuple[str, ...]
    pad_token_id: int
    num_dropped: int = 0  # rows that were too long
    num_truncated: int = 0

    def __len__(self) -> int:
        return len(self.rows)


def digest_of_demonstrations(demonstrations: DemonstrationSet) -> dict[str, str]:
    """A 128-bit hex digest of the tokens and masks of all rows, in order."""
    hasher = hashlib.blake2b(digest_size=16)
    for row in demonstrations.rows:
        counts = len(row.prompt), len(row.response)
        hasher.update(array("q", (*counts, *row.prompt, *row.response, *row.mask)).tobytes())
    return {"as tokens": hasher.hexdigest()}


def imitated_conversation(
    tokenizer: Any, messages: Sequence[Message], *, turns: ImitatedTurns = "all", options: ChatOptions = PLAIN
) -> list[Imitated]:
    """Make rows of a conversation that ends with the assistant's message: all of the assistant's turns, or the last
    one, are imitated.

    The tokens before a turn are the prompt that a policy would answer there, and a turn ends with the template's end of
    a turn: training and sampling see the same. Turns share a row as long as the template only appends. If it later
    renders earlier turns differently, such as without their thoughts, there is a row for each. Raises ValueError for a
    template that writes something else than its own prompt before an answer.
    """
    end = end_of_turn(tokenizer, options=options)
    mark = "" if end is None else tokenizer.decode([end])
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    rows: list[Imitated] = []
    text = None  # of the last row; None where nothing can be appended
    for place in places if turns == "all" else places[-1:]:
        before = render_chat(tokenizer, messages[:place], generation=True, options=options)
        answer = _answer(before, render_chat(tokenizer, messages[: place + 1], generation=False, options=options))
        ended = bool(mark) and mark in answer
        answer = answer[: answer.rindex(mark) + len(mark)] if ended else answer
        ids = encode_after(tokenizer, answer, before)
        ids = ids if ended else [*ids, tokenizer.eos_token_id]
        if text is not None and before.startswith(text):
            gap = encode_after(tokenizer, before[len(text) :], text)
            last = rows.pop()
            response = (*last.response, *gap, *ids)
            mask = (*last.mask, *[False] * len(gap), *[True] * len(ids))
            rows.append(Imitated(prompt=last.prompt, response=response, mask=mask))
        else:
            prompt = tuple(encode_chat(tokenizer, messages[:place], options=options))
            rows.append(Imitated(prompt=prompt, response=tuple(ids), mask=(True,) * len(ids)))
        text = before + answer if ended else None
    return rows


def _answer(before: str, whole: str) -> str:
    """The part of the text of a `whole` conversation after `before`, the prompt of its last turn. White space at the
    border may differ; raises ValueError if the conversation begins with anything else."""
    if whole.startswith(before):
        return whole[len(before) :]
    if whole.startswith(bare := before.rstrip()):
        return whole[len(bare) :].lstrip()
    raise ValueError(
        "the chat template writes the assistant's message otherwise than behind its own prompt "
        f"({before[-40:]!r}); give another template (data.chat_template), or other data.chat_arguments"
    )


def encode_demonstrations(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    fields: Fields,
    answers: Answers = RESPONSE,
    max_tokens: int = 2048,
    over_long: OverLong = "error",
    pad_token: str | None = None,
    chat: ChatOptions = PLAIN,
    problems: Problems | None = None,
) -> DemonstrationSet:
    """Encode rows as demonstrations: the prompts of `fields`, with the responses or turns to imitate that `answers`
    names.

    Without a chat template a response ends with the tokenizer's end token. `over_long` is the rule for rows of more
    than `max_tokens`: "error" names them, "drop" leaves them out, "truncate" cuts their end. Raises ValueError naming
    file, line and field of every faulty row.
    """
    special, problems = check_tokenizer(tokenizer, pad_token=pad_token), Problems() if problems is None else problems
    if fields.chat:
        check_chat_template(tokenizer, options=chat)
    check_fields(rows, answers.needed(fields), problems)
    made: list[tuple[Imitated, Row, str]] = []
    most, dropped = most_characters(tokenizer, max_tokens), 0
    for row in rows:
        if (said := _too_large(row, answers, fields, most, max_tokens)) is not None and over_long != "truncate":
            dropped += 1
            if over_long == "error":
                problems.add(f"{said} (over_long can drop or truncate it)", at=row.place)
            continue
        own = row if said is None else _shortened(row, answers, fields, 2 * most, max_tokens)
        for each, source in _read(own, tokenizer, fields, answers, chat, problems):
            made.append((each, row, source))
    long = [each.num_tokens > max_tokens for each, _, _ in made]
    for (each, row, _), over in zip(made, long, strict=True):
        if over and over_long == "error":
            text = f"the row has {each.num_tokens} tokens, more than max_tokens = {max_tokens}"
            problems.add(f"{text} (over_long can drop or truncate it)", at=row.place)
    problems.check("data")
    cut = [(_cut(each, max_tokens) if over_long == "truncate" else each, row, source) for each, row, source in made]
    kept = [
        (each, row, source)
        for (each, row, source), over in zip(cut, long, strict=True)
        if any(each.mask) and not (over and over_long == "drop")
    ]
    if not kept:
        read = len(made) + dropped
        raise ValueError(f"the data set holds no demonstrations: {read} were read, and all were too long")
    return DemonstrationSet(
        rows=tuple(each for each, _, _ in kept),
        ids=tuple(row.name for _, row, _ in kept),
        sources=tuple(source for _, _, source in kept),
        pad_token_id=special.pad_token_id,
        num_dropped=len(made) - len(kept) + dropped,
        num_truncated=sum(long) - (len(made) - len(kept)) if over_long == "truncate" else 0,
    )


def _too_large(row: Row, answers: Answers, fields: Fields, max_characters: int, limit: int) -> str | None:
    """A complaint about a row with more characters, or more messages, than `limit` tokens can have: templates and
    tokenizers take minutes for such a row. None for other rows."""
    texts, count = [], 0
    for name in _texts_of(answers, fields):
        with contextlib.suppress(BadField, ValueError):
            value = _opened(check_depth(lookup(row.fields, name)), name)
            count = max(count, len(value) if isinstance(value, list | tuple) else 0)
            texts += [len(text) for text in _inside(value)]
    if sum(texts) > max_characters:
        return f"the row has {sum(texts):,} characters, more than max_tokens = {limit} tokens can have"
    return f"the row has {count:,} messages, more than max_tokens = {limit} tokens can have" if count > limit else None


def _texts_of(answers: Answers, fields: Fields) -> list[str]:
    """Names of the fields that become tokens: of prompt and response, or of the messages."""
    named = {setting: name for setting, name in answers.needed(fields).items() if setting != "data.source"}
    return [field for setting, name in named.items() if name is not None for field in fields_in(name, setting)]


def _opened(value: Any, name: str) -> Any:
    """The value of the field `name`; if it is the JSON text of messages, these messages."""
    messages = from_text(value, name) if isinstance(value, str) and value.lstrip().startswith("[") else None
    return value if messages is None else messages


def _inside(value: Any) -> Iterator[str]:
    """Yield every text in a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _inside(each)


def _shortened(row: Row, answers: Answers, fields: Fields, max_characters: int, limit: int) -> Row:
    """Shorten a row so that its first `limit` tokens stay: cut texts to `max_characters`, and messages to `limit`, or
    a few more so that the assistant's comes last."""

    def short(value: Any) -> Any:
        if isinstance(value, str):
            return value[:max_characters]
        if isinstance(value, Mapping):
            return {name: short(each) for name, each in value.items()}
        return [short(each) for each in value] if isinstance(value, list | tuple) else value

    changed = dict(row.fields)
    for name in {name.partition(".")[0] for name in _texts_of(answers, fields)} & changed.keys():
        value = short(_opened(changed[name], name))
        if isinstance(value, list) and len(value) > limit:
            ends = (
                at for at, x in enumerate(value) if at >= limit and isinstance(x, dict) and x.get("role") == "assistant"
            )
            value = value[: next(ends, len(value)) + 1]
        changed[name] = value
    return attrs.evolve(row, fields=changed)


def _cut(row: Imitated, limit: int) -> Imitated:
    """The first `limit` tokens of a row."""
    left = max(limit - len(row.prompt), 0)
    return attrs.evolve(row, response=row.response[:left], mask=row.mask[:left])


def _read(
    row: Row,
    tokenizer: Any,
    fields: Fields,
    answers: Answers,
    chat: ChatOptions,
    problems: Problems,
) -> list[tuple[Imitated, str]]:
    """The demonstrations of a row, with its source; none, and a problem noted, for a faulty one."""
    turns = answers.turns
    try:
        if answers.messages is not None:
            conversation, source, tools = _conversation(row, fields, answers.messages)
        else:
            example = example_of(row, fields, problems)
            if example is None:
                return []
            words, source, tools = _response(row, answers.response), example.source, example.tools
            if isinstance(example.prompt, str):
                prompt = encode_text(tokenizer, example.prompt)
                ids = [*encode_after(tokenizer, words, example.prompt), tokenizer.eos_token_id]
                if not prompt:
                    raise BadField("the prompt has no tokens")
                return [(Imitated(prompt=tuple(prompt), response=tuple(ids), mask=(True,) * len(ids)), source)]
            conversation, turns = [*example.prompt, {"role": "assistant", "content": words}], "last"
        own = chat if tools is None else attrs.evolve(chat, tools=tools)
        return [(each, source) for each in imitated_conversation(tokenizer, conversation, turns=turns, options=own)]
    except EndlessTemplate as error:
        raise ValueError(f"{row.place}: {error}") from None
    except BadField as error:
        problems.add(str(error), at=row.place)
    except Exception as error:  # tokenizers and chat templates raise any exception
        problems.add(f"the row cannot be encoded: {error}", at=row.place)
    return []


def _conversation(row: Row, fields: Fields, name: str) -> tuple[list[dict[str, Any]], str, Any]:
    """The messages of a row, its source, and its own tools. Raises BadField."""
    value, filled = lookup(row.fields, name), row.filled
    if isinstance(value, str):
        value, filled = from_text(value, name), False
    elif hasattr(value, "tolist"):  # a numpy array, as pandas has them
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise BadField(f"field {name!r}: not a list of messages")
    conversation = messages_of(value, name, filled=filled, answered=True)
    rest = attrs.evolve(row, fields={key: x for key, x in row.fields.items() if key != name} | {"prompt": "-"})
    example = example_of(rest, attrs.evolve(fields, prompt="prompt", chat=False), Problems())
    if example is None:
        raise BadField(f"field {fields.source!r} or {fields.tools!r}: not a source, or not tools")
    return conversation, example.source, example.tools


def _response(row: Row, response: str) -> str:
    """The text of a row's response. Raises BadField."""
    if "{" in response:
        return fill(response, row.fields, "sft.response")
    value = lookup(row.fields, response)
    if not isinstance(value, str) or not value:
        raise BadField(f"field {response!r}: a {type(value).__name__}, not text, or empty")
    return value
