"""Tools' messages as tokens that go behind what the policy sampled, which is never encoded anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from fppo.data.chat import PLAIN, ChatOptions, render_chat
from fppo.data.tokenizers import within

_MARK = "fppomark"
_DUMMY = ({"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK})


class Encode(Protocol):
    """The tokens of messages that follow a turn of the policy, whose last token is `end`."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], end: int) -> list[int]: ...


@attrs.frozen
class Within:
    """Messages as `encode` has them, without tokens from `vocabulary` on, which the model has no embedding for."""

    encode: Encode
    vocabulary: int

    def __call__(self, messages: Sequence[Mapping[str, Any]], end: int) -> list[int]:
        """The tokens that the model has."""
        return within(self.encode(messages, end), self.vocabulary)


@attrs.frozen
class PlainText:
    """Messages as their contents, one after the other, without special tokens."""

    tokenizer: Any

    def __call__(self, messages: Sequence[Mapping[str, Any]], end: int) -> list[int]:
        """The tokens of the text."""
        del end
        text = "".join(message["content"] for message in messages)
        return list(self.tokenizer.encode(text, add_special_tokens=False))


@attrs.frozen
class ChatTemplate:
    """Messages as the tokenizer's chat template puts them behind an assistant's turn, up to where it speaks again.

    What the template adds for them is the difference of two conversations, with and without them, after an assistant's
    turn that is the same in both; before it stands what ends that turn, unless the sampled stop token was that.
    `chat_template` makes it.
    """

    tokenizer: Any
    before: str  # the conversation without the messages
    tail: str  # what stands in it after the assistant's own words
    options: ChatOptions = PLAIN

    def __call__(self, messages: Sequence[Mapping[str, Any]], end: int) -> list[int]:
        """The tokens of the difference; none for no messages. Raises ValueError for messages that the template refuses,
        or behind which it changes what came before."""
        if not messages:
            return []
        whole = _render(self.tokenizer, [*_DUMMY, *messages], self.options, generation=True)
        if not whole.startswith(self.before):
            raise ValueError(
                "the chat template is not append-only: with messages behind it, an assistant's turn reads "
                f"{whole[: len(self.before)]!r} instead of {self.before!r}; use a template that leaves earlier turns "
                "as they are"
            )
        stop = self.tokenizer.decode([end])
        space, match, rest = self.tail.partition(stop) if stop else ("", "", "")
        tail = rest if match and not space.strip() else self.tail
        return list(self.tokenizer.encode(tail + whole[len(self.before) :], add_special_tokens=False))


def chat_template(tokenizer: Any, *, roles: Sequence[str] = (), options: ChatOptions = PLAIN) -> ChatTemplate:
    """The tokenizer's chat template, for messages behind a turn. Raises ValueError if it does not take them: those of
    an assistant, of the user, and of `roles`; or if it is not append-only."""
    before = _render(tokenizer, _DUMMY, options, generation=False)
    if _MARK not in before:
        raise ValueError(f"the chat template does not show what an assistant said: {before!r}")
    template = ChatTemplate(tokenizer, before, before.rpartition(_MARK)[2], options)
    end = tokenizer.eos_token_id
    for role in ("user", *roles):
        template([{"role": role, "content": "x"}], end)
    return template


def _render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: ChatOptions, *, generation: bool) -> str:
    try:
        return render_chat(tokenizer, messages, generation=generation, options=options)
    except Exception as error:  # templates raise what they like
        roles = [message["role"] for message in messages]
        raise ValueError(f"the chat template refuses messages of the roles {roles}: {error}") from error
