"""Anthropic's Messages: a request as a chat's, and the answer to that chat as blocks and events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from fppo.data.messages import arguments_of
from fppo.serve.protocol import (
    REFUSED,
    Refused,
    Translated,
    chat_request,
    check_fields,
    check_names,
    content_of,
    messages_body_of,
    named_as,
    wrong,
)
from fppo.serve.refusal import Refusal
from fppo.serve.replies import message_of
from fppo.serve.service import AnswerPart, WholeAnswer
from fppo.serve.texts import Texts

_NAMES = {"stop": "stop_sequences"}  # of parameters here, by those of chats
_SAME = ("model", "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop_token_ids", "seed", "stream")
_OWN = ("messages", "system", "tools", "tool_choice", "stop_sequences")
_HARMLESS = ("metadata", "service_tier", "cache_control")
_NO: Refused = {
    **{name: REFUSED[name] for name in ("frequency_penalty", "presence_penalty", "logit_bias")},
    "container": ((), "give tools of your own"),
    "context_management": (({}, {"edits": []}), "the client edits its history"),
    "mcp_servers": (([],), "give tools of your own"),
    "output_config": (({},), "there is no effort, and nothing constrains what is sampled"),
    "thinking": (({"type": "disabled"},), "give the chat template's argument when the server starts"),
}
_OF_TOOL = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_FIELDS = {
    "text": ("text", "citations"),
    "thinking": ("thinking", "signature"),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
_ROLES: Mapping[str, tuple[str, ...]] = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
}


def messages_request(body: Mapping[str, Any]) -> Translated:
    """The request of POST /messages as a chat's. Raises Refusal."""
    check_names(body, (*_SAME, *_OWN), ignored=_HARMLESS, refused=_NO)
    given, system = body.get("messages"), body.get("system")
    said = [({"role": "system", "content": content_of(system, "system")}, "system")] if system else []
    if not isinstance(given, list) or not given:
        raise wrong("messages", "give a list of at least one message")
    for place, message in enumerate(given):
        said += _messages(message, f"messages[{place}]")
    if said[-1][0]["role"] == "assistant":
        text = "the last one is the assistant's, and answers continue none; end with a user's"
        raise wrong("messages", text, "unsupported_parameter")
    choice = body.get("tool_choice")
    chat = {name: body[name] for name in _SAME if name in body}
    chat |= {"stop": body.get("stop_sequences"), "tools": _tools(body.get("tools")), "tool_choice": _choice(choice)}
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    chat["messages"] = [message for message, _ in said]
    paths = {f"messages[{place}]": path for place, (_, path) in enumerate(said)}
    names = {**_NAMES, **paths, "parallel_tool_calls": "tool_choice.disable_parallel_tool_use"}
    with named_as(names):
        return Translated(chat=chat_request(chat), names=_NAMES)


def _tools(value: Any) -> list[dict[str, Any]]:
    """Functions in the form of chats."""
    if value is not None and not isinstance(value, list):
        raise wrong("tools", "give a list of tools")
    tools: list[dict[str, Any]] = []
    for place, tool in enumerate(value or []):
        path = f"tools[{place}]"
        kind = tool.get("type") or "custom" if isinstance(tool, dict) else tool
        if kind != "custom" or not isinstance(tool.get("name"), str):
            text = f'{json.dumps(kind)[:100]} is not supported: a tool is {{"name": ..., "input_schema": ...}}'
            raise wrong(path, text)
        check_fields({name: x for name, x in tool.items() if x is not False}, _OF_TOOL, path)
        renamed = {"parameters" if name == "input_schema" else name: x for name, x in tool.items()}
        shown = ("name", "description", "parameters", "strict")
        own = {name: x for name, x in renamed.items() if name in shown and x not in (None, False)}
        tools.append({"type": "function", "function": own})
    return tools


def _choice(value: Any) -> Any:
    """A choice of tools in the form of chats."""
    kind = value.get("type") if isinstance(value, dict) else value
    if kind is None and not isinstance(value, dict):
        return None
    if kind == "tool" and isinstance(value.get("name"), str):
        return {"type": "function", "function": {"name": value["name"]}}
    if not isinstance(value, dict) or kind not in _CHOICES:
        text = 'give {"type": ...} with auto, any or none, or {"type": "tool", "name": ...}'
        raise wrong("tool_choice", f"{json.dumps(value)[:100]} is no choice here: {text}")
    return _CHOICES[kind]


def _messages(message: Any, path: str) -> list[tuple[dict[str, Any], str]]:
    """The messages of a chat that one message is, each with the path of its first block.

    Each result of a tool is a message of its own. What a user says between them is one, too.
    """
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{path}.role", f"{json.dumps(role)[:100]} is no role; there are {', '.join(_ROLES)}")
    check_fields(message, ("role", "content"), path)
    content = message.get("content")
    if isinstance(content, str):
        return [({"role": role, "content": content}, path)]
    if not isinstance(content, list) or not content:
        raise wrong(f"{path}.content", "give a text, or a list of at least one block")
    blocks = [(block, f"{path}.content[{place}]") for place, block in enumerate(content)]
    for block, where in blocks:
        _check_block(block, role, where)
    if role == "assistant":
        return [(_answer([block for block, _ in blocks]), path)]
    found: list[tuple[dict[str, Any], str]] = []
    for block, where in blocks:
        if block["type"] == "tool_result":
            text = content_of(block.get("content") or "", f"{where}.content")
            found.append(({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}, where))
        elif found and found[-1][0]["role"] == role:
            found[-1][0]["content"] += block["text"]
        else:
            found.append(({"role": role, "content": block["text"]}, where))
    return found


def _check_block(block: Any, role: str, path: str) -> None:
    """Raise Refusal for a block that is no block of this role, or whose fields are wrong."""
    kind = block.get("type") if isinstance(block, dict) else block
    if not isinstance(kind, str) or kind not in _ROLES[role]:
        text = f"{json.dumps(kind)[:100]} is no block of the {role}'s here; there are {', '.join(_ROLES[role])}"
        raise wrong(f"{path}.type", text, "unsupported_parameter")
    check_fields(block, ("type", "cache_control", *_FIELDS[kind]), path)
    needed = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("id", "name"), "tool_result": ("tool_use_id",)}
    if bad := next((name for name in needed[kind] if not isinstance(block.get(name), str)), None):
        raise wrong(f"{path}.{bad}", "give a text")


def _answer(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message of an assistant's blocks."""
    calls = [
        {
            "id": x["id"],
            "type": "function",
            "function": {"name": x["name"], "arguments": json.dumps(x.get("input", {}))},
        }
        for x in blocks
        if x["type"] == "tool_use"
    ]
    thoughts = [x["thinking"] for x in blocks if x["type"] == "thinking"]
    said = {"role": "assistant", "content": "".join(x["text"] for x in blocks if x["type"] == "text")}
    said |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    return said | ({"tool_calls": calls} if calls else {})


@attrs.frozen(kw_only=True)
class MessagesForm:
    """The form of an answer, whole or as events; `stops` are the texts by which its request would have it end."""

    id: str
    model: str
    texts: Texts
    stops: Sequence[str]
    done: ClassVar[str] = ""

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """The message, of a single answer."""
        (answer,) = answers
        used = {"input_tokens": len(answer.prompt), "output_tokens": len(answer.tokens)}
        return {**self._head(), "content": _blocks(answer), **self._ended(answer), "usage": used}

    def first(self, prompts: Sequence[Sequence[int]], *, with_text: bool) -> Iterator[dict[str, Any]]:
        """The events with which a stream begins; `with_text` opens the block of a text."""
        used = {"input_tokens": len(prompts[0]), "output_tokens": 0}
        ended = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": {**self._head(), "content": [], **ended, "usage": used}}
        if with_text:
            yield _opened(0, {"type": "text", "text": ""})

    def part(self, index: int, part: AnswerPart, *, with_text: bool) -> Iterator[dict[str, Any]]:
        """The event of a part's text, if it has any and it is sent as it is drawn."""
        del index
        if with_text and part.text:
            yield _delta(0, {"type": "text_delta", "text": part.text})

    def last(self, answer: WholeAnswer, *, text_sent: bool) -> Iterator[dict[str, Any]]:
        """The events of all blocks, without those that were sent before, and the reason for the end."""
        for place, block in enumerate(_blocks(answer)):
            if not text_sent:
                yield _opened(place, {**block, **_EMPTY[block["type"]]})
                yield from (_delta(place, delta) for delta in _deltas(block))
            yield {"type": "content_block_stop", "index": place}
        used = {"input_tokens": len(answer.prompt), "output_tokens": len(answer.tokens)}
        yield {"type": "message_delta", "delta": self._ended(answer), "usage": used}

    def end(self, answers: Sequence[WholeAnswer]) -> Iterator[dict[str, Any]]:
        """The last event."""
        del answers
        yield {"type": "message_stop"}

    def refused(self, error: Refusal) -> dict[str, Any]:
        """The last event of a stream that fails."""
        return messages_body_of(error)

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model}

    def _ended(self, answer: WholeAnswer) -> dict[str, Any]:
        """The reason for an answer's end, with the text of the request that ended it, if one did."""
        if answer.finished.end == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        text = self.texts.decoded(answer.tokens)
        found = [(place, stop) for stop in self.stops if (place := text.find(stop)) >= 0]
        if answer.turn.calls or not found:
            return {"stop_reason": "tool_use" if answer.turn.calls else "end_turn", "stop_sequence": None}
        return {"stop_reason": "stop_sequence", "stop_sequence": min(found)[1]}


_EMPTY: Mapping[str, Mapping[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


def _blocks(answer: WholeAnswer) -> list[dict[str, Any]]:
    """Thoughts, the text, and calls; a text without anything if there is nothing else."""
    message = message_of(answer)
    blocks: list[dict[str, Any]] = []
    if (thoughts := message.get("reasoning_content")) is not None:
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": ""})
    if message["content"] or not message.get("tool_calls"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        given = arguments_of(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def _deltas(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The content of a block, as it is sent after an empty one."""
    if block["type"] == "tool_use":
        yield {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
    elif text := block[block["type"]]:
        yield {"type": f"{block['type']}_delta", block["type"]: text}


def _opened(place: int, block: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": place, "content_block": block}


def _delta(place: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": place, "delta": delta}
