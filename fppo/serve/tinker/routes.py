"""The routes of the tinker protocol: what its client calls, answered by a service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from tinker import types

from fppo._errors import printable, words_of
from fppo.serve.app import App, Guard, health_response, routed
from fppo.serve.protocol import parsed
from fppo.serve.refusal import Refusal
from fppo.serve.tinker import decode, rest
from fppo.serve.tinker.decode import PROTO
from fppo.serve.tinker.encode import error_of
from fppo.serve.tinker.futures import FailedRequest, Payload
from fppo.serve.tinker.guard import decompressed
from fppo.serve.tinker.samples import sample_request
from fppo.serve.tinker.service import TinkerService
from fppo.serve.tinker.sessions import owner_of

PREFIX = "/api/v1"
_POLL = 30.0  # seconds that a client's question for a result is held at most; it gives up after 45
_INLINE = 1 << 20  # bytes of a result beyond which a client may first learn its size


@attrs.frozen(kw_only=True)
class ClientFlags:
    """The choices that the protocol leaves to the server, and its client follows.

    compress: passes are sent as zstd, which pays over a network. poll: clients ask for the ends of all their samples at
    once, rather than one by one; then a client does not notice that a server was killed with its samples. chunk: the
    most datums of a request, into which clients cut a pass.
    """

    compress: bool = False
    poll: bool = False
    chunk: int = 1024

    def to_json(self) -> dict[str, Any]:
        """The protocol's `ClientConfigResponse`."""
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": self.compress,
            "fwdbwd_max_chunk_len": self.chunk,
            "custom_loss_server_side": True,
            "sample_join_sampling_session": True,
            "sample_use_retrieve_futures": self.poll,
        }


def tinker_app(service: TinkerService, *, keys: Sequence[str], flags: ClientFlags | None = None) -> App:
    """The application of the protocol. A request with none of the keys gets an error, and nothing else. Raises
    ValueError for no keys, and for empty ones."""
    if not keys or not all(keys):
        raise ValueError("the server has no key, or an empty one: give some, or leave them to the server")
    router, bounds, free = APIRouter(prefix=PREFIX), service.bounds, (f"{PREFIX}/healthz", f"{PREFIX}{rest.FILES}/")
    _add_service(router, service, flags or ClientFlags())
    _add_runs(router, service)
    _add_sampling(router, service)
    rest.add_routes(router, service)
    return Guard(
        routed([router], _refused),
        _refused,
        owners={(b"x-api-key", key.encode()): owner_of(key) for key in keys},
        advice="give one of the keys that the server was started with, as X-API-Key",
        free=lambda path: path.startswith(free),
        body_bytes=bounds.body_bytes,
        body_seconds=bounds.body_seconds,
        unpacked=lambda body, headers: decompressed(
            body, headers.get(b"content-encoding", b"").decode("latin-1"), bounds.body_bytes
        ),
    )


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """An error in the protocol's form."""
    if isinstance(error, HTTPException):
        text = f"{request.method} {printable(request.url.path, 200)}: {error.detail}"
        error = Refusal(f"this server does not answer {text}", status=error.status_code)
    if isinstance(error, Refusal):
        return JSONResponse(error_of(FailedRequest(error.message)), error.status)
    return JSONResponse(error_of(FailedRequest(f"the server failed: {words_of(error, 300)}", "server")), 500)


def _add_service(router: APIRouter, service: TinkerService, flags: ClientFlags) -> None:
    @router.get("/healthz")
    async def healthz() -> JSONResponse:
        return health_response(service.problem())

    @router.post("/client/config")
    async def client_config() -> JSONResponse:
        return JSONResponse(flags.to_json())

    @router.post("/client/dynamic_config")
    async def dynamic_config() -> JSONResponse:
        return JSONResponse({"sample_cancel_enabled": True})

    @router.get("/get_server_capabilities")
    async def capabilities() -> JSONResponse:
        models = [
            {"model_name": name, "max_context_length": each.rules.limit, "trainable": True, "sampleable": True}
            for name, each in service.bases.items()
        ]
        return JSONResponse({"supported_models": models})

    @router.post("/telemetry")
    async def telemetry() -> JSONResponse:
        return JSONResponse({"status": "accepted"})

    @router.post("/create_session")
    async def create_session(request: Request) -> JSONResponse:
        given = decode.of_type(types.CreateSessionRequest, await request.body())
        name = await asyncio.to_thread(service.create_session, rest.owner(request), given)
        return JSONResponse({"session_id": name, "type": "create_session"})

    @router.post("/session_heartbeat")
    async def heartbeat(request: Request) -> JSONResponse:
        given = decode.of_type(types.SessionHeartbeatRequest, await request.body())
        service.registry.session(given.session_id, rest.owner(request))
        return JSONResponse({"type": "session_heartbeat"})

    @router.post("/sessions/{session}/finish")
    async def finish(session: str, request: Request) -> Response:
        fields = parsed(await request.body())
        reason = fields.get("reason")
        kind = str(reason.get("type", "success")) if isinstance(reason, dict) else "success"
        if kind not in ("success", "errored", "interrupted"):
            raise decode.refused("reason.type", f"{printable(kind, 40)!r}: give success, errored or interrupted")
        await service.finish_session(session, rest.owner(request), kind)
        return Response(status_code=204)

    @router.post("/create_custom_loss")
    async def create_custom_loss(request: Request) -> JSONResponse:
        name = await asyncio.to_thread(service.create_loss, rest.owner(request), await request.body())
        return JSONResponse({"request_id": name})


def _add_runs(router: APIRouter, service: TinkerService) -> None:
    async def taken(request: Request, kind: str) -> JSONResponse:
        """Accept a run's request in JSON."""
        body = await request.body()
        fields = parsed(body)
        run = str(fields.get("model_id"))
        number = decode.number_of(fields.get("seq_id"), low=1)
        name = await service.accept(rest.owner(request), run, number, kind, body)
        return JSONResponse({"request_id": name, "model_id": run})

    @router.post("/create_model")
    async def create_model(request: Request) -> JSONResponse:
        given = decode.of_type(types.CreateModelRequest, await request.body())
        name, run = await service.create_run(rest.owner(request), given)
        return JSONResponse({"request_id": name, "model_id": run})

    @router.post("/get_info")
    async def get_info(request: Request) -> JSONResponse:
        given = decode.of_type(types.GetInfoRequest, await request.body())
        info = service.runs.info(given.model_id, rest.owner(request))
        return JSONResponse(rest.info_of(info, service))

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> JSONResponse:
        if PROTO not in request.headers.get("content-type", ""):
            raise Refusal(f"content-type: give {PROTO}: this server takes passes of newer clients alone", status=415)
        body = await request.body()
        message = await asyncio.to_thread(decode.pass_message, body)
        number = decode.number_of(message.seq_id, low=1)
        name = await service.accept(rest.owner(request), message.model_id, number, "pass", body)
        return JSONResponse({"request_id": name, "model_id": message.model_id})

    @router.post("/load_weights")
    async def load_weights(request: Request) -> JSONResponse:
        given = decode.of_type(types.LoadWeightsRequest, await request.body())
        if given.session_id is None:
            return await taken(request, "load_weights")
        name, run = await service.create_run_from(rest.owner(request), given)
        return JSONResponse({"request_id": name, "model_id": run})

    for kind in ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external"):
        router.add_route(f"{PREFIX}/{kind}", partial(taken, kind=kind), methods=["POST"])


def _add_sampling(router: APIRouter, service: TinkerService) -> None:
    async def asample(request: Request) -> JSONResponse:
        name, sequences = service.sample(rest.owner(request), sample_request(await request.body()))
        return JSONResponse({"request_id": name, "sample_sequence_ids": sequences})

    async def retrieve_future(request: Request) -> Response:
        given = decode.of_type(types.FutureRetrieveRequest, await request.body())
        return await _result(service, given, rest.owner(request))

    # plain routes: a client calls them for each sample
    router.add_route(f"{PREFIX}/asample", asample, methods=["POST"])
    router.add_route(f"{PREFIX}/retrieve_future", retrieve_future, methods=["POST"])

    @router.post("/create_sampling_session")
    async def create_sampling_session(request: Request) -> JSONResponse:
        given = decode.of_type(types.CreateSamplingSessionRequest, await request.body())
        name = await asyncio.to_thread(service.create_sampler, rest.owner(request), given)
        return JSONResponse({"sampling_session_id": name, "type": "create_sampling_session"})

    @router.post("/join_sampling_session")
    async def join_sampling_session(request: Request) -> JSONResponse:
        given = decode.of_type(types.JoinSamplingSessionRequest, await request.body())
        sampler = service.sampler(given.sampling_session_id, rest.owner(request))
        number = await asyncio.to_thread(service.registry.join, sampler)
        return JSONResponse({"type": "join_sampling_session", "client_counter": number})

    @router.post("/retrieve_futures")
    async def retrieve_futures(request: Request) -> JSONResponse:
        given = decode.of_type(types.FuturesRetrieveRequest, await request.body())
        sampler = service.sampler(given.target.sampling_session_id, rest.owner(request))
        for name in given.retrieved_request_ids:
            if service.futures.state(name, rest.owner(request)) is not None:
                service.futures.read(name)
        seconds = _POLL if given.timeout is None else min(max(given.timeout, 0.0), _POLL)
        target = sampler.name, given.target.cloned_sampler_id
        found, cursor = await service.completions.after(target, given.prev_cursor, seconds)
        ends = [
            {"state": "failed", "request_id": each.name}
            if each.size is None
            else {"state": "finished", "request_id": each.name, "response_payload_uncompressed_size": each.size}
            for each in found
        ]
        return JSONResponse({"completions": ends, "cursor": cursor})

    @router.post("/cancel_future")
    async def cancel_future(request: Request) -> Response:
        given = parsed(await request.body())
        service.cancel(str(given.get("request_id")), rest.owner(request))
        return Response(status_code=204)


async def _result(service: TinkerService, body: types.FutureRetrieveRequest, owner: str) -> Response:
    """The result of a request, once there is one; while there is none, "try again"."""
    name = body.request_id
    state = await service.futures.wait(name, owner, _POLL)
    if state is None:
        # a sample that was lost with an earlier server, or a result that was read long ago: clients send samples again
        known = service.knows(name, owner)
        text = f"the result of {printable(name, 120)} is not held"
        raise Refusal(
            f"{text}: send the request again" if known else f"{text}: there is no such request",
            status=410 if known else 404,
        )
    outcome = state.outcome
    if outcome is None:
        return JSONResponse({"type": "try_again", "request_id": name, "queue_state": "active"})
    if isinstance(outcome, Payload) and body.allow_metadata_only and len(outcome.body) > _INLINE:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": len(outcome.body)})
    service.futures.read(name)
    if isinstance(outcome, FailedRequest):
        return JSONResponse(error_of(outcome))
    return Response(outcome.body, media_type=PROTO if outcome.proto else "application/json")
