"""Fields of a row as an example: prompt, chat messages, ground truth, source, images, tools. No torch."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from fppo._errors import check_depth, json_of, listed, nearest, printable
from fppo.data.messages import INSTEAD, MARKS
from fppo.data.plain import BadField, TwiceError, encoded, half_pairs, missing_in, once, path_exists, plain
from fppo.data.problems import FieldError, Problems
from fppo.data.read import Row

ImitatedTurns = Literal["all", "last"]
MESSAGES = "prompt_messages"  # the key under which extras hold a prompt's chat messages


@attrs.frozen(kw_only=True)
class Fields:
    """The names of a row's fields by their role. Dots reach into fields: "reward_model.style", "messages.-1.content".

    prompt: a field, or a template like "Question: {question}".
    ground_truth: the field with the reference answer for rewards, any JSON value but null; None: no reference. If it is
        the field of the prompt's messages, these end with the answer, which is left out of the prompt.
    source: the field with the name of the row's data set; else `source_name`, else the file's name.
    chat: the prompt is the field's messages (also as JSON text), or its other text as one user message, for a chat
        template.
    images: the field with the prompt's image or images, none if it is null or missing. They replace the messages'
        parts {"type": "image"} or the marks "<image>" in texts; without either they precede the first user text.
    videos: likewise the field with its video or videos, parts {"type": "video"} and "<video>".
    tools: the field with the row's own tool schemas for the chat template, a list or its JSON text.
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
    def needed(self) -> dict[str, str | None]:
        """The fields that every row must have (None: none for this role), by the settings that name them."""
        return {"data.prompt": self.prompt, "data.ground_truth": self.ground_truth, "data.source": self.source}

    @property
    def seen(self) -> dict[str, str]:
        """The names of the fields with images and videos, by kind: "image", "video"."""
        fields = {"image": self.images, "video": self.videos}
        return {kind: name for kind, name in fields.items() if name is not None}


FIELDS = Fields()
_ALIKE = (  # names of fields that mean the same in published data sets
    ("prompt", "question", "problem", "query", "instruction", "input", "messages", "conversations", "conversation"),
    ("answer", "ground_truth", "solution", "target", "label", "expected_answer", "output", "response", "completion"),
)


@attrs.frozen(kw_only=True)
class Answers:
    """The fields of a row that are imitated: a response to its prompt, or, with `messages`, turns of a conversation."""

    response: str = "response"  # a field, or a template like "{reasoning} #### {answer}"
    messages: str | None = None
    turns: ImitatedTurns = "all"

    def needed(self, fields: Fields) -> dict[str, str | None]:
        """The fields that every row to imitate must have, by the settings that name them; prompt and source are those
        of `fields`."""
        source = {"data.source": fields.source}
        if self.messages is not None:
            return {"sft.messages": self.messages, **source}
        return {"data.prompt": fields.prompt, "sft.response": self.response, **source}


@attrs.frozen(kw_only=True)
class Example:
    """The values of a row by their role."""

    prompt: str | list[dict[str, Any]]
    ground_truth: Any
    source: str
    extras: dict[str, Any]
    left_out: tuple[str, ...]
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None  # the row's own


def example_of(row: Row, fields: Fields, problems: Problems) -> Example | None:
    """Read a row as an example; None for a faulty row, whose problems are noted."""
    values: dict[str, Any] = {}
    readers = {"prompt": _prompt, "ground_truth": _ground_truth, "source": _source, "tools": _tools}
    if (wrong := _unreadable(row)) is not None:
        problems.add(wrong, at=row.place)
        return None
    faults: dict[str, None] = {}  # the fault of a field that is read twice counts once
    for name, read in readers.items():
        try:
            values[name] = read(row, fields)
        except BadField as error:
            faults[str(error)] = None
    for fault in faults:
        problems.add(fault, at=row.place)
    if faults:
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
    """The fault of a row's values as a whole (nesting, broken characters); None without one."""
    for name, value in row.fields.items():
        try:
            check_depth(value)
        except ValueError as error:
            return f"field {name!r}: {error}"
    if (text := half_pairs(row.fields)) is not None:
        return f"{text[:40]!r} holds half of a surrogate pair, which is no character; repair the text"
    return None


def _prompt(row: Row, fields: Fields) -> str | list[dict[str, Any]]:
    if "{" in fields.prompt:
        text = fill(fields.prompt, row.fields, "data.prompt")
        return [{"role": "user", "content": text}] if fields.chat else text
    value, filled = lookup(row.fields, fields.prompt), row.filled
    if isinstance(value, str):
        if not value:
            raise BadField(f"field {fields.prompt!r}: empty")
        messages = from_text(value, fields.prompt)
        if messages is None:
            return [{"role": "user", "content": value}] if fields.chat else value
        value, filled = messages, False
    elif hasattr(value, "tolist"):  # a numpy array, as pandas has them
        value = value.tolist()
    if isinstance(value, (list, tuple)) and fields.chat:
        before = _parted(value, fields.prompt)[0] if fields.ground_truth == fields.prompt else value
        return messages_of(before, fields.prompt, kinds=tuple(fields.seen), filled=filled)
    hint = "; messages need the chat template (chat = true)" if isinstance(value, list) else ""
    raise BadField(f"field {fields.prompt!r}: {_kind(value)}, not text{hint}")


def _parted(messages: Sequence[Any], name: str) -> tuple[Sequence[Any], Any]:
    """Split off the assistant's last message: the messages before it, and its content. Raises BadField if the last
    message is another one."""
    *before, last = messages or [None]
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        text = "does not end with a message of the assistant, which would be the true answer"
        raise BadField(f"field {name!r}: {text} (it is data.prompt and data.ground_truth)")
    content = last.get("content")
    return before, _joined(content, f"field {name!r}: the last message") if isinstance(content, list) else content


def _ground_truth(row: Row, fields: Fields) -> Any:
    if fields.ground_truth is None:
        return None
    value = lookup(row.fields, fields.ground_truth)
    if fields.chat and fields.ground_truth == fields.prompt:
        plainly = value.tolist() if hasattr(value, "tolist") else value  # a numpy array, as pandas has them
        messages = from_text(plainly, fields.prompt) if isinstance(plainly, str) else plainly
        value = _parted(messages, fields.prompt)[1] if isinstance(messages, (list, tuple)) else value
    if value is None:
        raise BadField(f"field {fields.ground_truth!r}: null")
    if (path := next(missing_in(value), None)) is not None:
        text = f"nan or infinite{path and f' at {path}'}, a table's missing value: no answer equals it"
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
        raise BadField(f"field {fields.source!r}: {_kind(value)}, not the name of a source")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    name = type(value).__name__
    return "empty text" if value == "" else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def lookup(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field by its name, or by a dotted path into nested fields and, by numbers, into lists; -1 is the
    last element. Raises BadField for a missing one."""
    if name in fields:
        return fields[name]
    value: Any = fields
    for part in name.split("."):
        if isinstance(value, list | tuple) and re.fullmatch(r"-?\d{1,9}", part):
            place = int(part)
            if -len(value) <= place < len(value):
                value = value[place]
                continue
        if not isinstance(value, Mapping) or part not in value:
            raise BadField(f"field {name!r}: missing; the row has {listed(fields)}")
        value = value[part]
    return value


def check_fields(rows: Sequence[Row], named: Mapping[str, str | None], problems: Problems) -> None:
    """Raise FieldError, with the `problems` so far, for fields that no row has, those of templates included. `named`
    holds fields and templates by the settings that name them. A field that only some rows lack is a fault of these
    rows."""
    lines = []
    for setting, name in named.items():
        for field in [] if name is None else fields_in(name, setting):
            if rows and not any(_has(row, field) for row in rows):
                there = sorted(map(str, rows[0].fields))
                near = _nearest_field(field, rows[0].fields)
                hint = f"did you mean {near!r}? " if near else ""
                what = "that field" if field == name else f"the field {field!r}"
                names = printable(", ".join(map(repr, there)) or "none", 1000)
                lines.append(f"{setting} = {name!r}: no row has {what}; {hint}there are {names}")
    if lines:
        raise FieldError([*lines, *problems.lines(), *filter(None, [problems.unshown()])])


def fields_in(name: str, setting: str) -> list[str]:
    """The fields that a setting reads: the one called `name` or, if `name` is a template, those in it. Raises
    ValueError, with the name of the `setting`, for a faulty template."""
    return [field for _, field, _, _ in _pieces(name, setting) if field] if "{" in name else [name]


def _has(row: Row, name: str) -> bool:
    try:
        lookup(row.fields, name)
    except BadField:
        return False
    return True


def _nearest_field(name: str, fields: Mapping[str, Any]) -> str | None:
    """The field, or the field of a field, that is most like a name, else one that means the same; None without one."""
    known = {str(field).casefold(): str(field) for field in fields}
    for field, value in fields.items():
        inside = value if isinstance(value, Mapping) else {}
        known |= {f"{field}.{inner}".casefold(): f"{field}.{inner}" for inner in inside}
    last = {path.rpartition(".")[2]: full for path, full in reversed(known.items())}
    wanted = name.casefold()
    if near := nearest(wanted, known) or nearest(wanted, last):
        return known.get(near) or last[near]
    alike = next((names for names in _ALIKE if wanted.rpartition(".")[2] in names), ())
    return next((last[each] for each in alike if each in last), None)


def _pieces(template: str, setting: str) -> list[tuple[str, str | None, str | None, str | None]]:
    """The texts of a template and the fields between them. Raises ValueError for text that is no template."""
    try:
        return list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{setting} = {template!r} is not a template: {error}; write {{{{ for a brace") from error


def fill(template: str, fields: Mapping[str, Any], setting: str) -> str:
    """Replace each {field} of a template by its text; {{ and }} are braces. Raises BadField for a row whose field is
    missing or no text, and ValueError, which names the template's `setting`, for a template that is wrong."""
    texts = []
    for text, name, specification, conversion in _pieces(template, setting):
        texts.append(text)
        if name is None:
            continue
        if not name or specification or conversion:
            raise ValueError(f"{setting} = {template!r}: each {{}} holds the name of a field and nothing else")
        value = lookup(fields, name)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise BadField(f"field {name!r}: {_kind(value)}, not text")
        if next(missing_in(value), None) is not None:
            raise BadField(f"field {name!r}: {value}, a table's missing value")
        texts.append(str(value))
    return "".join(texts)


def _one_image(value: Any) -> bool:
    return not isinstance(value, (list, tuple))


def _one_video(value: Any) -> bool:
    """Whether a value is one video, not several: a list is one if it holds images, or arrays of single frames."""
    if not isinstance(value, (list, tuple)):
        return getattr(value, "ndim", 4) == 4
    return bool(value) and all(getattr(x, "ndim", 0) == 3 or hasattr(x, "convert") for x in value)


_ONE = {"image": _one_image, "video": _one_video}


def _seen(row: Row, name: str, kind: str) -> tuple[Any, ...]:
    """The row's images or videos (`kind`) in the field `name`, unopened; relative paths are resolved against the row's
    file. Empty if the field is null or missing."""
    try:
        value = lookup(row.fields, name)
    except BadField:
        return ()
    many = () if value is None else (value,) if _ONE[kind](value) else value
    beside = Path(row.file).parent if Path(row.file).is_file() else Path()
    return tuple(_placed(x, beside) for x in many)


def _placed(value: Any, directory: Path) -> Any:
    """The image or video with its relative paths resolved against `directory`; base64 stays as it is."""
    if isinstance(value, Mapping) and "frames" in value:
        return {**value, "frames": _placed(value["frames"], directory)}
    if isinstance(value, Mapping) and value.get("bytes") is None and isinstance(value.get("path"), str):
        value = value["path"]
    if isinstance(value, (list, tuple)):
        return [_placed(x, directory) for x in value]
    if not isinstance(value, str) or value[:5].lower() == "data:":
        return value
    place = directory / value
    return value if not path_exists(place) and encoded(value) is not None else str(place)


def _interleaved(messages: Any, media: Mapping[str, Sequence[Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The messages with contents as lists of parts, texts and {"type": "image"} or "video": one for each item of
    `media`, by kind. Errors call the fields by `names`."""
    parted = [{**message, "content": _parts(message["content"], tuple(media))} for message in messages]
    user = next((message for message in parted if message["role"] == "user"), parted[0])
    before: list[dict[str, Any]] = []
    for kind, items in media.items():
        places = sum(part["type"] == kind for message in parted for part in message["content"])
        if places == 0:
            before += [{"type": kind} for _ in items]
        elif places != len(items):
            text = f"{len(items)} {kind}s, and the prompt has {places} placeholders for them ({MARKS[kind]})"
            raise BadField(f"field {names[kind]!r}: {text}")
    user["content"] = [*before, *user["content"]]
    return parted


def _parts(content: Any, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Split a message's content into parts: texts, and {"type": kind} for each mark, as "<image>", of the `kinds`."""
    if not isinstance(content, str):
        return [
            x
            for part in content
            for x in (_parts(part["text"], kinds) if part["type"] == "text" else [{"type": part["type"]}])
        ]
    marks = {MARKS[kind]: kind for kind in kinds}
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", content)
    return [{"type": marks[x]} if x in marks else {"type": "text", "text": x} for x in pieces if x]


_LOOKS = re.compile(r"""\s*[\[{][\s\S]*?['"]role['"]\s*:""")  # messages as JSON or as Python's repr
_WHERE = "ends with a message of the assistant, but a prompt ends where the policy is to answer; leave it out, or"


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
    value: Sequence[Any], name: str, *, kinds: Sequence[str] = (), filled: bool = False, answered: bool = False
) -> list[dict[str, Any]]:
    """Check and normalise the messages of field `name`: contents are texts, with `kinds` also lists of parts.

    Null content next to calls, thoughts or a refusal becomes "", and parts that are all text one text. Nulls are left
    out of a message's own fields, with `filled` at any depth: Arrow fills them in for fields of other rows. Raises
    BadField for values that are no message, and for a conversation that ends with the assistant's message, or, if it
    must be `answered`, with another.
    """
    if not value:
        raise BadField(f"field {name!r}: no messages")
    messages = [_message(message, number, name, kinds, filled) for number, message in enumerate(value)]
    if answered and messages[-1]["role"] != "assistant":
        last = printable(messages[-1]["role"], 40)
        raise BadField(f"field {name!r}: ends with a message of the {last}, not of the assistant")
    if not answered and messages[-1]["role"] == "assistant":
        raise BadField(f"field {name!r}: {_WHERE} give the field as data.ground_truth too, if that is the true answer")
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
    if content is None and any(own.get(name) for name in INSTEAD):
        own["content"] = ""
    elif isinstance(content, list) and not kinds:
        own["content"] = _joined(content, where)
    elif isinstance(content, list):
        if not all(isinstance(part, Mapping) and _is_part(part, kinds) for part in content):
            raise BadField(f"{where} has a part that is neither {' nor '.join(kinds)} nor text")
    elif not isinstance(content, str):
        raise BadField(f"{where} has no text as 'role' and 'content'")
    return own


def _joined(parts: Sequence[Any], field: str) -> str:
    """The concatenated text of parts that are all text, as templates of models with images render them. Errors begin
    with `field`."""
    if not parts or not all(isinstance(part, Mapping) and _is_part(part, ()) for part in parts):
        kinds = sorted({str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__ for part in parts})
        raise BadField(f"{field} has parts of the kinds {kinds} as 'content': without images and videos give texts")
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
