"""Answers in the protocol's form: whole objects, and the chunks of a stream."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import attrs

from fppo.rollout.scores import TopTokens
from fppo.serve.protocol import body_of
from fppo.serve.refusal import Refusal
from fppo.serve.service import AnswerPart, WholeAnswer
from fppo.serve.texts import Texts

_LEAST = -9999.0
_LETTERS = string.ascii_letters + string.digits


class ReplyStream(Protocol):
    """The form of the answers to one request in some protocol: one object, or the events of a stream, and what the
    stream ends with when it is `done`."""

    done: ClassVar[str]

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]: ...

    def first(self, prompts: Sequence[Sequence[int]], *, with_text: bool) -> Iterator[dict[str, Any]]: ...

    def part(self, index: int, part: AnswerPart, *, with_text: bool) -> Iterator[dict[str, Any]]: ...

    def last(self, answer: WholeAnswer, *, text_sent: bool) -> Iterator[dict[str, Any]]: ...

    def end(self, answers: Sequence[WholeAnswer]) -> Iterator[dict[str, Any]]: ...

    def refused(self, error: Refusal) -> dict[str, Any]: ...


@attrs.frozen(kw_only=True)
class ReplyForm:
    """The form of the answers to one request: of a chat or a completion, with log-probs and ids or without."""

    id: str
    created: int  # seconds since 1970
    model: str
    chat: bool
    texts: Texts
    log_probs: bool
    token_ids: bool
    usage: bool = False  # whether a stream ends with the numbers of tokens
    done: ClassVar[str] = "data: [DONE]\n\n"

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """The object of all answers."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [self._choice(x) for x in answers], "usage": usage_of(answers)}

    def first(self, prompts: Sequence[Sequence[int]], *, with_text: bool) -> Iterator[dict[str, Any]]:
        """The chunks with which the stream of a chat begins, one for each prompt; none for other completions."""
        del with_text
        if self.chat:
            for index in range(len(prompts)):
                yield self._chunk(index, {"role": "assistant", "content": ""})

    def part(self, index: int, part: AnswerPart, *, with_text: bool) -> Iterator[dict[str, Any]]:
        """The chunk of a part, with its text or without, unless the chunk would be empty."""
        text = part.text if with_text else ""
        noted = self._noted(part.tokens, part.log_probs)
        if text or (part.tokens and (self.log_probs or self.token_ids)):
            yield self._chunk(index, {"content": text} if self.chat else text, noted, part.tokens)

    def last(self, answer: WholeAnswer, *, text_sent: bool) -> Iterator[dict[str, Any]]:
        """The chunks with which an answer's stream ends: its calls, and its text unless `text_sent` says that it was
        sent."""
        if answer.turn.reasoning is not None:
            yield self._chunk(answer.index, {"reasoning_content": answer.turn.reasoning})
        if not text_sent and answer.turn.content:
            yield self._chunk(answer.index, {"content": answer.turn.content})
        for place, call in enumerate(calls_of(answer)):
            yield self._chunk(answer.index, {"tool_calls": [{"index": place, **call}]})
        yield self._chunk(answer.index, {} if self.chat else "", finish=answer.finish)

    def end(self, answers: Sequence[WholeAnswer]) -> Iterator[dict[str, Any]]:
        """The last chunk of a stream with `usage`: the numbers of tokens of the prompt and the answers."""
        if self.usage:
            kind = "chat.completion.chunk" if self.chat else "text_completion"
            yield {**self._head(kind), "choices": [], "usage": usage_of(answers)}

    def refused(self, error: Refusal) -> dict[str, Any]:
        """The last chunk of a stream that fails."""
        return body_of(error)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, answer: WholeAnswer) -> dict[str, Any]:
        finished, tokens = answer.finished, answer.tokens
        own: dict[str, Any] = {"index": answer.index, "finish_reason": answer.finish, "logprobs": None}
        if self.log_probs:
            scores = finished.drawn_scores
            log_probs = finished.log_probs if scores is None else scores.log_probs
            own["logprobs"] = self._noted(tokens, log_probs.tolist(), None if scores is None else scores.top)
        if self.token_ids:
            own |= {"token_ids": tokens, "prompt_token_ids": answer.prompt}
        if not self.chat:
            return {**own, "text": answer.turn.content}
        return {**own, "message": message_of(answer)}

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any] | str,
        noted: Any = None,
        tokens: Sequence[int] = (),
        finish: str | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta" if self.chat else "text": delta, "finish_reason": finish}
        choice["logprobs"] = noted
        if self.token_ids:
            choice["token_ids"] = list(tokens)
        return {**self._head("chat.completion.chunk" if self.chat else "text_completion"), "choices": [choice]}

    def _noted(self, tokens: Sequence[int], log_probs: Sequence[float], top: TopTokens | None = None) -> Any:
        """The log-probs of tokens, and of the likeliest ones beside each, in the form of chats or of completions; None
        if the client asked for none."""
        if not self.log_probs:
            return None
        own = self._each(tokens, log_probs)
        beside = [] if top is None else zip(top.ids.tolist(), top.log_probs.tolist(), strict=True)
        others = [self._each(*pair) for pair in beside]
        if self.chat:
            if top is None:
                others = [[] for _ in own]
            return {"content": [{**x, "top_logprobs": y} for x, y in zip(own, others, strict=True)]}
        return {
            "tokens": [x["token"] for x in own],
            "token_logprobs": [x["logprob"] for x in own],
            "top_logprobs": [_by_text(each) for each in others] or None,
            "text_offset": None,
        }

    def _each(self, tokens: Sequence[int], log_probs: Sequence[float]) -> list[dict[str, Any]]:
        """Tokens with their log-probs, in the form of chats."""
        pieces = [self.texts.piece(token) for token in tokens]
        pairs = zip(pieces, log_probs, strict=True)
        return [{"token": b.decode(errors="replace"), "logprob": _finite(x), "bytes": [*b]} for b, x in pairs]


def usage_of(answers: Sequence[WholeAnswer]) -> dict[str, Any]:
    """The numbers of tokens of a request's answers, and of those that an engine drafted for them."""
    drawn, read = sum(len(x.tokens) for x in answers), sum(map(len, {x.prompt for x in answers}))
    used: dict[str, Any] = {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}
    if counts := [x.finished.drafts for x in answers if x.finished.drafts is not None]:
        drafted, accepted = (sum(each) for each in zip(*counts, strict=True))
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        used["completion_tokens_details"] = details
    return used


def _by_text(tokens: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The log-probs of tokens by their texts, the likeliest first; among tokens with the same text the likeliest
    counts."""
    found: dict[str, float] = {}
    for token in tokens:
        found.setdefault(token["token"], token["logprob"])
    return found


def _finite(log_prob: float) -> float:
    """A log-prob that JSON can hold: at least the protocol's lowest, which stands for impossible tokens."""
    return log_prob if log_prob > _LEAST else _LEAST


def message_of(answer: WholeAnswer) -> dict[str, Any]:
    """An answer as a message of a chat, which a client sends back."""
    calls = calls_of(answer)
    message: dict[str, Any] = {"role": "assistant", "content": answer.turn.content, "refusal": None}
    if calls:
        message |= {"content": answer.turn.content or None, "tool_calls": calls}
    if answer.turn.reasoning is not None:
        message["reasoning_content"] = answer.turn.reasoning
    return message


def calls_of(answer: WholeAnswer) -> list[dict[str, Any]]:
    """The calls of an answer, with ids of nine letters and digits: templates of Mistral's models take no others."""
    made: list[dict[str, Any]] = []
    for place, call in enumerate(answer.turn.calls):
        digest = hashlib.blake2b(f"{answer.origin}/{place}".encode(), digest_size=8).digest()
        own, number = "", int.from_bytes(digest, "little")
        for _ in range(9):
            number, letter = divmod(number, len(_LETTERS))
            own += _LETTERS[letter]
        function = {"name": call.name, "arguments": call.arguments}
        made.append({"id": own, "type": "function", "function": function})
    return made


def event(value: Mapping[str, Any]) -> str:
    """A server-sent event, named by its type if it has one."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n"
