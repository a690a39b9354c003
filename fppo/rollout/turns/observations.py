"""Tools' messages as tokens, to append to tokens that the policy sampled; the sampled tokens are never encoded anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import attrs

from fppo.data.chat import PLAIN, ChatOptions, EndlessTemplate, encode_chat, end_of_turn, render_chat, write_chat
from fppo.data.tokenizers import encode_after, within
from fppo.environments.protocol import Message, Reply

_MARK, _THOUGHT = "fppomark", "fppothought"
_ASKED = {"role": "user", "content": "x"}


class Encode(Protocol):
    """Protocol of encoders: the tokens of messages that follow a turn of the policy, given the turn's last token
    `end`."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], end: int) -> list[int]: ...


@attrs.frozen
class Within:
    """The encoder `encode`, without tokens from id `vocabulary` on, for which the model has no embeddings."""

    encode: Encode
    vocabulary: int

    def __call__(self, messages: Sequence[Mapping[str, Any]], end: int) -> list[int]:
        """Encode the messages, and keep the tokens that the model has."""
        return within(self.encode(messages, end), self.vocabulary)


@attrs.frozen
class PlainText:
    """An encoder of messages as their contents, one after the other, without special tokens."""

    tokenizer: Any

    def __call__(self, messages: Sequence[Mapping[str, Any]], end: int) -> list[int]:
        """The tokens of the messages' contents, as they follow the token `end`."""
        text = "".join(message["content"] for message in messages)
        return encode_after(self.tokenizer, text, self.tokenizer.decode([end]))


@attrs.frozen
class ChatTemplate:
    """An encoder of messages by the tokenizer's chat template: as the template renders them after an assistant's turn,
    up to where the assistant speaks again.

    The template renders a short conversation, an assistant's turn and then the messages; the observation is everything
    after the words of that turn. How the template renders the turn itself, or would render it at the end of a
    conversation, does not matter: the policy reads the tokens that it sampled. The observation begins after the token
    that ended the turn, or after the template's own end of a turn in its place. The function `chat_template` makes this
    encoder.
    """

    tokenizer: Any
    options: ChatOptions = PLAIN
    in_place: tuple[int, int] | None = (
        None  # a sampled end of turns, and the one that the template writes in earlier turns
    )
    behind_calls: bool = False  # the template takes a tool's messages only after a call

    def __call__(self, messages: Sequence[Mapping[str, Any]], end: int) -> list[int]:
        """The observation's tokens; none for no messages. Raises ValueError for messages that the template refuses."""
        if not messages:
            return []
        tail, stop = self.tail(messages), self.tokenizer.decode([end])
        if self._calls(messages):
            return self._behind_a_call(tail, end)
        space, match, rest = tail.partition(stop) if stop else ("", "", "")
        if match and not space.strip():
            return encode_after(self.tokenizer, rest, stop)
        ids = self.encoded(tail)
        first = self._first_special(ids)
        if first is not None and (end, ids[first]) == self.in_place and not self.tokenizer.decode(ids[:first]).strip():
            return ids[first + 1 :]
        return ids

    def tail(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render an assistant's turn and `messages`, and return the text after the turn's words. If a tool's messages
        may only follow a call, the turn is a call of a tool, and the text begins after a name in the call. A message of
        a tool may hold the tool's "name"."""
        said: dict[str, Any] = {"role": "assistant", "content": _MARK}
        if self._calls(messages):
            call = {"name": messages[0].get("name", "tool"), "arguments": {_MARK: 1}}
            said |= {"content": "", "tool_calls": [{"type": "function", "function": call}]}
        talk = [_ASKED, said, *messages]
        with _refusals_of(talk):
            whole = render_chat(self.tokenizer, talk, generation=True, options=self.options)
        if whole.count(_MARK) != 1:
            raise ValueError(f"the chat template does not show once what an assistant said: {whole!r}")
        return whole.partition(_MARK)[2]

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation up to where the policy speaks. Raises ValueError for one that the template
        refuses."""
        with _refusals_of(messages):
            return encode_chat(self.tokenizer, messages, options=self.options)

    def _calls(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        return self.behind_calls and messages[0]["role"] == "tool"

    def _behind_a_call(self, tail: str, end: int) -> list[int]:
        """The tokens of `tail` from the special token that ends the call, without any end tokens that the policy has
        sampled already; `end` is its last token."""
        ids = self.encoded(tail)
        first = self._first_special(ids)
        if first is None:
            raise ValueError("the chat template ends a call of a tool without a special token: give other roles")
        if end in ids[first : first + 2]:
            return ids[ids.index(end, first) + 1 :]
        return ids[first + (end in self.special()) :]

    def encoded(self, text: str) -> list[int]:
        """The tokens of a text that the template wrote after an assistant's words."""
        return encode_after(self.tokenizer, text, _MARK)

    def special(self) -> set[int]:
        """The ids of special and added tokens."""
        return {*self.tokenizer.get_added_vocab().values(), *self.tokenizer.all_special_ids}

    def _first_special(self, ids: Sequence[int]) -> int | None:
        special = self.special()
        return next((place for place, token in enumerate(ids) if token in special), None)


def chat_template(tokenizer: Any, *, roles: Sequence[str] = (), options: ChatOptions = PLAIN) -> ChatTemplate:
    """The tokenizer's chat template, for messages after a turn. Raises ValueError if it refuses messages of the user,
    or of `roles`, after an assistant's."""
    template = _in_place(ChatTemplate(tokenizer, options))
    for role in ("user", *roles):
        message = {"role": role, "content": "x"}
        try:
            template.tail([message])
        except ValueError:
            if role != "tool" or template.behind_calls:
                raise
            changed = attrs.evolve(template, behind_calls=True)
            try:
                changed.tail([message])
            except ValueError:
                changed = None
            if changed is None:
                raise
            template = changed
    return template


def _in_place(template: ChatTemplate) -> ChatTemplate:
    """Set `in_place` if the template ends the last turn and earlier turns differently: gpt-oss samples <|return|>, and
    its template writes <|end|> in earlier turns."""
    last = end_of_turn(template.tokenizer, options=template.options)
    earlier = next(iter(template.encoded(template.tail([_ASKED]).lstrip())), None)
    if last is None or earlier not in template.special() or earlier == last:
        return template
    return attrs.evolve(template, in_place=(last, earlier))


def said_message(tokenizer: Any, reply: Reply, before: Sequence[int]) -> Message:
    """Make a message of `reply`, a turn after the tokens `before`: in parts, such as thoughts and calls of tools, if
    the tokenizer has a `response_template` that reads them, else with all of the text as content."""
    whole: Message = {"role": "assistant", "content": reply.text}
    if getattr(tokenizer, "response_template", None) is None:
        return whole
    text, prefix = (
        tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for ids in (reply.ids, before)
    )
    try:
        parts = {name: x for name, x in tokenizer.parse_response(text, prefix=prefix).items() if x}
    except Exception:  # the template's parsers raise what they like on turns of another form
        return whole
    return {"content": "", **parts, "role": "assistant"}


def forgets_thinking(tokenizer: Any, *, roles: Sequence[str] = (), options: ChatOptions = PLAIN) -> list[str]:
    """The roles, among the user and `roles`, whose messages make the chat template drop an assistant's earlier
    thoughts."""
    return [role for role in ("user", *roles) if _forgets(tokenizer, role, options)]


def _forgets(tokenizer: Any, role: str, options: ChatOptions) -> bool:
    """Whether an assistant's thought, in the content or in a field of its own, is dropped once a message of `role`
    follows."""
    after = {"role": role, "content": "x"}
    inside = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_MARK}"}
    beside = {"role": "assistant", "content": _MARK, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    for said in (inside, beside):
        try:
            ends = write_chat(tokenizer, [_ASKED, said], options=options, generation=False)
            goes_on = write_chat(tokenizer, [_ASKED, said, after], options=options, generation=True)
        except EndlessTemplate:
            raise
        except Exception:  # of a role, or a form of thoughts, that the template refuses
            continue
        if _MARK in goes_on and _THOUGHT not in goes_on and (said is inside or _THOUGHT in ends):
            return True
    return False


@contextmanager
def _refusals_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Turn a template's error into a ValueError that names the messages' roles."""
    try:
        yield
    except EndlessTemplate:
        raise
    except Exception as error:  # templates raise what they like
        roles = [message["role"] for message in messages]
        text = f"the chat template refuses messages of the roles {roles}: {error}"
        raise ValueError(text[:1000]) from error
