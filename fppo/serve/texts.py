"""Conversations as ids, and ids as text while they come: no sampled id is ever encoded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import attrs

from fppo.data import stop_texts
from fppo.data.chat import PLAIN, ChatOptions, check_chat_template, encode_chat, end_of_turn
from fppo.data.messages import named_tools
from fppo.data.stops import StopTexts, token_pieces
from fppo.data.tokenizers import encode_after, encode_text, within
from fppo.rollout.turns.observations import ChatTemplate, chat_template
from fppo.serve.calls import CallForm, ParsedTurn, ReadTurn, Tool, form_of, reader_of
from fppo.serve.protocol import ForcedCall, Message, wrong
from fppo.serve.refusal import Refusal

_UNFINISHED = "\ufffd"


@attrs.frozen(kw_only=True)
class Texts:
    """Conversion of a policy's texts to ids and back; its embedding has `vocabulary` rows.

    `template` encodes the messages after the policy's turns; None for a tokenizer without a chat template, which serves
    completions alone. `ends` are the tokens that end a turn of a chat. `pieces` are the bytes of every token.
    `texts_of` makes one from a tokenizer.
    """

    tokenizer: Any
    vocabulary: int
    ends: tuple[int, ...]
    options: ChatOptions
    template: ChatTemplate | None
    reader: ReadTurn | None
    form: CallForm | None  # of calls, if the chat template writes it and the reader can read it
    pieces: tuple[bytes, ...]  # of every token
    ids: Mapping[str, int]  # of all tokens, by their names
    word: tuple[int, ...]  # the ids of a word, after which others may be decoded

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The ids of a conversation up to the policy's turn. Raises Refusal for a conversation that the template
        refuses, or does not show in full."""
        template = self._with(tools)
        try:
            ids = encode_chat(self.tokenizer, messages, options=template.options)
        except Exception as error:  # templates raise what they like
            raise wrong("messages", f"the chat template refuses them: {error}"[:500]) from error
        return self._known(ids)

    def observation(
        self, before: Sequence[Message], messages: Sequence[Message], end: int, tools: Sequence[Tool]
    ) -> list[int]:
        """The ids of messages that follow an answer whose last id is `end`. Raises Refusal as `prompt` does."""
        named = named_tools([*before, *messages])[len(before) :]
        try:
            return self._known(self._with(tools)(named, end))
        except ValueError as error:
            raise wrong("messages", f"the chat template refuses them: {error}"[:500]) from error

    def opening(self, forced: ForcedCall, tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """The ids with which every call of these functions begins, as the chat template writes a call after its prompt.
        Raises Refusal if the form of calls is not known; the error says so if the template does not even show
        `tools`."""
        form = self.form
        texts = [] if form is None else [(text, form.before) for text in form.texts(forced.functions)]
        every = [encode_after(self.tokenizer, text, before) for text, before in texts]
        alike = takewhile(lambda column: len({*column}) == 1, zip(*every, strict=False))
        ids = tuple(self._known([token for token, *_ in alike]))
        if not ids:
            self._with(tools)
            text = (
                "it is not known how the chat template begins a call: give auto, or the tokenizer a response_template"
            )
            raise wrong("tool_choice", text)
        return ids

    def text(self, value: str, *, before: str) -> list[int]:
        """The ids of a text after the text `before` or, if that is empty, of a whole prompt with any beginning-of-text
        token."""
        return self._known(
            encode_after(self.tokenizer, value, before) if before else encode_text(self.tokenizer, value)
        )

    def checked(self, ids: Sequence[int]) -> list[int]:
        """The ids of a request. Raises Refusal for ids that the policy does not know."""
        if (top := max(ids)) >= self.vocabulary:
            raise wrong("prompt", f"the id {top} is beyond the policy's {self.vocabulary} tokens")
        return list(ids)

    def stops(
        self, texts: Sequence[str], server_stops: StopTexts | None = None
    ) -> tuple[tuple[int, ...], StopTexts | None]:
        """The tokens and the stop texts that end an answer, for the `texts` that a request names; the stop texts
        `server_stops` end it as well."""
        if not texts:
            return (), server_stops
        tokens = tuple(self.ids[text] for text in texts if self.ids.get(text, self.vocabulary) < self.vocabulary)
        named = stop_texts(self.tokenizer, texts, like=StopTexts((), self.pieces))
        if named is None or server_stops is None:
            return tokens, named or server_stops
        return tokens, StopTexts(tuple(dict.fromkeys((*server_stops.texts, *named.texts))), self.pieces)

    def decoded(self, ids: Sequence[int]) -> str:
        """The text of ids, with special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def continued(self, ids: Sequence[int]) -> str:
        """The text of ids decoded after a word, which keeps the leading space that SentencePiece tokenizers drop
        otherwise."""
        before = self.decoded(self.word)
        return self.decoded([*self.word, *ids])[len(before) :]

    def all_of(self, ids: Sequence[int], text: str) -> str:
        """The text of all ids, including one that ended the answer; `text` is the answer as it was decoded before."""
        whole = self.continued(ids)
        return whole if whole.startswith(text) else self.decoded(ids)

    def goes_on(self, prompt: Sequence[int]) -> bool:
        """Whether the text after a prompt continues the prompt's text, rather than begins anew after a special
        token."""
        return bool(prompt) and prompt[-1] not in self.tokenizer.all_special_ids

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text."""
        return self.pieces[token] if token < len(self.pieces) else b""

    def parsed(
        self, text: str, ids: Sequence[int], before: Sequence[int], tools: Sequence[Tool], opening: Sequence[int] = ()
    ) -> ParsedTurn:
        """Parse an answer with its calls of tools. An `opening` that was written for the policy comes before the text
        and the ids; none of it is content, unless the answer has no call."""
        written = self.decoded(opening) if opening else ""
        if not tools or self.reader is None:
            return ParsedTurn(written + text)
        turn = self.reader(written + text, self.decoded([*opening, *ids]), self.decoded(before), tools)
        return turn._replace(content="") if turn.calls and written.startswith(turn.content) else turn

    def _known(self, ids: Sequence[int]) -> list[int]:
        return within(ids, self.vocabulary)

    def _with(self, tools: Sequence[Tool]) -> ChatTemplate:
        if self.template is None:
            raise Refusal("the policy's tokenizer has no chat template: ask /v1/completions")
        if not tools:
            return self.template
        options = attrs.evolve(self.options, tools=tuple(tools))
        if self.reader is None:
            try:
                check_chat_template(self.tokenizer, options=options, name="the policy")
            except ValueError as error:
                raise wrong("tools", str(error)) from error
            advice = "give the tokenizer a response_template"
            raise wrong("tools", f"calls cannot be read as the chat template writes them: {advice}")
        return attrs.evolve(self.template, options=options)


def texts_of(tokenizer: Any, *, vocabulary: int, chat: bool = True, options: ChatOptions = PLAIN) -> Texts:
    """The conversion of a policy's texts; with `chat` also of chats, by the tokenizer's chat template. Raises
    ValueError for a template that does not show the messages of a user. If it does not show those of tools, requests
    with some are refused."""
    template, reader, form, end = None, None, None, None
    if chat:
        try:
            template = chat_template(tokenizer, roles=("tool",), options=options)
        except ValueError:
            template = chat_template(tokenizer, options=options)
        reader, end = reader_of(tokenizer, options), end_of_turn(tokenizer, options=options)
        form = None if reader is None else form_of(tokenizer, reader, options)
    return Texts(
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        ends=() if end is None or end >= vocabulary else (end,),
        options=options,
        template=template,
        reader=reader,
        form=form,
        pieces=token_pieces(tokenizer),
        ids=tokenizer.get_vocab(),
        word=tuple(tokenizer.encode("a", add_special_tokens=False)),
    )


class AnswerReader:
    """A decoder of an answer while its tokens come, which gives the text that can no longer change, in parts.

    With `continues` the text may begin with a space. The token that ends the answer is left out, and so is a stop text.
    Incomplete characters, and what may be the beginning of a stop text, are held back.
    """

    def __init__(
        self, texts: Texts, stops: Sequence[str], stop_tokens: Sequence[int], *, continues: bool = False
    ) -> None:
        self._texts, self._stops, self._stop_tokens = texts, [text for text in stops if text], frozenset(stop_tokens)
        self._continues = continues
        self._ids: list[int] = []
        self._start = self._done = self._given = 0  # ids before `done` are decoded, those from `start` on kept
        self._text = ""

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add."""
        self._ids += tokens
        ended = bool(self._ids) and self._ids[-1] in self._stop_tokens
        self._read(len(self._ids) - ended, whole=False)
        return self._give(self._safe())

    def close(self, finish: str, tokens: Sequence[int] = ()) -> tuple[str, str]:
        """The rest of the text, and the whole of it, once the answer has ended with these tokens."""
        self._ids += tokens
        ended = finish == "stop" and bool(self._ids) and self._ids[-1] in self._stop_tokens
        self._read(len(self._ids) - ended, whole=True)
        if finish == "stop" and not ended:
            places = [place for text in self._stops if (place := self._text.find(text)) >= 0]
            self._text = self._text[: min(places, default=len(self._text))]
        return self._give(len(self._text)), self._text

    def _read(self, end: int, *, whole: bool) -> None:
        """Decode up to the index `end` of the ids, unless a character is unfinished there; with `whole` even then."""
        if end <= self._done:
            return
        decoded = self._texts.continued if self._continues and not self._start else self._texts.decoded
        before = decoded(self._ids[self._start : self._done]) if self._done > self._start else ""
        text = decoded(self._ids[self._start : end])
        if text.endswith(_UNFINISHED) and not whole:
            return
        self._text += text[len(before) :]
        self._start, self._done = self._done, end

    def _safe(self) -> int:
        """The length of the text that no stop text can remove any more."""
        safe = len(self._text)
        for stop in self._stops:
            if (place := self._text.find(stop, max(self._given - len(stop), 0))) >= 0:
                safe = min(safe, place)
            sizes = range(min(len(stop) - 1, len(self._text)), 0, -1)
            held = next((size for size in sizes if self._text.endswith(stop[:size])), 0)
            safe = min(safe, len(self._text) - held)
        return max(safe, self._given)

    def _give(self, end: int) -> str:
        part, self._given = self._text[self._given : end], max(self._given, end)
        return part
