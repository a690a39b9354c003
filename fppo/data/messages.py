"""Chat messages and tool schemas from rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fppo._errors import json_of
from fppo.data.plain import BadField, TwiceError, missing_in, once, plain

_LOOKS = re.compile(r"""\s*[\[{][\s\S]*?['"]role['"]\s*:""")  # messages as JSON or as Python's repr
_WHERE = "ends with a message of the assistant, but a prompt ends where the policy is to answer; leave it out"


def from_text(text: str, name: str) -> list[Any] | None:
    """Parse the text of field `name` as JSON messages; None for other text.

    Raises BadField for text that looks like messages and is not JSON, such as Python's repr.
    """
    if not _LOOKS.match(text):
        return None
    try:
        value = json_of(text, pairs=once)
    except TwiceError as error:
        raise BadField(f"field {name!r}: {error}") from error
    except ValueError:
        if not re.match(r"\s*\[\s*\{", text):
            return None
        what = "text that looks like messages, but is not JSON"
    else:
        if isinstance(value, list) and value and all(isinstance(x, dict) and "role" in x for x in value):
            return value
        if not (isinstance(value, dict) and "role" in value and "content" in value):
            return None
        what = "one message, not a list of them"
    advice = f"write a list of messages as JSON (json.dumps), or '{{{name}}}' as the prompt, if this very text is one"
    raise BadField(f"field {name!r}: {what}; {advice}")


def messages_of(
    value: Sequence[Any], name: str, *, kinds: Sequence[str] = (), filled: bool = False
) -> list[dict[str, Any]]:
    """Check and normalise the messages of field `name`: contents are texts, with `kinds` also lists of parts.

    Null content next to tool calls becomes "", and parts that are all text one text. Nulls are left out of a message's
    own fields, with `filled` at any depth: Arrow fills them in for fields of other rows. Raises BadField for values
    that are no message, and for a conversation that ends with the assistant's.
    """
    if not value:
        raise BadField(f"field {name!r}: no messages")
    messages = [_message(message, number, name, kinds, filled) for number, message in enumerate(value)]
    if messages[-1]["role"] == "assistant":
        raise BadField(f"field {name!r}: {_WHERE} (as data.rows can, with a field for the true answer)")
    return messages


def _message(message: Any, number: int, name: str, kinds: Sequence[str], filled: bool) -> dict[str, Any]:
    where = f"field {name!r}: message {number}"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadField(f"{where} has no text as 'role' and 'content'")
    if (path := next(missing_in(message), None)) is not None:
        raise BadField(f"{where} has nan, or an infinite number, at {path}")
    try:
        own = plain({k: v for k, v in message.items() if v is not None})
    except ValueError as error:
        raise BadField(f"field {name!r}: {error}") from error
    own = without_nulls(own) if filled else own
    content = own.get("content")
    if content is None and (own.get("tool_calls") or own.get("function_call")):
        own["content"] = ""
    elif isinstance(content, list) and not kinds:
        own["content"] = _joined(content, where)
    elif isinstance(content, list):
        if not all(isinstance(part, Mapping) and _is_part(part, kinds) for part in content):
            raise BadField(f"{where} has a part that is neither {' nor '.join(kinds)} nor text")
    elif not isinstance(content, str):
        raise BadField(f"{where} has no text as 'role' and 'content'")
    return own


def _joined(parts: Sequence[Any], where: str) -> str:
    """The concatenated text of parts that are all text, as templates of models with images render them."""
    if not parts or not all(isinstance(part, Mapping) and _is_part(part, ()) for part in parts):
        kinds = sorted({str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__ for part in parts})
        raise BadField(f"{where} has parts of the kinds {kinds} as 'content': without images and videos give texts")
    return "".join(part["text"] for part in parts)


def _is_part(part: Mapping[str, Any], kinds: Sequence[str]) -> bool:
    return part.get("type") in kinds or (part.get("type") == "text" and isinstance(part.get("text"), str))


def without_nulls(value: Any) -> Any:
    """The value without null fields of objects, at any depth; elements of lists stay."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def tools_of(value: Any, name: str, *, filled: bool = False) -> list[dict[str, Any]] | None:
    """The tool schemas of field `name`, a list or its JSON text; None for null or an empty list. Raises BadField."""
    if isinstance(value, str):
        try:
            value = json_of(value, pairs=once) if value.strip() else None
        except ValueError as error:
            raise BadField(f"field {name!r}: not JSON: {error}") from error
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return None
    try:
        tools = [plain(json_of(tool, pairs=once) if isinstance(tool, str) else tool) for tool in value]
    except (TypeError, ValueError) as error:
        raise BadField(f"field {name!r}: not a list of tool schemas: {error}") from error
    if isinstance(value, Mapping) or not all(isinstance(tool, dict) for tool in tools):
        raise BadField(f"field {name!r}: not a list of tool schemas, which are objects")
    return without_nulls(tools) if filled else tools
