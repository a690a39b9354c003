"""How a tokenizer's chat template is called."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import attrs

from fppo._errors import printable

LONGEST = 20.0  # seconds that a template may compute for one conversation
_MARK = "fppomark"


@attrs.frozen(kw_only=True)
class ChatOptions:
    """What a chat template gets beside the messages: its own arguments, as enable_thinking, and schemas of tools.

    row_tools: rows may have tools of their own, in place of `tools`.
    """

    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    row_tools: bool = False


PLAIN = ChatOptions()


class EndlessTemplate(ValueError):
    """A chat template that does not come to its end."""


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Raises EndlessTemplate once the code inside has computed for `LONGEST` seconds of the process' own time. Only the
    main thread can be interrupted so: in others nothing is raised."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise EndlessTemplate(
            f"the chat template has not come to an end in {LONGEST:g} seconds of computing: it loops; give another one "
            "(data.chat_template)"
        )

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, generation: bool, options: ChatOptions = PLAIN
) -> str:
    """The conversation as text; with `generation` up to where the assistant speaks. Templates raise what they like."""
    with ending():
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in options.tools] or None,
            tokenize=False,
            add_generation_prompt=generation,
            **options.arguments,
        )


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, options: ChatOptions = PLAIN) -> list[int]:
    """The tokens of the conversation up to where the assistant speaks. Templates raise what they like."""
    with ending():
        return list(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in options.tools] or None,
                tokenize=True,
                return_dict=False,
                add_generation_prompt=True,
                **options.arguments,
            )
        )


def check_chat_template(tokenizer: Any, *, options: ChatOptions = PLAIN) -> None:
    """Raises ValueError if the tokenizer has no chat template, or one that does not read what `options` give it, or
    that ignores where the assistant is to speak."""
    template = getattr(tokenizer, "chat_template", None)
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if template is None:
        raise ValueError(
            f"the tokenizer {name} has no chat template; use a chat model, or a plain prompt template (chat = false)"
        )
    named = template.values() if isinstance(template, Mapping) else [template]
    if not all(isinstance(each, str) for each in named):
        raise ValueError(f"the chat template of {name} is no text: {printable(repr(template), 200)}")
    text = "\n".join(named)
    names = [*options.arguments, *(["tools"] if options.tools or options.row_tools else [])]
    unread = [argument for argument in names if not re.search(rf"\b{re.escape(argument)}\b", text)]
    if unread:
        raise ValueError(
            f"the chat template of {name} does not read {unread}; leave that out, or give another template"
        )
    if header := _missing_header(tokenizer, options):
        raise ValueError(
            f"the chat template of {name} ignores add_generation_prompt: it writes {header!r} before what an assistant "
            "says, and not where one is to speak, so that responses would begin elsewhere than in its training; give "
            "another template (the policy's: data.chat_template)"
        )


def _missing_header(tokenizer: Any, options: ChatOptions) -> str:
    """What a template writes before an assistant's words in a conversation, and never at the end of a prompt; "" if
    the prompt has it, or the template has none, or takes no such conversation."""
    user, assistant = {"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}
    try:
        whole = render_chat(tokenizer, [user, assistant], generation=False, options=options)
        bare, asked = (render_chat(tokenizer, [user], generation=x, options=options) for x in (False, True))
    except Exception:  # templates raise what they like, for conversations that they do not take
        return ""
    before, mark, _ = whole.rpartition(_MARK)
    if bare != asked or not mark or not before.startswith(asked):
        return ""
    return before[len(asked) :].strip()


def opening_of(tokenizer: Any, *, options: ChatOptions = PLAIN) -> str:
    """The first special token that the template writes before a user's words; "" for none. A text that begins with it
    has been through a template already."""
    try:
        text = render_chat(tokenizer, [{"role": "user", "content": _MARK}], generation=True, options=options)
    except Exception:  # what it does not take is refused where rows are read
        return ""
    before = text.partition(_MARK)[0].lstrip()
    names = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    return max((name for name in names if name and before.startswith(name)), key=len, default="")


def end_of_turn(tokenizer: Any, *, options: ChatOptions = PLAIN) -> int | None:
    """The token with which the chat template ends an assistant's turn; None if that is no token made for it."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
    try:
        text = render_chat(tokenizer, messages, generation=False, options=options)
    except EndlessTemplate:
        raise
    except Exception:  # a template that takes no turns of an assistant ends none
        return None
    _, mark, tail = text.rpartition(_MARK)
    ids = tokenizer.encode(tail.lstrip(), add_special_tokens=False) if mark else []
    return ids[0] if ids and ids[0] in {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids} else None
