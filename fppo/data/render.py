"""Conversations rendered by a chat template, with a check that it leaves out no part and writes none twice.

Templates read messages in different forms: arguments of calls as objects or as text, contents as texts or as lists of
parts, thoughts under one of several names. To find the form that a template reads, and the parts that it shows, a
conversation of the same shape is rendered with a mark for each text, once for a template and a shape.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, Protocol

import attrs

from fppo.data.messages import ALIASES, CALLS, REASONING, BadMessage, arguments_text, canonical, named_tools

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "fppotool",
        "description": "x",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
_KNOWN = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "id")
_TOOLS = ("tool", "function")  # roles of tools' messages
_THOUGHT = re.compile(r"(?s).*(?:</[^<>\s]*(?:think|thought|reason)[^<>\s]*>|<channel\|>|\[/THINK\])")
_TAGS = re.compile(r"<[^<>]*>|(?<!\S)/\w+")  # that some templates take out, such as <answer> and /no_think
_WORD = re.compile(r"\w+")
_SHAPES = 1024  # shapes of conversations whose forms are cached
_ADVICE = "give it in another role or field, or give another template (data.chat_template)"


class EndlessTemplate(ValueError):
    """Raised for a chat template that does not finish."""


class Write(Protocol):
    """A chat template: the text of messages, up to the assistant's turn if an answer is to be generated."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], *, generation: bool) -> str: ...


@attrs.frozen(kw_only=True)
class Template:
    """A chat template, compared with others by its key alone.

    `write` writes with the tools of a conversation, `write_marks` with `TOOL` in their place, if it has `tools`.
    """

    key: Hashable
    tools: bool
    write: Write = attrs.field(eq=False)
    write_marks: Write = attrs.field(eq=False)


class Rendered(NamedTuple):
    """A conversation in the form that a template reads, and its text."""

    messages: list[dict[str, Any]]
    text: str


def render(
    template: Template, messages: Sequence[Mapping[str, Any]], *, generation: bool, sampled: bool = False
) -> Rendered:
    """Render a conversation: the form in which the template reads it, and its text.

    Raises ValueError naming the messages and fields of which the template leaves something out, or writes it twice. A
    template may leave out the thoughts of an assistant's earlier turn, if it shows thoughts at the end of a
    conversation, and words of a last message that is `sampled`. Templates raise any exception.
    """
    whole = _read(messages)
    form = _form_of(template, _shapes_of(whole), generation)
    if form.problems:
        raise _error(form.problems)
    written = form.dialect.convert(whole)
    text = template.write(written, generation=generation)
    known = whole[:-1] if sampled else whole
    faults = [*_missing(known, text, form.forgotten), *_unread(template, written, text, generation)]
    if faults:
        raise _error(faults)
    return Rendered(written, text)


def _error(problems: Sequence[str]) -> ValueError:
    return ValueError(f"the chat template {'; it '.join([*dict.fromkeys(problems)][:3])}; {_ADVICE}")


def _read(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    whole: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        try:
            whole.append(canonical(message))
        except BadMessage as error:
            raise ValueError(f"message {number}, of the role {message['role']!r}: {error}") from error
    return named_tools(whole)


@attrs.frozen(kw_only=True)
class _Dialect:
    """The form in which a template reads messages."""

    in_parts: bool = False  # contents as lists of parts
    as_text: bool = False  # arguments of calls as a text of JSON
    reasoning: str = REASONING[0]  # the field of thoughts
    aliases: bool = False  # roles by the names that most templates know
    calls: str = CALLS[0]  # the field of calls

    def convert(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Convert messages to the form of this dialect."""
        return [self._one(message) for message in messages]

    def _one(self, message: Mapping[str, Any]) -> dict[str, Any]:
        own = dict(message)
        if self.aliases:
            own["role"] = ALIASES.get(own["role"], own["role"])
        if self.in_parts and isinstance(own["content"], str):
            own["content"] = [{"type": "text", "text": own["content"]}]
        if (thoughts := own.pop("reasoning_content", None)) is not None:
            own[self.reasoning] = thoughts
        calls = [self._call(call) for call in own.pop("tool_calls", ())]
        if calls:
            own[self.calls] = calls if self.calls == CALLS[0] else calls[0]["function"]
        return own

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = arguments_text(function["arguments"]) if self.as_text else function["arguments"]
        return {**call, "function": {**function, "arguments": arguments}}


class _Shape(NamedTuple):
    """The role of a message and the kinds of its parts, without their texts."""

    role: str
    content: bool | tuple[str, ...]  # whether there is text, or the kinds of its parts
    reasoning: bool
    calls: tuple[tuple[int | None, str], ...]  # the number of each call's id, and the kind of its arguments
    id: int | None  # the number of the call that it answers
    name: bool


class _Form(NamedTuple):
    """How a template reads conversations of a shape: the dialect with the fewest faults, the faults that remain, and
    the fields of earlier turns that it leaves out, each (message, field)."""

    dialect: _Dialect
    problems: tuple[str, ...]
    forgotten: frozenset[tuple[int, str]]


def _shapes_of(messages: Sequence[Mapping[str, Any]]) -> tuple[_Shape, ...]:
    ids: dict[Any, int] = {}

    def number(value: Any) -> int | None:
        return None if value is None else ids.setdefault(str(value), len(ids))

    return tuple(
        _Shape(
            role=message["role"],
            content=_kinds(message["content"]),
            reasoning="reasoning_content" in message,
            calls=tuple(
                (number(call.get("id")), _kind(call["function"]["arguments"])) for call in message.get("tool_calls", ())
            ),
            id=number(message.get("tool_call_id")),
            name=message["role"] in _TOOLS and "name" in message,
        )
        for message in messages
    )


def _kinds(content: Any) -> bool | tuple[str, ...]:
    if isinstance(content, str):
        return bool(content.strip())
    return tuple(part["type"] if part.get("text", "x").strip() else "" for part in content)


def _kind(arguments: Any) -> str:
    return type(arguments).__name__ if arguments or not isinstance(arguments, dict | list) else "nothing"


def _marked(shapes: Sequence[_Shape]) -> list[dict[str, Any]]:
    """A conversation of these shapes with a mark for each text."""
    names: dict[int, str] = {}
    result: list[dict[str, Any]] = []
    for number, shape in enumerate(shapes):
        content: Any = f"fppo{number}said" if shape.content is True else ""
        if isinstance(shape.content, tuple):
            content = [_part(kind, f"fppo{number}said{place}x") for place, kind in enumerate(shape.content)]
        message: dict[str, Any] = {"role": shape.role, "content": content}
        if shape.reasoning:
            message["reasoning_content"] = f"fppo{number}thought"
        calls = [_marked_call(f"fppo{number}call{place}", *call) for place, call in enumerate(shape.calls)]
        names |= {
            ident: f"fppo{number}call{place}name" for place, (ident, _) in enumerate(shape.calls) if ident is not None
        }
        if calls:
            message["tool_calls"] = calls
        if shape.id is not None:
            message["tool_call_id"] = f"call{shape.id:05d}"
        if shape.name:
            message["name"] = names.get(shape.id if shape.id is not None else -1, f"fppo{number}name")
        result.append(message)
    return result


def _part(kind: str, mark: str) -> dict[str, str]:
    return {"type": "text", "text": mark if kind else ""} if kind in ("text", "") else {"type": kind}


def _marked_call(mark: str, ident: int | None, kind: str) -> dict[str, Any]:
    arguments: Any = {"dict": {f"{mark}key": f"{mark}value"}, "nothing": {}, "str": f"{mark}value"}.get(kind, 7)
    arguments = [f"{mark}value"] if kind == "list" else arguments
    own = {} if ident is None else {"id": f"call{ident:05d}"}  # nine letters, as some templates want them
    return {**own, "type": "function", "function": {"name": f"{mark}name", "arguments": arguments}}


@lru_cache(maxsize=_SHAPES)
def _form_of(template: Template, shapes: tuple[_Shape, ...], generation: bool) -> _Form:
    """The first dialect in which the template shows all of a conversation of these shapes, else the one with the fewest
    faults. A template that refuses the marks in every dialect may still accept real texts: then there are no known
    faults."""
    marked, best = _marked(shapes), None
    for dialect in _dialects(shapes):
        try:
            problems, forgotten = _judged(template, dialect, marked, generation)
        except EndlessTemplate:
            raise
        except Exception:  # templates raise what they like
            continue
        if best is None or len(problems) < len(best.problems):
            best = _Form(dialect, tuple(problems), frozenset(forgotten))
        if not problems:
            break
    return best or _Form(_Dialect(), (), frozenset())


def _dialects(shapes: Sequence[_Shape]) -> list[_Dialect]:
    """All dialects in which a conversation of these shapes is written differently, the most usual first."""
    calls = [shape.calls for shape in shapes if shape.calls]
    texts, single = any(shape.content is True for shape in shapes), all(len(x) == 1 for x in calls)
    choices = {
        "in_parts": (False, True) if texts else (False,),
        "as_text": (False, True) if any(kind != "str" for each in calls for _, kind in each) else (False,),
        "reasoning": REASONING if any(shape.reasoning for shape in shapes) else REASONING[:1],
        "aliases": (False, True) if any(shape.role in ALIASES for shape in shapes) else (False,),
        "calls": CALLS if calls and single else CALLS[:1],
    }
    usual = [values[0] for values in choices.values()]
    every = sorted(product(*choices.values()), key=lambda x: sum(a != b for a, b in zip(x, usual, strict=True)))
    return [_Dialect(**dict(zip(choices, each, strict=True))) for each in every]


def _judged(
    template: Template, dialect: _Dialect, marked: Sequence[Mapping[str, Any]], generation: bool
) -> tuple[list[str], list[tuple[int, str]]]:
    """Render a marked conversation in a dialect; returns the template's faults, and the fields of earlier turns that it
    may leave out, each (message, field)."""
    text = template.write_marks(dialect.convert(marked), generation=generation).casefold()
    problems: list[str] = []
    if dialect.in_parts and "{'type'" in text:
        problems.append("writes lists of parts as Python does")
    forgotten: list[tuple[int, str]] = []
    for number, message in enumerate(marked):
        where = f"of message {number}, of the role {message['role']!r}"
        for field, mark, most in _marks(message):
            count = text.count(mark)
            if count == 0 and _forgets(template, dialect, marked[: number + 1], field, mark, len(marked)):
                forgotten.append((number, field))
            elif not 0 < count <= most:
                problems.append(f"{'writes twice' if count else 'does not show'} the {field} {where}")
        for call in message.get("tool_calls", ()):
            if _is_no_json(text, call["function"]["arguments"]):
                problems.append(f"writes the arguments of calls otherwise than as JSON, those {where}")
    if template.tools and not _has_tool(text) and _shows_tools(template, dialect):
        problems.append("does not show the tools")
    return problems, forgotten


def _has_tool(text: str) -> bool:
    return TOOL["function"]["name"] in text


def _shows_tools(template: Template, dialect: _Dialect) -> bool:
    """Whether a template writes tools in a plain conversation. One that does not may describe them in its own words."""
    said = [{"role": role, "content": "x"} for role in ("system", "user")]
    for messages in (said, said[1:]):
        with contextlib.suppress(Exception):  # the template may refuse a role
            if _has_tool(template.write_marks(dialect.convert(messages), generation=True).casefold()):
                return True
    return False


def _marks(message: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield each mark of a message as (field, mark, how often the mark may occur in the rendered text)."""
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    yield from (("content", text, 1) for text in texts if text)
    if "reasoning_content" in message:
        yield "reasoning", message["reasoning_content"], 1
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield "tool_calls", function["name"], float("inf")  # a tool's message may repeat it
        yield from (("tool_calls", mark, 1) for mark in _strings(function["arguments"]))


def _strings(value: Any) -> Iterator[str]:
    """Yield every text in a value, at any depth, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        yield from (text for each in value.values() for text in _strings(each))
    elif isinstance(value, list):
        yield from (text for each in value for text in _strings(each))


def _is_no_json(text: str, arguments: Any) -> bool:
    """Whether a text holds marked arguments in a form other than plain JSON: as Python writes them, or as JSON in
    JSON."""
    return isinstance(arguments, dict) and any(f"'{key}'" in text or f'\\"{key}' in text for key in arguments)


def _forgets(
    template: Template, dialect: _Dialect, turns: Sequence[Mapping[str, Any]], field: str, mark: str, count: int
) -> bool:
    """Whether a mark that is missing from a conversation of `count` messages is a thought, in the last of `turns`, that
    the template shows if the conversation ends there. Some templates treat content next to a call as a thought."""
    message = turns[-1]
    thought = field == "reasoning" or (
        field == "content" and ("tool_calls" in message or "reasoning_content" in message)
    )
    if message["role"] != "assistant" or not thought or len(turns) == count:
        return False
    with_call = {**message, "content": "", "tool_calls": [_marked_call("fppocall", None, "dict")]}
    ends = [turns, *([[*turns[:-1], with_call]] if field == "reasoning" else [])]  # some show only those of a call
    return any(template.write_marks(dialect.convert(end), generation=False).casefold().count(mark) == 1 for end in ends)


def _missing(messages: Sequence[Mapping[str, Any]], text: str, forgotten: frozenset[tuple[int, str]]) -> Iterator[str]:
    """Name the message fields of which words are missing in the rendered text. Marks do not reveal a template that
    decides by the words of a text."""
    words, last = _Words(text), len(messages) - 1
    for number, message in enumerate(messages):
        for field, said in _texts_by_field(message, earlier=number < last):
            if (number, field) not in forgotten and not words.hold(said):
                yield f"does not show all of the {field} of message {number}, of the role {message['role']!r}"
                break


def _texts_by_field(message: Mapping[str, Any], *, earlier: bool) -> Iterator[tuple[str, str]]:
    """The texts of a message by their fields, without the thoughts in an assistant's earlier content."""
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
    if earlier and message["role"] == "assistant":
        texts = [_THOUGHT.sub("", text) for text in texts]
    yield from (("content", text) for text in texts)
    yield "reasoning", message.get("reasoning_content", "")
    for call in message.get("tool_calls", ()):
        yield "tool_calls", call["function"]["name"]
        yield from (("tool_calls", text) for text in _strings(call["function"]["arguments"]))


class _Words:
    """A text and its words, to look up whether it contains others."""

    def __init__(self, text: str) -> None:
        self._text, self._folded, self._words = text, text.casefold(), frozenset[str]()

    def hold(self, field_text: str) -> bool:
        """Whether the text contains `field_text`: as it is, or all of its words, since templates trim, escape and
        change texts."""
        if field_text.strip() in self._text:
            return True
        if not self._words:
            self._words = frozenset(_WORD.findall(self._folded))
        left = {*_WORD.findall(_TAGS.sub(" ", field_text.casefold()))} - self._words
        return all(word in self._folded for word in left)


def _unread(template: Template, written: Sequence[dict[str, Any]], text: str, generation: bool) -> Iterator[str]:
    """Name the fields of the messages `written` whose removal does not change their rendered `text`."""
    for number, message in enumerate(written):
        known = {*_KNOWN, *REASONING, *CALLS, *(["name"] if message["role"] in _TOOLS else [])}
        for field in [name for name in message if name not in known]:
            without = [*written]
            without[number] = {name: x for name, x in message.items() if name != field}
            try:
                same = template.write(without, generation=generation) == text
            except EndlessTemplate:
                raise
            except Exception:  # the template requires the field
                same = False
            if same:
                yield f"does not read the field {field!r} of message {number}, of the role {message['role']!r}"
