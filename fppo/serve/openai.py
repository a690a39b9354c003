"""The routes of OpenAI's protocol, and of Anthropic's Messages: answers, models, and the episodes that are recorded."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from fppo.serve.app import HEALTH, MESSAGES, EventStream, health_response, unless_gone
from fppo.serve.episodes import EpisodeRow
from fppo.serve.messages import MessagesForm, messages_request
from fppo.serve.protocol import (
    AnswerOptions,
    Translated,
    chat_request,
    completion_request,
    named_as,
    parsed,
)
from fppo.serve.refusal import Refusal
from fppo.serve.replies import ReplyForm, ReplyStream, event, message_of
from fppo.serve.responses import ResponseForm, StoredResponse, response_request
from fppo.serve.service import AnswerPart, OpenAnswer, Service, WholeAnswer

SESSION = "x-session-id"
MOST_NAME = 256  # characters
_EPISODE = "/e/{episode}"


def _unheard(answer: WholeAnswer) -> None:
    """Take no notice of an answer's end."""
    del answer


def router_of(service: Service, *, problem: Callable[[], str | None] | None = None) -> APIRouter:
    """The routes, each also below /e/NAME, which names the episode.

    GET /health tells the `problem` of the server, by default the service's own.
    """
    router, ids, found = APIRouter(), _ids(), problem or service.problem
    _add_chats(router, service, ids)

    async def health() -> JSONResponse:
        return health_response(found())

    async def completions(request: Request) -> Response:
        asked = completion_request(parsed(await request.body()))
        _check_model(service, asked.options)
        name = _name_of(request, asked.options)
        form = _form(service, asked.options, next(ids), chat=False)
        return await _replied(request, service.completions(asked, name), form, asked.options, as_drawn=True)

    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    async def model(name: str) -> dict[str, Any]:
        if name != service.sources.model:
            raise Refusal(f"there is no model {name!r}", status=404, param="model", code="model_not_found")
        return _model(service)

    async def recorded(episode: str) -> JSONResponse:
        return JSONResponse(_episode(episode, service.episodes.rows(episode)))

    async def taken(episode: str) -> JSONResponse:
        return JSONResponse(_episode(episode, service.episodes.take(episode)))

    for before in ("", _EPISODE):
        router.add_route(f"{before}/v1/completions", completions, methods=["POST"])
        router.add_api_route(f"{before}/v1/models", models, methods=["GET"])
        router.add_api_route(f"{before}/v1/models/{{name:path}}", model, methods=["GET"])
    router.add_api_route(HEALTH, health, methods=["GET"])
    router.add_api_route(_EPISODE, recorded, methods=["GET"])
    router.add_api_route(_EPISODE, taken, methods=["DELETE"])
    return router


def _add_chats(router: APIRouter, service: Service, ids: Iterator[str]) -> None:
    """Add the routes that answer chats, in each of their protocols."""
    stored = StoredResponse()

    async def chat(request: Request) -> Response:
        asked = chat_request(parsed(await request.body()))
        form = _form(service, asked.options, next(ids), chat=True)
        return await answered(request, Translated(chat=asked, names={}), form)

    async def responses(request: Request) -> Response:
        body = parsed(await request.body())
        asked, messages, keep = response_request(body, stored)
        own = f"resp_{next(ids)}"
        form = ResponseForm(id=own, created=int(time.time()), model=service.sources.model, body=body)

        def ended(answer: WholeAnswer) -> None:
            if keep:
                stored.add(own, [*messages, message_of(answer)])

        return await answered(request, asked, form, ended)

    async def anthropic(request: Request) -> Response:
        asked = messages_request(parsed(await request.body()))
        sources, stops = service.sources, asked.chat.options.stop
        form = MessagesForm(id=f"msg_{next(ids)}", model=sources.model, texts=sources.texts, stops=stops)
        return await answered(request, asked, form)

    async def answered(
        request: Request, asked: Translated, form: ReplyStream, ended: Callable[[WholeAnswer], None] = _unheard
    ) -> Response:
        chat, options = asked.chat, asked.chat.options
        _check_model(service, options)
        with named_as(asked.names):
            answers = service.chat(chat, _name_of(request, options))
        return await _replied(request, answers, form, options, as_drawn=not chat.tools, ended=ended)

    for before in ("", _EPISODE):
        router.add_route(f"{before}/v1/chat/completions", chat, methods=["POST"])
        router.add_route(f"{before}/v1/responses", responses, methods=["POST"])
        router.add_route(f"{before}{MESSAGES}", anthropic, methods=["POST"])


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.sources.model, "object": "model", "created": 0, "owned_by": "fppo"}


def _check_model(service: Service, options: AnswerOptions) -> None:
    if options.model is not None and options.model != service.sources.model:
        text = f"there is no model {options.model!r}; there is {service.sources.model!r}"
        raise Refusal(text, status=404, param="model", code="model_not_found")


def _name_of(request: Request, options: AnswerOptions) -> str | None:
    """The episode's name, by the path, the header or the user; None if the conversation is to find the episode."""
    name = request.path_params.get("episode") or request.headers.get(SESSION) or options.user
    if name is not None and len(name) > MOST_NAME:
        raise Refusal(f"the episode's name has {len(name)} characters; at most {MOST_NAME}")
    return name or None


def _ids() -> Iterator[str]:
    """Names of replies that no other server gives. Nothing random is drawn for each: reading from the system's
    generator releases the interpreter's lock, and the decoding thread may then hold it for long."""
    own = uuid.uuid4().hex
    return (f"{own}-{number}" for number in itertools.count())


def _form(service: Service, options: AnswerOptions, own: str, *, chat: bool) -> ReplyForm:
    return ReplyForm(
        id=f"{'chatcmpl' if chat else 'cmpl'}-{own}",
        created=int(time.time()),
        model=service.sources.model,
        chat=chat,
        texts=service.sources.texts,
        log_probs=options.top_logprobs is not None,
        token_ids=options.return_token_ids,
        usage=options.include_usage,
    )


async def _replied(
    request: Request,
    answers: Sequence[OpenAnswer],
    form: ReplyStream,
    options: AnswerOptions,
    *,
    as_drawn: bool,
    ended: Callable[[WholeAnswer], None] = _unheard,
) -> Response:
    """The response, whole or as a stream. If the client goes away before its end, the answers are cancelled. With
    `as_drawn` a stream has the texts as they are drawn, else at the end of each answer. `ended` gets each answer before
    the client does."""
    if options.stream:
        return EventStream(_events(answers, form, as_drawn=as_drawn, ended=ended), partial(_cancel, answers))
    try:
        whole = await unless_gone(request, _whole(answers))
    finally:
        _cancel(answers)
    for answer in whole:
        ended(answer)
    return JSONResponse(form.whole(whole))


async def _whole(answers: Sequence[OpenAnswer]) -> list[WholeAnswer]:
    """All answers, once they have ended. If one fails, the others are not waited for."""
    if len(answers) == 1:
        return [await answers[0].whole()]
    tasks = [asyncio.ensure_future(answer.whole()) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _cancel(answers: Sequence[OpenAnswer]) -> None:
    for answer in answers:
        answer.cancel()


async def _events(
    answers: Sequence[OpenAnswer], form: ReplyStream, *, as_drawn: bool, ended: Callable[[WholeAnswer], None]
) -> AsyncIterator[str]:
    """The events of a stream. An error in the middle of it is its last event. `as_drawn` and `ended` are as in
    `_replied`."""
    whole: list[WholeAnswer] = []
    parts = _merged(answers)
    try:
        for chunk in form.first([answer.plan.prompt for answer in answers], with_text=as_drawn):
            yield event(chunk)
        async for index, part in parts:
            if isinstance(part, WholeAnswer):
                whole.append(part)
                ended(part)
                chunks = form.last(part, text_sent=as_drawn)
            else:
                chunks = form.part(index, part, with_text=as_drawn)
            for chunk in chunks:
                yield event(chunk)
        for chunk in form.end(whole):
            yield event(chunk)
        if form.done:
            yield form.done
    except Refusal as error:
        yield event(form.refused(error))
    finally:
        await parts.aclose()


async def _merged(
    answers: Sequence[OpenAnswer],
) -> AsyncGenerator[tuple[int, AnswerPart | WholeAnswer], None]:
    """The parts of several answers, with the number of each, as they come."""
    queue: asyncio.Queue[tuple[int, AnswerPart | WholeAnswer | Exception]] = asyncio.Queue()

    async def pump(answer: OpenAnswer) -> None:
        try:
            async for part in answer.parts():
                queue.put_nowait((answer.plan.index, part))
        except Exception as error:
            queue.put_nowait((answer.plan.index, error))

    tasks = [asyncio.ensure_future(pump(answer)) for answer in answers]
    try:
        left = len(answers)
        while left:
            index, part = await queue.get()
            if isinstance(part, Exception):
                raise part
            yield index, part
            left -= isinstance(part, WholeAnswer)
    finally:
        for task in tasks:
            task.cancel()


def _episode(name: str, rows: Sequence[EpisodeRow]) -> dict[str, Any]:
    """An episode's rows as JSON. Raises Refusal for one without any."""
    if not rows:
        raise Refusal(f"there is no episode {name!r} with an answer", status=404, code="episode_not_found")
    return {"episode": name, "rows": [{"number": row.number, "turns": [_turn(x) for x in row.turns]} for row in rows]}


def _turn(turn: Any) -> dict[str, Any]:
    answer = turn.answer
    lists = {name: getattr(answer, name).tolist() for name in ("tokens", "log_probs", "sampling_log_probs", "versions")}
    return {"before": list(turn.before), "opened": turn.opened, **lists, "text": turn.text, "finish": answer.end}
