"""OpenAI's Responses: a request as a chat's, and the answer to that chat as items and events."""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import attrs

from fppo.serve.protocol import (
    IGNORED,
    REFUSED,
    Message,
    Refused,
    Translated,
    chat_request,
    check_fields,
    check_names,
    content_of,
    flag,
    named_as,
    wrong,
)
from fppo.serve.refusal import Refusal
from fppo.serve.replies import message_of, usage_of
from fppo.serve.service import AnswerPart, WholeAnswer

_RENAMED = {"max_output_tokens": "max_tokens"}
_SAME = (
    *("model", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "stream", "user"),
    "parallel_tool_calls",
)
_OWN = (
    "input",
    "instructions",
    "previous_response_id",
    "tools",
    "tool_choice",
    "store",
    "include",
    "text",
    "reasoning",
)
_HARMLESS = (*IGNORED, "client_metadata", "prompt_cache_options")
_HELD = "the log-probs of answers are in their episode, at GET /e/NAME"
_NO: Refused = {
    **{name: REFUSED[name] for name in ("frequency_penalty", "presence_penalty", "logit_bias")},
    "background": ((False,), "answers come at once"),
    "conversation": ((), "give previous_response_id, or the items"),
    "max_tool_calls": ((), "the client calls all tools"),
    "prompt": ((), "give instructions and input"),
    "stream_options": (({}, {"include_obfuscation": False}), "leave it out"),
    "top_logprobs": ((0,), _HELD),
    "truncation": (("disabled",), "nothing is left out of a conversation"),
}
# parameters that are objects: the field that changes nothing here, what else they may be, and advice
_OBJECTS: Mapping[str, tuple[str, tuple[Any, ...], str]] = {
    "text": ("verbosity", ({}, {"format": {"type": "text"}}), "nothing constrains what is sampled"),
    "reasoning": ("summary", ({},), "give the chat template's argument when the server starts"),
}
_TEXTS = {"assistant": ("output_text", "input_text"), "user": ("input_text",)}
_OF_ITEM = ("type", "id", "status")  # fields that every item may have
_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("summary", "content", "encrypted_content"),
}
_OF_TOOL = ("name", "description", "parameters", "strict")
# parameters that a response repeats, with what they are if they are missing
_REPEATED: Mapping[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p")),
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


class StoredResponse:
    """The conversations that responses end, by the responses' names; beyond `most_bytes` of JSON, those that were used
    longest ago are forgotten."""

    def __init__(self, most_bytes: int = 64 << 20) -> None:
        self._most, self._bytes = most_bytes, 0
        self._held: OrderedDict[str, tuple[tuple[Message, ...], int]] = OrderedDict()

    def messages(self, name: str) -> tuple[Message, ...]:
        """The messages up to and including a response. Raises Refusal for one that is not held."""
        if name not in self._held:
            text = f"there is no response {name[:100]!r}: it was not stored, or is forgotten; give all items as input"
            raise wrong("previous_response_id", text, "previous_response_not_found")
        self._held.move_to_end(name)
        return self._held[name][0]

    def add(self, name: str, messages: Sequence[Message]) -> None:
        """Hold a conversation; messages are not changed later."""
        size = len(json.dumps(messages))
        self._held[name] = (tuple(messages), size)
        self._bytes += size
        while self._bytes > self._most:
            _, (_, dropped) = self._held.popitem(last=False)
            self._bytes -= dropped


class ResponseRequest(NamedTuple):
    """A request for a response, as a chat's. `messages` are those that a next response may follow, as a chat's client
    sends them; `stored` says whether one may."""

    translated: Translated
    messages: tuple[Message, ...]
    stored: bool


def response_request(body: Mapping[str, Any], stored: StoredResponse) -> ResponseRequest:
    """The request of POST /responses. Raises Refusal."""
    check_names(body, (*_SAME, *_OWN, *_RENAMED), ignored=_HARMLESS, refused=_NO)
    _check_objects(body)
    include = body.get("include") or []
    if not isinstance(include, list) or any(x != "reasoning.encrypted_content" for x in include):
        raise wrong("include", f"{json.dumps(include)[:100]} is not supported: {_HELD}", "unsupported_parameter")
    instructions, before = body.get("instructions"), body.get("previous_response_id")
    if not isinstance(instructions, str | None):
        raise wrong("instructions", "give a text")
    if not isinstance(before, str | None):
        raise wrong("previous_response_id", "give the id of a response")
    earlier = () if before is None else stored.messages(before)
    added = _messages(body.get("input"))
    system = [] if not instructions else [{"role": "system", "content": instructions}]
    chat = {name: body[name] for name in _SAME if name in body}
    chat |= {name: body.get(own) for own, name in _RENAMED.items()}
    chat |= {"tools": _tools(body.get("tools")), "tool_choice": _choice(body.get("tool_choice"))}
    chat["messages"] = [*system, *earlier, *(message for message, _ in added)]
    first = len(system) + len(earlier)
    names = {name: own for own, name in _RENAMED.items()} | {"messages": "input"}
    names |= {f"messages[{first + place}]": path for place, (_, path) in enumerate(added)}
    with named_as(names):
        asked = chat_request(chat)
    keep = flag(body, "store", True)
    return ResponseRequest(Translated(chat=asked, names=names), tuple(chat["messages"][len(system) :]), keep)


def _check_objects(body: Mapping[str, Any]) -> None:
    """Raise Refusal for parameters that ask for more than plain text, or for thoughts of another kind."""
    for name, (harmless, plain, advice) in _OBJECTS.items():
        value = body.get(name)
        if isinstance(value, dict):
            asked = {field: x for field, x in value.items() if field != harmless and x is not None}
            if asked in plain:
                continue
        if value is not None:
            raise wrong(name, f"{json.dumps(value)[:100]} is not supported: {advice}", "unsupported_parameter")


def _tools(value: Any) -> list[dict[str, Any]]:
    """Functions in the form of chats: all that a tool has beside its type is the function's."""
    if value is not None and not isinstance(value, list):
        raise wrong("tools", "give a list of tools")
    tools: list[dict[str, Any]] = []
    for place, tool in enumerate(value or []):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            kind = json.dumps(tool.get("type") if isinstance(tool, dict) else tool)[:100]
            text = f'{kind} is not supported: a tool is {{"type": "function", "name": ..., "parameters": ...}}'
            raise wrong(f"tools[{place}]", text)
        own = {name: x for name, x in tool.items() if name != "type" and x not in (None, False)}
        check_fields(own, _OF_TOOL, f"tools[{place}]")
        tools.append({"type": "function", "function": own})
    return tools


def _choice(value: Any) -> Any:
    """A choice of tools in the form of chats; what is no function is left to the chat's own check."""
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    return value


def _messages(value: Any) -> list[tuple[dict[str, Any], str]]:
    """The messages of an input, each with the path of its first item.

    Thoughts, a text and calls that follow one another are one message of the assistant's, as they were answered.
    """
    if isinstance(value, str):
        return [({"role": "user", "content": value}, "input")]
    if not isinstance(value, list) or not value:
        raise wrong("input", "give a text, or a list of at least one item")
    found: list[tuple[dict[str, Any], str]] = []
    for place, item in enumerate(value):
        path = f"input[{place}]"
        message = _message(item, path)
        last = found[-1][0] if found else {}
        if message["role"] == last.get("role") == "assistant" and _goes_on(last, message):
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            last |= message | ({"tool_calls": calls} if calls else {})
        else:
            found.append((message, path))
    return found


def _goes_on(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether an item belongs to the message before it: items of one answer are thoughts, a text and calls."""
    thoughts = last.keys() == {"role", "reasoning_content"}
    return "tool_calls" in message or (thoughts and "reasoning_content" not in message)


def _message(item: Any, path: str) -> dict[str, Any]:
    """The message of one item. Raises Refusal."""
    kind = item.get("type") or "message" if isinstance(item, dict) else item
    if not isinstance(kind, str) or kind not in _FIELDS:
        text = f"{json.dumps(kind)[:100]} is no item here; there are {', '.join(_FIELDS)}"
        raise wrong(f"{path}.type", text, "unsupported_parameter")
    check_fields(item, (*_OF_ITEM, *_FIELDS[kind]), path)
    if kind == "message":
        kinds = _TEXTS.get(str(item.get("role")), _TEXTS["user"])
        return {"role": item.get("role"), "content": content_of(item.get("content"), f"{path}.content", kinds)}
    if kind == "reasoning":
        if item.get("summary"):
            raise wrong(f"{path}.summary", "is not supported: thoughts are shown whole, in content")
        text = content_of(item.get("content") or "", f"{path}.content", ("reasoning_text",))
        return {"role": "assistant", "reasoning_content": text}
    needed = ("call_id", "name") if kind == "function_call" else ("call_id",)
    if bad := next((name for name in needed if not isinstance(item.get(name), str)), None):
        raise wrong(f"{path}.{bad}", "give a text")
    if kind == "function_call_output":
        output = content_of(item.get("output"), f"{path}.output", ("input_text",))
        return {"role": "tool", "tool_call_id": item["call_id"], "content": output}
    function = {"name": item["name"], "arguments": item.get("arguments")}
    return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}


@attrs.frozen(kw_only=True)
class ResponseForm:
    """The form of a response, whole or as events; `body` is that of the request, parts of which a response repeats."""

    id: str
    created: int  # seconds since 1970
    model: str
    body: Mapping[str, Any]
    done: ClassVar[str] = ""
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """The response, of a single answer."""
        (answer,) = answers
        status = _status(answer)
        used = usage_of(answers)
        return {
            **self._head(status),
            "output": self._items(answer),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            },
        }

    def first(self, prompts: Sequence[Sequence[int]], *, with_text: bool) -> Iterator[dict[str, Any]]:
        """The events with which a stream begins; `with_text` opens the item of a text."""
        del prompts
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._head("in_progress"))
        if with_text:
            yield from self._opened(0, self._text_item("", "in_progress"))

    def part(self, index: int, part: AnswerPart, *, with_text: bool) -> Iterator[dict[str, Any]]:
        """The event of a part's text, if it has any and it is sent as it is drawn."""
        del index
        if with_text and part.text:
            yield self._delta(0, self._text_item("", "in_progress"), part.text)

    def last(self, answer: WholeAnswer, *, text_sent: bool) -> Iterator[dict[str, Any]]:
        """The events of all items, without those that were sent before."""
        for place, item in enumerate(self._items(answer)):
            if not text_sent:
                yield from self._opened(place, item)
                if text := _text_of(item):
                    yield self._delta(place, item, text)
            yield from self._closed(place, item)

    def end(self, answers: Sequence[WholeAnswer]) -> Iterator[dict[str, Any]]:
        """The last event, with the whole response."""
        response = self.whole(answers)
        yield self._event(f"response.{response['status']}", response=response)

    def refused(self, error: Refusal) -> dict[str, Any]:
        """The last event of a stream that fails."""
        return self._event("error", message=error.message, code=error.code, param=error.param)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _head(self, status: str) -> dict[str, Any]:
        repeated = {name: self.body.get(name) for name in _REPEATED}
        own = {"id": self.id, "object": "response", "created_at": self.created, "model": self.model, "status": status}
        own |= {name: _REPEATED[name] if x is None else x for name, x in repeated.items()}
        return own | {"output": [], "error": None, "incomplete_details": None, "usage": None}

    def _text_item(self, text: str, status: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        own = {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "status": status}
        return {**own, "content": [part]}

    def _items(self, answer: WholeAnswer) -> list[dict[str, Any]]:
        """Thoughts, the text, and calls; a text without anything if there is nothing else."""
        message, status = message_of(answer), _status(answer)
        items: list[dict[str, Any]] = []
        if (thoughts := message.get("reasoning_content")) is not None:
            content = [{"type": "reasoning_text", "text": thoughts}]
            items.append({"id": f"rs_{self.id}", "type": "reasoning", "summary": [], "content": content})
        if message["content"] or not message.get("tool_calls"):
            items.append(self._text_item(message["content"], status))
        for place, call in enumerate(message.get("tool_calls", ())):
            own = {"id": f"fc_{self.id}_{place}", "type": "function_call", "status": status}
            items.append({**own, "call_id": call["id"], **call["function"]})
        return items

    def _opened(self, place: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events with which an item begins, without its text."""
        empty = {**item, **({"arguments": ""} if "arguments" in item else {"content": []})}
        empty |= {} if "status" not in item else {"status": "in_progress"}
        yield self._event("response.output_item.added", output_index=place, item=empty)
        if "content" in item:
            part = {**item["content"][0], "text": ""}
            yield self._event("response.content_part.added", **_place(place, item), part=part)

    def _delta(self, place: int, item: Mapping[str, Any], text: str) -> dict[str, Any]:
        more = {"logprobs": []} if item["type"] == "message" else {}
        return self._event(f"{_kind(item)}.delta", **_place(place, item), delta=text, **more)

    def _closed(self, place: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events with which an item ends."""
        where = _place(place, item)
        if "arguments" in item:
            yield self._event(f"{_kind(item)}.done", **where, name=item["name"], arguments=item["arguments"])
        else:
            more = {"logprobs": []} if item["type"] == "message" else {}
            yield self._event(f"{_kind(item)}.done", **where, text=_text_of(item), **more)
            yield self._event("response.content_part.done", **where, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=place, item=item)


def _status(answer: WholeAnswer) -> str:
    return "incomplete" if answer.finished.end == "length" else "completed"


def _kind(item: Mapping[str, Any]) -> str:
    """The name of the events of an item's text."""
    names = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
    return f"response.{names[item['type']]}"


def _place(place: int, item: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say of which item, and of which of its parts, an event is."""
    return {"output_index": place, "item_id": item["id"]} | ({"content_index": 0} if "content" in item else {})


def _text_of(item: Mapping[str, Any]) -> str:
    return item["arguments"] if "arguments" in item else item["content"][0]["text"]
