"""Calls and checks of a tokenizer's chat template."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import attrs

from fppo._errors import printable
from fppo.data.render import TOOL, EndlessTemplate, Rendered, Template, render
from fppo.data.tokenizers import encode_after

LONGEST = 20.0  # CPU seconds that a template may take for one conversation
_MARK = "fppomark"


@attrs.frozen(kw_only=True)
class ChatOptions:
    """Arguments of a chat template besides the messages: its own, such as enable_thinking, and tool schemas.

    row_tools: rows may bring tools that replace `tools`.
    """

    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    row_tools: bool = False


PLAIN = ChatOptions()


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Raise EndlessTemplate once the block has used `LONGEST` seconds of the process's CPU time. Only the main thread
    can be interrupted by a signal: in others nothing is raised."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise EndlessTemplate(
            f"the chat template has not finished in {LONGEST:g} CPU seconds: it loops; give another one "
            "(data.chat_template)"
        )

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def write_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, generation: bool, options: ChatOptions = PLAIN
) -> str:
    """Render messages as they are, without checking what the template leaves out of them: to probe the template.
    Templates raise any exception."""
    with ending():
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in options.tools] or None,
            tokenize=False,
            add_generation_prompt=generation,
            **options.arguments,
        )


def shown_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    generation: bool,
    options: ChatOptions = PLAIN,
    sampled: bool = False,
) -> Rendered:
    """A conversation in the form that the template reads, and its text; with `generation` up to the assistant's turn.
    With `sampled` the last message holds a policy's own words, of which the template may leave some out.

    Raises ValueError naming the messages and fields of which the template leaves something out, or writes it twice.
    Templates raise any exception.
    """
    template = getattr(tokenizer, "chat_template", None)
    text = template if isinstance(template, str) else json.dumps(template, default=repr)
    arguments = json.dumps(options.arguments, sort_keys=True, default=repr)
    tool = TOOL if any("function" in tool for tool in options.tools) else TOOL["function"]
    marks = attrs.evolve(options, tools=[tool] if options.tools else ())
    known = Template(
        key=(type(tokenizer).__name__, text, arguments, tool is TOOL),
        tools=bool(options.tools),
        write=partial(write_chat, tokenizer, options=options),
        write_marks=partial(write_chat, tokenizer, options=marks),
    )
    return render(known, messages, generation=generation, sampled=sampled)


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, generation: bool, options: ChatOptions = PLAIN
) -> str:
    """Render a conversation as text, with nothing left out or written twice: the text of `shown_chat`, with its
    arguments."""
    return shown_chat(tokenizer, messages, generation=generation, options=options).text


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    generation: bool = True,
    options: ChatOptions = PLAIN,
    sampled: bool = False,
) -> list[int]:
    """Encode a conversation, nothing left out or written twice, as the tokens of `shown_chat`'s text; same
    arguments."""
    text = shown_chat(tokenizer, messages, generation=generation, options=options, sampled=sampled).text
    return list(tokenizer.encode(text, add_special_tokens=False))


def check_chat_template(tokenizer: Any, *, options: ChatOptions = PLAIN, name: str = "") -> None:
    """Raise ValueError for a tokenizer without a chat template, or with one that ignores arguments of `options` or
    add_generation_prompt. The error calls the tokenizer by `name` or, without one, as it calls itself."""
    template = getattr(tokenizer, "chat_template", None)
    name = name or getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if template is None:
        raise ValueError(
            f"the tokenizer {name} has no chat template; use a chat model, or a plain prompt template (chat = false)"
        )
    named = template.values() if isinstance(template, Mapping) else [template]
    if not all(isinstance(each, str) for each in named):
        raise ValueError(f"the chat template of {name} is not text: {printable(repr(template), 200)}")
    text = "\n".join(named)
    names = [*options.arguments, *(["tools"] if options.tools or options.row_tools else [])]
    unread = [argument for argument in names if not re.search(rf"\b{re.escape(argument)}\b", text)]
    if unread:
        raise ValueError(
            f"the chat template of {name} does not read {unread}; leave them out, or give another template"
        )
    if header := _missing_header(tokenizer, options):
        raise ValueError(
            f"the chat template of {name} ignores add_generation_prompt: it writes {header!r} before an assistant's "
            "message, but not at the end of a prompt, so that responses would begin elsewhere than in its training; "
            "give another template (the policy's: data.chat_template)"
        )


def _missing_header(tokenizer: Any, options: ChatOptions) -> str:
    """The assistant's header if the template writes it within a conversation, but not at the end of a prompt; "" if
    prompts have it, if there is none, or if the template refuses such a conversation."""
    user, assistant = {"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}
    try:
        whole = render_chat(tokenizer, [user, assistant], generation=False, options=options)
        bare, asked = (render_chat(tokenizer, [user], generation=x, options=options) for x in (False, True))
    except Exception:  # templates raise any exception for conversations that they refuse
        return ""
    before, mark, _ = whole.rpartition(_MARK)
    if bare != asked or not mark or not before.startswith(asked):
        return ""
    return before[len(asked) :].strip()


def opening_of(tokenizer: Any, *, options: ChatOptions = PLAIN) -> str:
    """The first special token that the template writes before a user's message; "" for none. A text that begins with
    it has been rendered already."""
    try:
        text = render_chat(tokenizer, [{"role": "user", "content": _MARK}], generation=True, options=options)
    except Exception:  # conversations that it refuses are reported where rows are read
        return ""
    before = text.partition(_MARK)[0].lstrip()
    names = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    return max((name for name in names if name and before.startswith(name)), key=len, default="")


def end_of_turn(tokenizer: Any, *, options: ChatOptions = PLAIN) -> int | None:
    """The special or added token with which the chat template ends an assistant's turn; None for other endings."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
    try:
        text = render_chat(tokenizer, messages, generation=False, options=options)
    except EndlessTemplate:
        raise
    except Exception:  # a template that refuses assistant turns has no end of turn
        return None
    _, mark, tail = text.rpartition(_MARK)
    ids = encode_after(tokenizer, tail.lstrip(), _MARK) if mark else []
    return ids[0] if ids and ids[0] in {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids} else None
