"""Read calls of tools in a policy's turns: by the tokenizer's response template, or as its chat template writes them.

A tokenizer of transformers may have a parser of its model's turns, `response_template`. Without one the chat template
renders a call with a unique name. If that call is JSON between two texts, calls are read in this form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import attrs

from fppo.data.chat import PLAIN, ChatOptions, render_chat

_THOUGHT, _SAID = "fppothought", "fpposaid"
_NAME, _ARGUMENT, _VALUE = "fppo_name", "fppo_argument", "fppo_value"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "x",
        "parameters": {"type": "object", "properties": {_ARGUMENT: {"type": "string"}}, "required": [_ARGUMENT]},
    },
}
Tool = Mapping[str, Any]


class ToolCall(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str  # JSON


class ParsedTurn(NamedTuple):
    """A turn of the policy, in the parts of a message."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


class ReadTurn(Protocol):
    """A parser of a turn's `text`. `whole` also has the token that ended the turn, and `before` is the text that
    precedes it. A text without a call is returned as it is."""

    def __call__(self, text: str, whole: str, before: str, tools: Sequence[Tool]) -> ParsedTurn: ...


_SPOKEN = ("content", "reasoning_content", "thinking")


@attrs.frozen
class ResponseTemplate:
    """A parser of turns by the tokenizer's `response_template`, changed to keep all parts of a field that occurs
    several times."""

    tokenizer: Any

    @cached_property
    def _template(self) -> Mapping[str, Any]:
        """The template, changed so that text fields list all their parts; unchanged, it keeps the last part alone."""
        own = self.tokenizer.response_template
        fields, given = own["fields"], own.get("defaults", {})
        listed = {name: {**fields[name], "repeats": True} for name in _SPOKEN if name in fields and name not in given}
        return {**own, "fields": {**fields, **listed}}

    def __call__(self, text: str, whole: str, before: str, tools: Sequence[Tool]) -> ParsedTurn:
        """Parse a turn as `ReadTurn`; returns its text alone if the template fails on it or finds no calls."""
        try:
            shown = [dict(tool) for tool in tools]
            said = self.tokenizer.parse_response(whole, self._template, prefix=before, tools=shown)
            calls = tuple(_call_of(call) for call in said.get("tool_calls") or ())
        except Exception:  # the template's parsers raise what they like on turns of another form
            return ParsedTurn(text)
        if not calls:
            return ParsedTurn(text)
        content, *thoughts = (_together(said.get(name)) for name in _SPOKEN)
        return ParsedTurn(content or "", calls, next(filter(None, thoughts), None))


def _together(parts: Any) -> str | None:
    """The parts of a field as one text; None for a field that is missing."""
    return "\n".join(filter(None, parts)) if isinstance(parts, list) else parts


def _call_of(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = function.get("arguments", {})
    return ToolCall(str(function["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))


@attrs.frozen
class BetweenTexts:
    """A parser of calls that are JSON objects with a name and arguments, each between the texts `opening` and
    `closing`.

    An opening that ends in a bracket begins a list, in which further calls follow after commas.
    """

    opening: str
    closing: str
    arguments: str  # the key of the arguments

    def __call__(self, text: str, whole: str, before: str, tools: Sequence[Tool]) -> ParsedTurn:
        """Parse a turn as `ReadTurn`; its content is the text before, between and after the calls."""
        del whole, before, tools
        calls, parts, left = list[ToolCall](), list[str](), text
        while (found := self._next(left, listed=bool(calls) and self.opening.endswith("["))) is not None:
            said, call, left = found
            calls.append(call)
            parts.append(said)
            if not self.opening:  # there is nothing between calls
                break
        if not calls:
            return ParsedTurn(text)
        said = [parts[0].rstrip("\n"), *(part.strip("\n") for part in (*parts[1:], left))]
        return ParsedTurn("\n".join(part for part in said if part.strip()), tuple(calls))

    def _next(self, text: str, *, listed: bool) -> tuple[str, ToolCall, str] | None:
        """The text before the next call, that call, and the text after it; None if there is none. With `listed` the
        call may be the next one of an open list."""
        if listed and text.lstrip().startswith(","):
            said, opened, rest = "", ",", text.lstrip()[1:]
        else:
            said, opened, rest = text.partition(self.opening) if self.opening else ("", "{", text)
        if not opened:
            return None
        rest = rest.lstrip()
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or self.arguments not in value:
            return None
        arguments = value[self.arguments]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return said, ToolCall(value["name"], written), rest[end:].lstrip().removeprefix(self.closing)


def reader_of(tokenizer: Any, options: ChatOptions = PLAIN) -> ReadTurn | None:
    """The parser of turns with calls; None for a chat template whose calls cannot be read."""
    if getattr(tokenizer, "response_template", None) is not None:
        return ResponseTemplate(tokenizer)
    return _between(tokenizer, options)


def _between(tokenizer: Any, options: ChatOptions) -> BetweenTexts | None:
    """Find the texts around a call as the chat template writes it."""
    shown = attrs.evolve(options, tools=[_TOOL])
    turns = [_turn_of(tokenizer, shown, {_ARGUMENT: _VALUE}, content) for content in (_SAID, "")]
    behind = [turn[1].rpartition(_SAID)[2] for turn in turns if turn is not None]  # the text after the content
    whole = next((text for text in behind if _NAME in text), "")
    place = whole.rfind(_NAME)
    start = whole.rfind("{", 0, place)
    if place < 0 or start < 0:
        return None
    try:
        value, size = json.JSONDecoder().raw_decode(whole[start:])
    except ValueError:
        return None
    if not isinstance(value, dict) or value.get("name") != _NAME:
        return None
    key = next((name for name, each in value.items() if each == {_ARGUMENT: _VALUE}), None)
    return None if key is None else BetweenTexts(whole[:start].strip(), _closing(tokenizer, whole[start + size :]), key)


@attrs.frozen
class CallForm:
    """The text of a turn that is a call: what the chat template writes before the function's name (`opening`), and
    after it for arguments of several kinds (`endings`). `before` is the prompt before the turn."""

    before: str
    opening: str
    endings: tuple[str, ...]

    def texts(self, functions: Sequence[str]) -> list[str]:
        """Turns that are calls of these functions. The policy has no choice in their common beginning."""
        endings = self.endings if len(functions) == 1 else self.endings[:1]
        return [f"{self.opening}{name}{ending}" for name in functions for ending in endings]


def form_of(tokenizer: Any, reader: ReadTurn, options: ChatOptions = PLAIN) -> CallForm | None:
    """The form of calls, where the chat template writes the function's name before its arguments, and the parser reads
    the call back; None otherwise.

    The form begins where the template's prompt ends. If the prompt has opened a thought, the form closes the thought.
    """
    shown, arguments = attrs.evolve(options, tools=[_TOOL]), ({_ARGUMENT: _VALUE}, {_VALUE: 7}, {})
    turns = [turn for each in arguments if (turn := _turn_of(tokenizer, shown, each)) is not None]
    parts = [said.partition(_NAME) for _, said in turns if _NAME in said]
    openings = {opening for opening, _, _ in parts}
    if len(parts) != len(arguments) or len(openings) != 1:
        return None
    before, said = turns[0]
    read = reader(said, said, before, [_TOOL]).calls
    if not read or read[0].name != _NAME:
        return None
    return CallForm(before, openings.pop(), tuple(ending for _, _, ending in parts))


def _turn_of(
    tokenizer: Any, options: ChatOptions, arguments: Mapping[str, Any], content: str = ""
) -> tuple[str, str] | None:
    """A prompt, and the text of a turn after it that calls a function; None if the template writes no such turn after a
    prompt."""
    asked = [{"role": "user", "content": "x"}]
    call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    said = {"role": "assistant", "content": content, "tool_calls": [call]}
    try:
        before = render_chat(tokenizer, asked, generation=True, options=options)
        whole = render_chat(tokenizer, [*asked, said], generation=False, options=options)
        if whole.startswith(before):
            return before, whole[len(before) :]
        if whole.startswith(before.rstrip()):
            return before, whole[len(before.rstrip()) :].lstrip()
        said["reasoning_content"] = _THOUGHT
        whole = render_chat(tokenizer, [*asked, said], generation=False, options=options)
    except Exception:  # templates raise what they like
        return None
    opened, thought, rest = whole.partition(_THOUGHT)
    return (before, rest) if thought and opened.rstrip() == before.rstrip() else None


def _closing(tokenizer: Any, text: str) -> str:
    """The text that closes a call: up to the special token that ends the turn."""
    special = [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]
    ends = [place for token in special if token and (place := text.find(token)) >= 0]
    first = text[: min(ends, default=len(text))].strip()
    # an added token may be what closes a call itself, as </tool_call> is
    return first or next((token for token in special if token and text.lstrip().startswith(token)), "")
