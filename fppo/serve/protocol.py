"""Requests of OpenAI's protocol as values, and its errors: what a body holds is checked here, before anything runs."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import attrs
from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fppo._errors import json_of, nearest
from fppo.data.messages import INSTEAD, BadMessage, canonical
from fppo.data.plain import half_pairs
from fppo.serve.refusal import Refusal

Message = dict[str, Any]  # {"role", "content", ...}, with contents as one text and arguments of calls as values
INVALID, _KINDS = "invalid_request_error", {401: "authentication_error", 429: "rate_limit_error"}
MOST_CHOICES, MOST_STOPS = 128, 16
MOST_TOP = 20  # likeliest tokens beside each drawn one
_MESSAGES_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_PARAMETER = re.compile(r"(^|; )(\w+)(\[\d+\])?(?=$|[:.])")  # at the beginning of an error
_SEEDS, _IDS = 1 << 63, 1 << 31
_CHOICES = ("auto", "none", "required")
_WRITABLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # names that every form of calls writes as they are
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# parameters that do not change what is sampled
IGNORED = (
    *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "extra_headers", "verbosity"),
)
# parameters that would change it, with their harmless values, and advice
Refused = Mapping[str, tuple[tuple[Any, ...], str]]
REFUSED: Refused = {
    "frequency_penalty": ((0,), "log-probs are those of the policy alone"),
    "presence_penalty": ((0,), "log-probs are those of the policy alone"),
    "repetition_penalty": ((1,), "log-probs are those of the policy alone"),
    "logit_bias": (({},), "log-probs are those of the policy alone"),
    "response_format": (({"type": "text"},), "nothing constrains what is sampled"),
    "reasoning_effort": ((), "give the chat template's argument when the server starts"),
    "function_call": (("none", "auto"), "give tool_choice"),
    "functions": (([],), "give tools"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "prediction": ((), "leave it out"),
    "web_search_options": ((), "give a tool of your own"),
    "best_of": ((1,), "give n, and choose"),
    "echo": ((False,), "the prompt is yours already"),
    "suffix": (("",), "text is only continued"),
    "prompt_logprobs": ((0, False), "leave it out"),
}


def body_of(error: Refusal) -> dict[str, Any]:
    """The JSON object of a refusal, in OpenAI's form."""
    kind = _KINDS.get(error.status, INVALID if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def messages_body_of(error: Refusal) -> dict[str, Any]:
    """The JSON object of a refusal, in the form of Anthropic's Messages; the message names the parameter."""
    kind = _MESSAGES_KINDS.get(error.status, INVALID if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


@contextlib.contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """A context in which refusals name parameters by the values of `names` instead of its keys."""

    def name(found: re.Match[str]) -> str:
        before, word, place = found.groups("")
        return before + (names.get(word + place) or names.get(word, word) + place)

    try:
        yield
    except Refusal as error:
        param = None if error.param is None else _PARAMETER.sub(name, error.param)
        text = _PARAMETER.sub(name, error.message)
        raise Refusal(text, status=error.status, param=param, code=error.code) from error


def wrong(param: str, message: str, code: str | None = None) -> Refusal:
    """The refusal of a parameter."""
    return Refusal(f"{param}: {message}", param=param, code=code)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


NonEmpty = Annotated[str, Field(min_length=1)]


class AnswerOptions(BaseModel):
    """The options of a request, for chats and for completions of text alike; None leaves a choice to the server."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=1e-6, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, lt=1)
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: Annotated[list[NonEmpty], BeforeValidator(_listed)] = Field([], max_length=MOST_STOPS)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    seed: int | None = Field(None, ge=-_SEEDS, lt=_SEEDS)
    stream: bool = False
    include_usage: bool = Field(False, validation_alias=AliasPath("stream_options", "include_usage"))
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)  # None: no log-probs; 0: those of the tokens alone
    return_token_ids: bool = False
    user: str | None = None

    @property
    def sampling(self) -> dict[str, float | None]:
        """The options of `Sampling`, by their names there."""
        return {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}


class ForcedCall(NamedTuple):
    """A call with which an answer must begin, of one of these functions; `named` if the client named a single one."""

    functions: tuple[str, ...]
    named: bool


@attrs.frozen(kw_only=True)
class ChatRequest:
    """A request for answers to a conversation; `forced` is a call of a tool with which they must begin."""

    options: AnswerOptions
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    forced: ForcedCall | None = None


@attrs.frozen(kw_only=True)
class Translated:
    """A request of another protocol as a chat's; `names` are that protocol's names of the chat's parameters."""

    chat: ChatRequest
    names: Mapping[str, str]


@attrs.frozen(kw_only=True)
class CompletionRequest:
    """A request for continuations of texts, or of ids."""

    options: AnswerOptions
    prompts: tuple[str | tuple[int, ...], ...]


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises Refusal for any other body."""
    try:
        text = body.decode()
        value = json_of(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is no JSON: {error}"[:500]) from error
    if not isinstance(value, dict):
        raise Refusal(f"the body is a JSON {type(value).__name__}, not an object")
    if "\\u" in text and half_pairs(value) is not None:  # nothing else than an escape can write one
        raise Refusal("the body holds half of a surrogate pair, which is no character")
    return value


def chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """The request of POST /chat/completions. Raises Refusal."""
    own = ("messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "top_logprobs")
    check_names(body, (*_COMMON, *own))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "give a list of at least one message")
    with_log_probs, top = flag(body, "logprobs", False), body.get("top_logprobs")
    top = 0 if with_log_probs and top is None else top
    options = _options({**body, "top_logprobs": top}, "top_logprobs")
    if not with_log_probs:
        if options.top_logprobs:
            raise wrong("top_logprobs", "give logprobs = true, too")
        options = options.model_copy(update={"top_logprobs": None})
    read = tuple(_message(message, f"messages[{place}]") for place, message in enumerate(messages))
    tools = _tools(body)
    shown = () if body.get("tool_choice") == "none" else tools
    if shown and not flag(body, "parallel_tool_calls", True):
        text = "false is not supported: an answer may hold several calls, and none is dropped; leave it out"
        raise wrong("parallel_tool_calls", text, "unsupported_parameter")
    return ChatRequest(options=options, messages=read, tools=shown, forced=_forced(body.get("tool_choice"), tools))


def completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """The request of POST /completions. Raises Refusal."""
    check_names(body, (*_COMMON, "prompt"))
    prompt = body.get("prompt")
    whole = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and _are_whole(prompt))
    prompts = [prompt] if whole else prompt
    if not isinstance(prompts, list) or not prompts:
        raise wrong("prompt", "give a text, a list of ids, or a list of either")
    if len(prompts) > MOST_CHOICES:
        raise wrong("prompt", f"{len(prompts)} prompts; give at most {MOST_CHOICES} at once")
    read = tuple(_prompt(each, f"prompt[{place}]") for place, each in enumerate(prompts))
    return CompletionRequest(options=_options({**body, "top_logprobs": body.get("logprobs")}, "logprobs"), prompts=read)


def _prompt(value: Any, name: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not _are_whole(value) or not 0 <= min(value) <= max(value) < _IDS:
        raise wrong(name, "give a text, or a list of ids, which are numbers from 0 on")
    return tuple(value)


def check_names(
    body: Mapping[str, Any], known: Sequence[str], *, ignored: Sequence[str] = IGNORED, refused: Refused = REFUSED
) -> None:
    """Raise Refusal for unknown parameters, and for those that are `refused` and would change the samples."""
    for name, value in body.items():
        if name in known or name in ignored or value is None:
            continue
        if name not in refused:
            near = nearest(name, (*known, *refused))
            hint = f"; did you mean {near!r}?" if near else ""
            raise wrong(name, f"there is no such parameter here{hint}", "unknown_parameter")
        harmless, advice = refused[name]
        if value not in harmless:
            raise wrong(name, f"{json.dumps(value)[:100]} is not supported: {advice}", "unsupported_parameter")


def _options(body: Mapping[str, Any], top: str) -> AnswerOptions:
    """The options of a body, whose "top_logprobs" the client calls `top`. Raises Refusal for all that is wrong."""
    given = {name: value for name, value in body.items() if value is not None}
    how = given.get("stream_options")
    if how is not None and not (given.get("stream") is True and isinstance(how, dict)):
        raise wrong("stream_options", "it is an object, and goes with stream = true")
    try:
        options = AnswerOptions.model_validate(given)
    except ValidationError as error:
        places = [(top if x["loc"][0] == "top_logprobs" else x["loc"][0], *x["loc"][1:]) for x in error.errors()]
        texts = [
            f"{path_of(place)}: {json.dumps(x['input'])[:100]} is not allowed: {x['msg'].lower()}"
            for place, x in zip(places, error.errors(), strict=True)
        ]
        raise Refusal("; ".join(texts)[:1000], param=str(places[0][0])) from error
    if options.stream and options.top_logprobs:
        raise wrong(top, "a stream has those of the answer's own tokens alone; give stream = false")
    return options


def check_fields(value: Mapping[str, Any], known: Sequence[str], path: str) -> None:
    """Raise Refusal for a field that is none of the `known` ones, in the object at `path`."""
    if unknown := next((name for name, x in value.items() if name not in known and x is not None), None):
        raise wrong(f"{path}.{unknown}", f"there is no such field here; there are {', '.join(known)}")


def path_of(place: Sequence[str | int]) -> str:
    """A place in a body, as pydantic says it, as a path: "a.b[0]"."""
    return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in place).lstrip(".")


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """A parameter that is true or false, or the default where it is missing or null. Raises Refusal."""
    value = default if body.get(name) is None else body[name]
    if not isinstance(value, bool):
        raise wrong(name, f"{json.dumps(value)[:100]} is not allowed: give true or false")
    return value


def _are_whole(values: Sequence[Any]) -> bool:
    """Whether values of JSON are all whole numbers, and not true or false."""
    return set(map(type, values)) <= {int}


_COMMON = (
    *("model", "temperature", "top_p", "top_k", "min_p", "max_tokens", "n", "stop", "stop_token_ids", "seed", "stream"),
    *("stream_options", "logprobs", "return_token_ids", "user"),
)


def _message(value: Any, name: str) -> Message:
    """A message with its contents as one text. Raises Refusal."""
    if not isinstance(value, dict):
        raise wrong(name, "a message is an object with role and content")
    role = value.get("role")
    if role not in _ROLES:
        raise wrong(f"{name}.role", f"{json.dumps(role)[:100]} is no role; there are {', '.join(_ROLES)}")
    beside = {key: x for key, x in value.items() if key not in ("role", "content") and x is not None}
    may_lack = role == "assistant" and any(beside.get(key) for key in INSTEAD)
    given = value.get("content")
    content = "" if given is None and may_lack else content_of(given, f"{name}.content")
    if bad := next((key for key in ("name", "tool_call_id") if not isinstance(beside.get(key, ""), str)), None):
        raise wrong(f"{name}.{bad}", "give a text")
    try:
        return canonical({"role": "system" if role == "developer" else role, "content": content, **beside})
    except BadMessage as error:
        raise wrong(f"{name}.{error.field}", error.fault) from error


def content_of(value: Any, name: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a content: a text, or a list of parts that are texts, of one of these `kinds`. Raises Refusal."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(name, "give a text, or a list of parts")
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            advice = f'give {{"type": "{kinds[0]}", "text": ...}}'
            raise wrong(f"{name}[{place}]", f"the part of type {json.dumps(kind)[:100]} is no text: {advice}")
    return "".join(part["text"] for part in value)


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise wrong("tools", "give a list of tools")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"tools[{place}]", 'a tool is {"type": "function", "function": {"name": ..., ...}}')
    return tuple(tools)


def _forced(choice: Any, tools: Sequence[Mapping[str, Any]]) -> ForcedCall | None:
    """The call that the parameter `tool_choice` forces; None if it is missing, "none" or "auto"."""
    if choice in (None, "none", "auto"):
        return None
    name = _name_of(choice)
    if choice != "required" and name is None:
        near = nearest(choice, _CHOICES) if isinstance(choice, str) else None
        hint = f"; did you mean {near!r}?" if near else ""
        text = 'give auto, none, required or {"type": "function", "function": {"name": ...}}'
        raise wrong("tool_choice", f"{json.dumps(choice)[:100]} is no choice here: {text}{hint}")
    names = tuple(dict.fromkeys(tool["function"]["name"] for tool in tools))
    if not names:
        raise wrong(
            "tool_choice", f"{json.dumps(choice)[:100]} forces a call, and there is nothing to call: give tools"
        )
    if name is not None and name not in names:
        near = nearest(name, names)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(names)}"[:200]
        raise wrong("tool_choice", f"there is no function {name[:100]!r} among the tools; {hint}")
    functions = names if name is None else (name,)
    if unfit := next((x for x in functions if not _WRITABLE.fullmatch(x)), None):
        text = "a function that is to be called has a name of at most 64 letters, digits, _, - and ."
        raise wrong("tools", f"{unfit[:100]!r}: {text}")
    return ForcedCall(functions, name is not None)


def _name_of(choice: Any) -> str | None:
    """The function that a choice names; None if it names none."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
