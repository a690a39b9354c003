"""Messages in one form, whatever names their fields have elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fppo._errors import json_of

Message = Mapping[str, Any]
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of the field of an assistant's thoughts
CALLS = ("tool_calls", "function_call")
ALIASES = {"developer": "system", "function": "tool"}  # roles by the names that most templates know
INSTEAD = (*CALLS, *REASONING, "refusal")  # fields that an assistant's message may have in place of content
MARKS = {"image": "<image>", "video": "<video>"}  # placeholder of a prompt's next image or video in its text


class BadMessage(ValueError):
    """The fault of a field of a message."""

    def __init__(self, field: str, fault: str) -> None:
        super().__init__(f"{field}: {fault}")
        self.field, self.fault = field, fault


def canonical(message: Message) -> dict[str, Any]:
    """Convert a message to OpenAI's form: thoughts become reasoning_content, a refusal becomes content, and calls
    become tool_calls, whose arguments are parsed if they are JSON.

    Fields without a value are left out; unknown ones stay. Raises BadMessage for fields that contradict each other, and
    for malformed thoughts or calls.
    """
    own = {name: x for name, x in message.items() if name == "role" or x not in (None, "", [], {})}
    thoughts = {name: own.pop(name) for name in REASONING if name in own}
    if bad := next((name for name, x in thoughts.items() if not isinstance(x, str)), None):
        raise BadMessage(bad, f"a {type(thoughts[bad]).__name__}, not text")
    if len({*thoughts.values()}) > 1:
        first, second, *_ = thoughts
        raise BadMessage(second, f"says otherwise than {first}, which is another name of the same")
    refusal = own.pop("refusal", None)
    if refusal is not None and (not isinstance(refusal, str) or "content" in own):
        raise BadMessage("refusal", "it is text, in the place of a content; leave one out")
    if all(name in own for name in CALLS):
        raise BadMessage("function_call", "another name of tool_calls, which are there too; leave one out")
    older = own.pop("function_call", None)
    calls = own.pop("tool_calls", None) if older is None else [older]
    whole = {"role": own.pop("role"), "content": own.pop("content", refusal or "")}
    if thoughts:
        whole["reasoning_content"] = next(iter(thoughts.values()))
    return whole | ({} if calls is None else {"tool_calls": _calls(calls)}) | own


def _calls(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple):
        raise BadMessage("tool_calls", f"a {type(value).__name__}, not a list of calls")
    return [_call(call, f"tool_calls[{place}]") for place, call in enumerate(value)]


def _call(call: Any, name: str) -> dict[str, Any]:
    """Convert a call: an object with a function or, as some models write it, that function itself."""
    whole = {key: x for key, x in call.items() if x is not None} if isinstance(call, Mapping) else {}
    kind, number = whole.pop("type", "function"), whole.pop("id", None)
    whole.pop("index", None)
    function = whole.pop("function", None)
    if function is None:
        function, whole = whole, {}
    if kind != "function" or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadMessage(name, "a call is an object with a function, which has a name and arguments")
    own = {key: x for key, x in function.items() if x is not None}
    if unknown := sorted([*whole, *(key for key in own if key not in ("name", "arguments"))]):
        raise BadMessage(name, f"the fields {unknown} are none of a call; leave them out")
    beside = {} if number is None else {"id": number}
    written = {"name": own["name"], "arguments": arguments_of(own.get("arguments", {}))}
    return {**beside, "type": "function", "function": written}


def arguments_of(value: Any) -> Any:
    """Parse the arguments of a call if they are JSON text ({} if blank); return other text, and other values, as they
    are."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return {}
    try:
        return json_of(value)
    except ValueError:
        return value


def arguments_text(value: Any) -> str:
    """The arguments of a call as JSON text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def named_tools(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Add to each tool's message the name of the tool that was called, which some templates write."""
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    names = {call["id"]: call["function"]["name"] for call in calls if "id" in call and "function" in call}
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] in ("tool", "function") and not message.get("name") and message.get("tool_call_id") in names
        else dict(message)
        for message in messages
    ]


def text_of(message: Message) -> str:
    """The whole of a message as text: its reasoning, content and calls, if it has them."""
    whole = canonical(message)
    content = whole["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] if part["type"] == "text" else MARKS[part["type"]] for part in content)
    functions = [call["function"] for call in whole.get("tool_calls", ())]
    calls = [f"{x['name']}({arguments_text(x['arguments'])})" for x in functions]
    return "\n".join(x for x in (whole.get("reasoning_content", ""), content, *calls) if x)
