"""Answers to requests: from a conversation to ids, through the engine, and back, recorded in episodes."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import attrs

from fppo._errors import did_you_mean
from fppo.data.messages import arguments_of
from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.requests import End, FinishedRequest, Request
from fppo.rollout.scores import Scores
from fppo.serve.calls import ParsedTurn, Tool
from fppo.serve.episodes import (
    AnswerPlace,
    Conversation,
    Episodes,
    Kind,
    RecordedTurn,
    items_of,
    of_ids,
    of_messages,
    of_text,
    row_number,
)
from fppo.serve.loop import EngineLoop, Event, ServerStopped, refusal_of
from fppo.serve.protocol import (
    MOST_CHOICES,
    AnswerOptions,
    ChatRequest,
    CompletionRequest,
    ForcedCall,
    Message,
    wrong,
)
from fppo.serve.refusal import Refusal
from fppo.serve.texts import AnswerReader, Texts

# a conversation with an answer, from its turn and its ids
WithAnswer = Callable[[ParsedTurn, Sequence[int]], Conversation]


@attrs.frozen(kw_only=True)
class Bounds:
    """Limits of a server: the most tokens that it accepts, draws and holds, the most answers at once, and the size and
    time of a request's body."""

    row_tokens: int = 4096  # in a row: a prompt, its answers, and the messages between them
    answer_tokens: int = 1024  # in an answer, if its request sets no limit
    response_tokens: int | None = None  # in a row behind its first prompt; None: no limit
    requests: int = 1024  # answers that are being drawn or wait for it, at once
    recorded_tokens: int = 16 << 20  # in all episodes that are held together
    kept_tokens: int = 1 << 20  # in all rows whose keys and values are kept for a next request
    body_bytes: int = 4 << 20  # in a request's body
    body_seconds: float = 30.0  # until the body's last byte has come


class TurnToAnswer(NamedTuple):
    """A conversation to answer. `added` gives the ids that the conversation adds to a row, and `with_answer` the
    conversation with its answer.

    If a call is `forced`, the answer begins with the ids of `opening`, which are not drawn.
    """

    conversation: Conversation
    added: Callable[[AnswerPlace], list[int]]
    with_answer: WithAnswer
    tools: Sequence[Tool] = ()
    forced: ForcedCall | None = None
    opening: tuple[int, ...] = ()

    def check(self, turn: ParsedTurn, end: End) -> None:
        """Raise Refusal for an answer that does not begin with its forced call; an answer that was cut may lack the
        call."""
        if self.forced is None or (turn.calls and turn.calls[0].name in self.forced.functions):
            return
        if turn.calls:
            name = turn.calls[0].name
            hint = did_you_mean(name, self.forced.functions)
            raise _no_call(f"the policy calls {name[:100]!r}, which is none of the tools; {hint}")
        if end != "length":
            raise _no_call(f"the answer holds no call that can be read: {turn.content[:200]!r}")


@attrs.frozen(eq=False, kw_only=True)
class AnswerPlan:
    """An answer before it is drawn: its place in an episode, its request, and what becomes of its text."""

    start: AnswerPlace
    prompt: tuple[int, ...]  # all ids before it
    new: tuple[int, ...]  # the ids of `prompt` that its row does not have yet
    request: Request
    turn: TurnToAnswer
    index: int  # among the answers to a request


class AnswerPart(NamedTuple):
    """A part of an answer that can be shown."""

    text: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]


@attrs.frozen(eq=False, kw_only=True)
class WholeAnswer:
    """An answer that has ended; if it is `named`, the client named the function that it calls."""

    index: int
    turn: ParsedTurn
    finished: FinishedRequest
    tokens: Sequence[int]  # the tokens of `finished`
    prompt: tuple[int, ...]  # all ids before it
    origin: str  # unique to the answer; the ids of its calls derive from it
    named: bool = False  # the client named the function that it calls

    @property
    def finish(self) -> str:
        """The protocol's reason for its end: "tool_calls" if it has calls, unless it was cut or the client named the
        function."""
        called = self.turn.calls and not self.named and self.finished.end != "length"
        return "tool_calls" if called else self.finished.end


@attrs.frozen(kw_only=True)
class Sources:
    """The parts of a server's answers that stay the same."""

    texts: Texts
    sampling: Sampling  # for what a request leaves open
    key: Key
    bounds: Bounds
    model: str
    keeps_sampling: bool = False  # whether requests' options of sampling are ignored
    anew: bool = False  # whether each answer to a chat begins a row
    repeats: bool = False  # whether ids of calls derive from what draws depend on, as a rollout's must
    row_of: Callable[[str], int] = row_number  # by an episode's name, the number by which its answers are drawn


class OpenAnswer:
    """An answer that is being drawn, for one reader. `cancel` it if nobody reads it to its end."""

    def __init__(self, service: Service, plan: AnswerPlan, loop: EngineLoop, *, along: bool) -> None:
        self.plan, self._service, self._loop = plan, service, loop
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        texts, sampling = service.sources.texts, plan.request.sampling
        stops = () if sampling.stop_texts is None else [text.decode() for text in sampling.stop_texts.texts]
        continues = plan.turn.conversation.kind != "chat" and texts.goes_on(plan.prompt)
        self._reader = AnswerReader(texts, stops, sampling.stop_token_ids, continues=continues)
        self._closed = False
        loop.submit(plan.request, self._events.put_nowait, along=along)

    async def parts(self) -> AsyncIterator[AnswerPart | WholeAnswer]:
        """The parts of the answer as they are drawn, and at last the whole of it. Raises Refusal."""
        shown = 0
        try:
            while not isinstance(event := await self._events.get(), FinishedRequest):
                if isinstance(event, Exception):
                    raise refusal_of(event)
                shown += len(event.tokens)
                yield AnswerPart(self._reader.add(event.tokens), *event)
            tokens, log_probs = event.tokens.tolist(), event.log_probs.tolist()[shown:]
            rest, text = self._reader.close(event.end, tokens[shown:])
            answer = self._commit(event, tokens, text)
            yield AnswerPart(rest, tuple(tokens[shown:]), tuple(log_probs))
            yield answer
        finally:
            self.cancel()

    async def whole(self) -> WholeAnswer:
        """The answer, once it has ended. Raises Refusal."""
        *_, answer = [part async for part in self.parts()]
        assert isinstance(answer, WholeAnswer)
        return answer

    def cancel(self) -> None:
        """End the answer and forget it, unless it has ended."""
        if not self._closed:
            self._closed = True
            self._loop.cancel(self.plan.request.name)
            self._service.close(self.plan, None)

    def _commit(self, event: FinishedRequest, tokens: Sequence[int], text: str) -> WholeAnswer:
        plan, texts = self.plan, self._service.sources.texts
        asked, opened = plan.turn, len(plan.turn.opening)
        before = plan.prompt[: len(plan.prompt) - opened]
        turn = texts.parsed(text, tokens, before, asked.tools, asked.opening)
        said = texts.decoded(asked.opening) + text if opened else text
        self._closed = True
        self._service.close(plan, RecordedTurn(plan.new, event, said, opened), asked.with_answer(turn, tokens))
        asked.check(turn, event.end)
        named = asked.forced is not None and asked.forced.named
        return WholeAnswer(
            index=plan.index,
            turn=turn,
            finished=event,
            tokens=tokens,
            prompt=plan.prompt,
            origin=self._service.origin(plan),
            named=named,
        )


class Service:
    """The answers of a policy to requests of one event loop. `attach` gives it the engine's loop."""

    def __init__(self, sources: Sources, episodes: Episodes) -> None:
        self.sources, self.episodes = sources, episodes
        self._loop: EngineLoop | None = None
        self._own, self._numbers = uuid.uuid4().hex, itertools.count()
        self._open = 0
        self._kept: OrderedDict[str, int] = OrderedDict()  # tokens of the rows whose contexts are kept, by request
        self._kept_tokens = 0  # the sum of these

    def attach(self, loop: EngineLoop | None, sources: Sources | None = None) -> None:
        """Continue with this engine, which has no kept contexts yet, and with `sources` if given. Without an engine,
        requests are refused."""
        self._loop, self.sources = loop, sources or self.sources
        self._kept.clear()
        self._kept_tokens = 0

    @property
    def loop(self) -> EngineLoop:
        """The engine's loop. Raises Refusal where there is none."""
        if self._loop is None:
            raise Refusal("the policy takes no requests now", status=503)
        return self._loop

    def problem(self) -> str | None:
        """The reason why no request can be answered any more; None if the engine has not failed, or there is none."""
        failure = None if self._loop is None else self._loop.failure
        return None if failure is None else f"the engine failed: {type(failure).__name__}"

    def chat(self, request: ChatRequest, episode: str | None) -> list[OpenAnswer]:
        """The answers to a conversation, being drawn. Raises Refusal."""
        messages, tools, texts, forced = request.messages, request.tools, self.sources.texts, request.forced
        opening = () if forced is None else texts.opening(forced, tools)
        conversation = of_messages(messages, tools)
        if self.sources.anew:
            conversation = conversation._replace(cuts=())

        def added(start: AnswerPlace) -> list[int]:
            if not start.items_seen or start.end is None:
                ids = texts.prompt(messages, tools)
            else:
                ids = texts.observation(messages[: start.items_seen], messages[start.items_seen :], start.end, tools)
            return [*ids, *opening]

        def with_answer(turn: ParsedTurn, ids: Sequence[int]) -> Conversation:
            del ids
            return conversation.with_answer(items_of([said_of(turn)]))

        turn = TurnToAnswer(conversation, added, with_answer, tools, forced, opening)
        return self._opened(request.options, [turn], episode)

    def completions(self, request: CompletionRequest, episode: str | None) -> list[OpenAnswer]:
        """The continuations of texts or ids, being drawn. Raises Refusal."""
        of = [self._of_text(x) if isinstance(x, str) else self._of_ids(x) for x in request.prompts]
        return self._opened(request.options, of, episode)

    def _of_text(self, prompt: str) -> TurnToAnswer:
        """The turn of a prompt of text. It continues an earlier answer if the prompt begins with that answer's
        conversation, including the text that ended the answer."""
        texts, conversation = self.sources.texts, of_text(prompt)
        return TurnToAnswer(
            conversation,
            lambda start: texts.text(prompt[start.items_seen :], before=prompt[: start.items_seen]),
            lambda turn, ids: conversation.with_answer(of_text(texts.all_of(ids, turn.content)).items),
        )

    def _of_ids(self, prompt: tuple[int, ...]) -> TurnToAnswer:
        texts, conversation = self.sources.texts, of_ids(prompt)
        return TurnToAnswer(
            conversation,
            lambda start: texts.checked(prompt[start.items_seen :]),
            lambda turn, ids: conversation.with_answer(of_ids(ids).items),
        )

    def _opened(self, options: AnswerOptions, turns: Sequence[TurnToAnswer], episode: str | None) -> list[OpenAnswer]:
        """Open all answers to a request, or none."""
        count, most = len(turns) * options.n, self.sources.bounds.requests
        if count > MOST_CHOICES:
            raise wrong("n", f"{count} answers to {len(turns)} prompts; at most {MOST_CHOICES} at once")
        if self._open + count > most:
            text = f"{self._open} answers are being drawn, and at most {most} may be; try again later"
            raise Refusal(text, status=429, code="queue_full")
        answers: list[OpenAnswer] = []
        try:
            for asked in turns:
                name = episode
                for _ in range(options.n):
                    answers.append(self._open_one(options, asked, name, len(answers)))
                    name = answers[-1].plan.start.name  # the others are rows of the same episode
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise
        return answers

    def _open_one(self, options: AnswerOptions, turn: TurnToAnswer, episode: str | None, index: int) -> OpenAnswer:
        loop = self.loop
        start = self.episodes.begin(episode, turn.conversation)
        self._open += 1
        plan = None
        try:
            new = tuple(turn.added(start))
            prompt = (*start.before, *new)
            plan = AnswerPlan(
                start=start,
                prompt=prompt,
                new=prompt if start.row is None else new,
                request=self._request(options, turn.conversation.kind, start, prompt, len(new), index),
                turn=turn,
                index=index,
            )
            return OpenAnswer(self, plan, loop, along=options.stream)
        except BaseException as error:
            self._open -= 1
            self.episodes.abandon(start)
            if isinstance(error, ServerStopped):
                raise refusal_of(error) from error
            raise

    def _request(
        self, options: AnswerOptions, kind: Kind, start: AnswerPlace, prompt: tuple[int, ...], new: int, index: int
    ) -> Request:
        """The engine's request for answer number `index` of a client's request; the last `new` ids of `prompt` are not
        in its row yet. Raises Refusal for an empty prompt, or if there is no room for an answer."""
        sources, bounds = self.sources, self.sources.bounds
        name = "messages" if kind == "chat" else "prompt"
        if not prompt:
            why = "the chat template writes nothing for them" if kind == "chat" else "the text is empty"
            raise wrong(name, f"{why}: an answer follows at least one token, so give some text")
        used = start.used + (0 if start.row is None else new)
        room = bounds.row_tokens - len(prompt)
        if bounds.response_tokens is not None:
            room = min(room, bounds.response_tokens - used)
        if room < 1:
            text = f"{len(prompt)} tokens, {used} of them behind the first prompt, leave no room for an answer"
            raise wrong(name, text, "context_length_exceeded")
        key, row = start.key_of(sources.key), sources.row_of(start.name)
        if options.seed is not None:
            key, row = Key(options.seed % (1 << 64)).fold("seed"), index
        after = start.after if start.after in self._kept else None
        if after is not None:
            self._kept.move_to_end(after)
        return Request(
            name=f"request-{next(self._numbers)}",
            ids=prompt if after is None else prompt[len(prompt) - new :],
            sampling=self._sampling(options, kind, min(room, options.max_tokens or bounds.answer_tokens)),
            key=key,
            row=row,
            after=after,
            keep=True,
            scores=Scores(drawn_top=options.top_logprobs) if options.top_logprobs else None,
        )

    def _sampling(self, options: AnswerOptions, kind: Kind, most: int) -> Sampling:
        """The sampling of an answer of at most `most` tokens: by the request's options, else by the server's. Raises
        Refusal."""
        sampling, texts = self.sources.sampling, self.sources.texts
        given = {} if self.sources.keeps_sampling else options.sampling
        tokens, stop = texts.stops(options.stop, sampling.stop_texts)
        unknown = [token for token in options.stop_token_ids if token >= texts.vocabulary]
        if unknown:
            raise wrong("stop_token_ids", f"the policy has no tokens {unknown[:5]}; it has {texts.vocabulary}")
        of_turns = texts.ends if kind == "chat" else ()
        ends = tuple(dict.fromkeys((*sampling.stop_token_ids, *of_turns, *tokens, *options.stop_token_ids)))
        try:
            how = {"n": 1, "max_tokens": most, "stop_token_ids": ends, "stop_texts": stop}
            return attrs.evolve(sampling.with_options(given), **how)
        except ValueError as error:
            raise Refusal(str(error)) from error

    def close(self, plan: AnswerPlan, turn: RecordedTurn | None, whole: Conversation | None = None) -> None:
        """Close an answer, and record it as `turn`, which ends the conversation `whole`; None: it has not ended, or
        nobody reads it."""
        self._open -= 1
        if turn is None or whole is None:
            self.episodes.abandon(plan.start)
            return
        self._kept[turn.answer.name] = size = len(plan.prompt) + len(turn.answer.tokens)
        self._kept_tokens += size
        if plan.start.row is not None and plan.start.after is not None:
            self.forget([plan.start.after])  # usually only a row's last answer is continued
        while self._kept_tokens > self.sources.bounds.kept_tokens and len(self._kept) > 1:
            self.forget([next(iter(self._kept))])
        self.episodes.commit(plan.start, turn, whole)

    def origin(self, plan: AnswerPlan) -> str:
        """A name of an answer that no other server gives; or, where rollouts must repeat, one by the key, row and
        length that the answer's draws depend on."""
        request = plan.request
        if self.sources.repeats:
            return f"{request.key.seed}/{request.row}/{len(plan.prompt)}"
        return f"{self._own}/{request.name}"

    def forget(self, requests: Sequence[str]) -> None:
        """Release the contexts of requests."""
        held = [name for name in requests if name in self._kept]
        self._kept_tokens -= sum(self._kept.pop(name) for name in held)
        if held and self._loop is not None:
            self._loop.release(held)


def said_of(turn: ParsedTurn) -> Message:
    """An answer as the message that a client sends back."""
    calls = [
        {"type": "function", "function": {"name": x.name, "arguments": arguments_of(x.arguments)}} for x in turn.calls
    ]
    return {"role": "assistant", "content": turn.content} | ({"tool_calls": calls} if calls else {})


def _no_call(reason: str) -> Refusal:
    """The error of an answer without the call that was forced."""
    return Refusal(f"tool_choice: {reason}", status=422, param="tool_choice", code="tool_use_failed")
