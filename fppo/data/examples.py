"""What a row holds: the fields that make a prompt, what answers are compared with, its source. No torch."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fppo._errors import check_depth
from fppo.data.messages import from_text, messages_of, tools_of
from fppo.data.plain import BadField, half_pairs, missing_in, plain
from fppo.data.problems import Problems
from fppo.data.read import Row

MARKS = {"image": "<image>", "video": "<video>"}  # where a prompt's next image or video stands in its text
MESSAGES = "prompt_messages"  # the key under which extras hold a prompt's chat messages


@attrs.frozen(kw_only=True)
class Fields:
    """Which of a row's fields are what. A dot reaches into a field: "reward_model.style".

    prompt: a field, or a template like "Question: {question}".
    ground_truth: the field that a reward compares with, any JSON value but null; None: there is none.
    source: the field that names the row's data set; else `source_name`, else the file's name.
    chat: the prompt is the field's messages, also as JSON text, or its other text as one message of the user, for a
        chat template.
    images: the field with the prompt's image or images, none if it is null or missing. They stand where the messages
        have parts {"type": "image"}, or their texts "<image>"; without either, before the user's first words.
    videos: likewise the field with its video or videos, parts {"type": "video"} and "<video>".
    tools: the field with schemas of the row's own tools for the chat template, a list or JSON text of one.
    """

    prompt: str = "prompt"
    ground_truth: str | None = "answer"
    source: str | None = None
    source_name: str | None = None
    chat: bool = False
    images: str | None = None
    videos: str | None = None
    tools: str | None = None

    @property
    def seen(self) -> dict[str, str]:
        """The fields of what is seen, by its kind: "image", "video"."""
        fields = {"image": self.images, "video": self.videos}
        return {kind: name for kind, name in fields.items() if name is not None}


FIELDS = Fields()


@attrs.frozen(kw_only=True)
class Example:
    """What is in a row, by what it is for."""

    prompt: str | list[dict[str, Any]]
    ground_truth: Any
    source: str
    extras: dict[str, Any]
    left_out: tuple[str, ...]
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None  # the row's own


def example_of(row: Row, fields: Fields, problems: Problems) -> Example | None:
    """What a row holds; None, and its problems noted, if something is wrong with it."""
    values: dict[str, Any] = {}
    readers = {"prompt": _prompt, "ground_truth": _ground_truth, "source": _source, "tools": _tools}
    if (wrong := _unreadable(row)) is not None:
        problems.add(wrong, at=row.place)
        return None
    for name, read in readers.items():
        try:
            values[name] = read(row, fields)
        except BadField as error:
            problems.add(str(error), at=row.place)
    if len(values) < len(readers):
        return None
    seen = {kind: _seen(row, name, kind) for kind, name in fields.seen.items()}
    if seen:
        try:
            values["prompt"] = _interleaved(values["prompt"], seen, fields.seen)
        except BadField as error:
            problems.add(str(error), at=row.place)
            return None
    used = {fields.prompt, fields.ground_truth, fields.source, fields.tools, *fields.seen.values()}
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
    images, videos = seen.get("image", ()), seen.get("video", ())
    return Example(extras=extras, left_out=tuple(left_out), images=images, videos=videos, **values)


def _unreadable(row: Row) -> str | None:
    """What is wrong with a row before any of its fields is read; None if nothing is."""
    for name, value in row.fields.items():
        try:
            check_depth(value)
        except ValueError as error:
            return f"field {name!r}: {error}"
    if (text := half_pairs(row.fields)) is not None:
        return f"{text[:40]!r} holds half of a surrogate pair, which is no character; mend the text"
    return None


def _prompt(row: Row, fields: Fields) -> str | list[dict[str, Any]]:
    if "{" in fields.prompt:
        text = fill(fields.prompt, row.fields)
        return [{"role": "user", "content": text}] if fields.chat else text
    value, filled = lookup(row.fields, fields.prompt), row.filled
    if isinstance(value, str):
        if not value:
            raise BadField(f"field {fields.prompt!r}: empty")
        messages = from_text(value, fields.prompt)
        if messages is None:
            return [{"role": "user", "content": value}] if fields.chat else value
        value, filled = messages, False
    elif hasattr(value, "tolist"):  # numpy's, as pandas has them
        value = value.tolist()
    if isinstance(value, (list, tuple)) and fields.chat:
        return messages_of(value, fields.prompt, kinds=tuple(fields.seen), filled=filled)
    hint = "; messages need the chat template (chat = true)" if isinstance(value, list) else ""
    raise BadField(f"field {fields.prompt!r}: a {_kind(value)}, not text{hint}")


def _ground_truth(row: Row, fields: Fields) -> Any:
    if fields.ground_truth is None:
        return None
    value = lookup(row.fields, fields.ground_truth)
    if value is None:
        raise BadField(f"field {fields.ground_truth!r}: null")
    if (path := next(missing_in(value), None)) is not None:
        text = f"nan or infinite{path and f' at {path}'}, as tables write what is missing: no answer equals it"
        raise BadField(f"field {fields.ground_truth!r}: {text}")
    try:
        return plain(value)
    except ValueError as error:
        raise BadField(f"field {fields.ground_truth!r}: {error}") from error


def _tools(row: Row, fields: Fields) -> tuple[dict[str, Any], ...] | None:
    if fields.tools is None or fields.tools not in row.fields:
        return None
    tools = tools_of(row.fields[fields.tools], fields.tools, filled=row.filled)
    return None if tools is None else tuple(tools)


def _source(row: Row, fields: Fields) -> str:
    if fields.source is None:
        return row.source if fields.source_name is None else fields.source_name
    value = lookup(row.fields, fields.source)
    if not isinstance(value, str) or not value:
        raise BadField(f"field {fields.source!r}: a {_kind(value)}, not the name of a source")
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
            raise BadField(f"field {name!r}: missing; the row has {sorted(map(str, fields))}")
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
            raise BadField(f"field {name!r}: a {_kind(value)}, not text")
        if next(missing_in(value), None) is not None:
            raise BadField(f"field {name!r}: {value}, as tables write what is missing")
        texts.append(str(value))
    return "".join(texts)


def _one_image(value: Any) -> bool:
    return not isinstance(value, (list, tuple))


def _one_video(value: Any) -> bool:
    """Whether it is a video, and not several: a list is one if images are in it, or arrays of single frames."""
    if not isinstance(value, (list, tuple)):
        return getattr(value, "ndim", 4) == 4
    return bool(value) and all(getattr(x, "ndim", 0) == 3 or hasattr(x, "convert") for x in value)


_ONE = {"image": _one_image, "video": _one_video}


def _seen(row: Row, name: str, kind: str) -> tuple[Any, ...]:
    """The row's images, or its videos, as they stand in it; paths that are not absolute start where the row's file
    lies."""
    try:
        value = lookup(row.fields, name)
    except BadField:
        return ()
    many = () if value is None else (value,) if _ONE[kind](value) else value
    beside = Path(row.file).parent if Path(row.file).is_file() else Path()
    return tuple(_placed(x, beside) for x in many)


def _placed(value: Any, beside: Path) -> Any:
    """The image or video, its paths with the directory that they start from."""
    if isinstance(value, Mapping) and "frames" in value:
        return {**value, "frames": _placed(value["frames"], beside)}
    if isinstance(value, Mapping) and value.get("bytes") is None and isinstance(value.get("path"), str):
        value = value["path"]
    if isinstance(value, (list, tuple)):
        return [_placed(x, beside) for x in value]
    return str(beside / value) if isinstance(value, str) else value


def _interleaved(messages: Any, seen: Mapping[str, Sequence[Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The messages with contents as lists of texts and of parts of what is `seen`, as {"type": "image"}: one for each,
    by kinds, whose fields have `names`."""
    parted = [{**message, "content": _parts(message["content"], tuple(seen))} for message in messages]
    user = next((message for message in parted if message["role"] == "user"), parted[0])
    before: list[dict[str, Any]] = []
    for kind, items in seen.items():
        places = sum(part["type"] == kind for message in parted for part in message["content"])
        if places == 0:
            before += [{"type": kind} for _ in items]
        elif places != len(items):
            text = f"{len(items)} {kind}s, and the prompt has {places} places for them ({MARKS[kind]})"
            raise BadField(f"field {names[kind]!r}: {text}")
    user["content"] = [*before, *user["content"]]
    return parted


def _parts(content: Any, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """A message's content in parts, its text split where the marks of these kinds stand."""
    if not isinstance(content, str):
        return [
            x
            for part in content
            for x in (_parts(part["text"], kinds) if part["type"] == "text" else [{"type": part["type"]}])
        ]
    marks = {MARKS[kind]: kind for kind in kinds}
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", content)
    return [{"type": marks[x]} if x in marks else {"type": "text", "text": x} for x in pieces if x]
