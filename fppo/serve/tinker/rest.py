"""The protocol's routes for looking at what a server holds: runs, checkpoints, sessions, samplers, files."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import urllib.parse
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from fppo._errors import printable
from fppo.serve.app import OWNER
from fppo.serve.protocol import parsed
from fppo.serve.refusal import Refusal
from fppo.serve.tinker import decode
from fppo.serve.tinker.checkpoints import KINDS, CheckpointMeta, Kind, time_of
from fppo.serve.tinker.service import TinkerService
from fppo.serve.tinker.sessions import ClientSession
from fppo.serve.tinker.training import RunInfo

T = TypeVar("T")
FILES = "/files"
_SIGNED = 3600  # seconds that an address of a file is good for
_PAGE = 1000  # entries of a list at most
# routes of the service that make no sense on one's own machine, and what to do
_ELSEWHERE = {
    ("POST", "/auth/token"): "keys are given as they are",
    ("POST", "/copy_weights"): "load the checkpoint itself: another key's must be published",
    ("GET", "/sessions/{session}/trace_export"): "this server records no traces",
    ("PUT", "/sessions/{session}/project"): "this server has no projects",
    ("GET", "/billing/usage/events"): "this server costs nothing",
    ("GET", "/billing/usage/checkpoints/current"): "list_user_checkpoints has the sizes",
    ("GET", "/audit"): "this server keeps no audit log",
}


def add_routes(router: APIRouter, service: TinkerService) -> None:
    """Add the routes."""
    _add_runs(router, service)
    _add_sessions(router, service)
    _add_checkpoints(router, service)
    _add_weights_info(router, service)
    _add_files(router, service)
    for (method, path), advice in _ELSEWHERE.items():
        router.add_api_route(path, _elsewhere(path, advice), methods=[method], response_model=None)


def _elsewhere(path: str, advice: str) -> Any:
    async def refuse() -> Response:
        raise Refusal(f"{path}: {advice}", status=404)

    return refuse


def owner(request: Request) -> str:
    """The owner of the key that a request came with."""
    return request.scope[OWNER]


def _page(request: Request, entries: Sequence[T]) -> tuple[list[T], dict[str, int]]:
    """A page of a list, and the protocol's cursor."""
    numbers: dict[str, int] = {}
    for name, default in (("limit", 20), ("offset", 0)):
        given = request.query_params.get(name, str(default))
        if not given.isdecimal() or len(given) > 9:
            raise decode.refused(name, f"{printable(given, 40)!r}: give a number")
        numbers[name] = int(given)
    limit, offset = min(numbers["limit"], _PAGE), numbers["offset"]
    return list(entries[offset : offset + limit]), {"offset": offset, "limit": limit, "total_count": len(entries)}


def info_of(info: RunInfo, service: TinkerService) -> dict[str, Any]:
    """The protocol's `GetInfoResponse`."""
    base = service.base(info.base).base
    data = {"model_name": base.name, "arch": base.model.config.model_type, "tokenizer_id": base.tokenizer_id}
    return {
        "type": "get_info",
        "model_id": info.name,
        "model_name": base.name,
        "model_data": data,
        "is_lora": bool(info.adapters.rank),
        "lora_rank": info.adapters.rank or None,
        "optimizer_config": {"type": info.optimizer},
    }


def _run_of(info: RunInfo, service: TinkerService) -> dict[str, Any]:
    """The protocol's `TrainingRun`."""
    found = service.checkpoints.of_run(info.name)

    def last(kind: Kind) -> dict[str, Any] | None:
        return next((each.to_json() for each in reversed(found) if each.kind == kind), None)

    return {
        "training_run_id": info.name,
        "base_model": info.base,
        "model_owner": info.owner,
        "is_lora": bool(info.adapters.rank),
        "lora_rank": info.adapters.rank or None,
        "last_request_time": time_of(service.runs.last_request(info.name)),
        "last_checkpoint": last("weights"),
        "last_sampler_checkpoint": last("sampler_weights"),
        "user_metadata": None if info.metadata is None else dict(info.metadata),
    }


def _add_runs(router: APIRouter, service: TinkerService) -> None:
    @router.get("/training_runs")
    async def training_runs(request: Request) -> JSONResponse:
        page, cursor = _page(request, service.runs.infos(owner(request)))
        shown = await asyncio.to_thread(lambda: [_run_of(info, service) for info in page])
        return JSONResponse({"training_runs": shown, "cursor": cursor})

    @router.get("/training_runs/{run}")
    async def training_run(run: str, request: Request) -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(_run_of, service.runs.info(run, owner(request)), service))


def _add_sessions(router: APIRouter, service: TinkerService) -> None:
    registry = service.registry

    @router.get("/sessions")
    async def sessions(request: Request) -> JSONResponse:
        page, _ = _page(request, registry.sessions(owner(request)))
        return JSONResponse({"sessions": [each.name for each in page]})

    @router.post("/sessions/search")
    async def search(request: Request) -> JSONResponse:
        fields = parsed(await request.body())
        found = [each for each in registry.sessions(owner(request)) if _matches(each, fields)]
        limit = decode.number_of(fields.get("limit", 50), "limit", low=1)
        return JSONResponse({"sessions": [_summary(each, service) for each in found[: min(limit, 200)]]})

    @router.get("/sessions/{session}")
    async def one(session: str, request: Request) -> JSONResponse:
        found = registry.any_session(session, owner(request))
        owned = [info.name for info in service.runs.infos(owner(request)) if info.session == found.name]
        return JSONResponse(
            {
                "training_run_ids": sorted(owned),
                "sampler_ids": sorted(each.name for each in registry.samplers_of(found.name)),
                "user_metadata": None if found.metadata is None else dict(found.metadata),
                "display_name": found.display_name,
            }
        )

    @router.get("/samplers/{sampler}")
    async def sampler(sampler: str, request: Request) -> JSONResponse:
        found = registry.sampler(sampler, owner(request))
        return JSONResponse({"sampler_id": found.name, "base_model": found.base, "model_path": found.path})


def _matches(session: ClientSession, fields: dict[str, Any]) -> bool:
    named, words = fields.get("session_id"), str(fields.get("display_name") or "").lower().split()
    wanted = fields.get("user_metadata") or {}
    shown = (session.display_name or "").lower()
    by_name = bool(words) and all(word in shown for word in words)
    if (named is not None or words) and not (session.name == named or by_name):
        return False
    own = session.metadata or {}
    return isinstance(wanted, dict) and all(own.get(name) == value for name, value in wanted.items())


def _summary(session: ClientSession, service: TinkerService) -> dict[str, Any]:
    """The protocol's `SessionSummary`."""
    status = {"type": "active"}
    if session.finished is not None:
        status = {"type": "client_finished", "reason": {"type": session.finished}}
    names = [info.name for info in service.runs.infos(session.owner) if info.session == session.name]
    found = [each for name in names for each in service.checkpoints.of_run(name)]
    return {
        "session_id": session.name,
        "created_at": time_of(session.created),
        "owner": session.owner,
        "project_id": "",
        "status": status,
        "checkpoints_count": len(found),
        "display_name": session.display_name,
        "user_metadata": None if session.metadata is None else dict(session.metadata),
        "checkpoint_storage_bytes": sum(each.size for each in found),
    }


def _kind(kind: str) -> Kind:
    if kind not in KINDS:
        raise Refusal(f"{printable(kind, 40)!r} is no kind of checkpoint; there are {', '.join(KINDS)}", status=404)
    return kind  # pyright: ignore[reportReturnType]


def _add_checkpoints(router: APIRouter, service: TinkerService) -> None:
    store = service.checkpoints
    one = "/training_runs/{run}/checkpoints/{kind}/{name}"

    def own(run: str, kind: str, name: str, request: Request) -> CheckpointMeta:
        return store.own(run, _kind(kind), name, owner(request))

    @router.get("/checkpoints")
    async def all_of_owner(request: Request) -> JSONResponse:
        found = await asyncio.to_thread(store.of_owner, owner(request))
        page, cursor = _page(request, found)
        return JSONResponse({"checkpoints": [each.to_json() for each in page], "cursor": cursor})

    @router.get("/training_runs/{run}/checkpoints")
    async def of_run(run: str, request: Request) -> JSONResponse:
        service.runs.info(run, owner(request))
        found = await asyncio.to_thread(store.of_run, run)
        return JSONResponse({"checkpoints": [each.to_json() for each in found]})

    @router.delete(one)
    async def delete(run: str, kind: str, name: str, request: Request) -> Response:
        await asyncio.to_thread(store.delete, own(run, kind, name, request))
        return Response(status_code=204)

    @router.post(f"{one}/publish")
    async def publish(run: str, kind: str, name: str, request: Request) -> Response:
        meta = own(run, kind, name, request)
        await asyncio.to_thread(store.change, meta, public=True, expires=meta.expires)
        return Response(status_code=204)

    @router.delete(f"{one}/publish")
    async def unpublish(run: str, kind: str, name: str, request: Request) -> Response:
        meta = own(run, kind, name, request)
        await asyncio.to_thread(store.change, meta, public=False, expires=meta.expires)
        return Response(status_code=204)

    @router.put(f"{one}/ttl")
    async def ttl(run: str, kind: str, name: str, request: Request) -> Response:
        meta = own(run, kind, name, request)
        given = parsed(await request.body()).get("ttl_seconds")
        if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
            raise decode.refused("ttl_seconds", f"{given!r}: give seconds, or null for none")
        seconds = decode.seconds_of(given)
        expires = None if seconds is None else service.clock() + seconds
        await asyncio.to_thread(store.change, meta, public=meta.public, expires=expires)
        return Response(status_code=204)


def _add_weights_info(router: APIRouter, service: TinkerService) -> None:
    @router.post("/weights_info")
    async def weights_info(request: Request) -> JSONResponse:
        path = parsed(await request.body()).get("tinker_path")
        meta = service.checkpoints.find(str(path), owner(request))
        adapters = meta.adapters
        lora = {"train_unembed": adapters.unembed, "train_mlp": adapters.mlp, "train_attn": adapters.attention}
        return JSONResponse(
            {
                "base_model": meta.base,
                "optimizer_config": {"type": meta.optimizer},
                "is_lora": bool(adapters.rank),
                "lora_rank": adapters.rank or None,
                **(lora if adapters.rank else {}),
            }
        )


def _add_files(router: APIRouter, service: TinkerService) -> None:
    """Files of external weights, at addresses that are good for an hour and need no key."""
    store, secret = service.checkpoints, secrets.token_bytes(32)

    def signed(path: str, expires: int) -> str:
        return hmac.new(secret, f"{expires}:{path}".encode(), hashlib.sha256).hexdigest()

    @router.get("/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")
    async def urls(run: str, kind: str, name: str, request: Request) -> JSONResponse:
        meta = store.own(run, _kind(kind), name, owner(request))
        if meta.kind != "external_weights":
            raise Refusal(f"{meta.path} has no files for other programs: save_weights_external makes them")
        root, expires = store.data(meta) / "files", int(service.clock()) + _SIGNED
        addresses: dict[str, str] = {}
        for path in sorted(each for each in root.rglob("*") if each.is_file()):
            inner = path.relative_to(root).as_posix()
            place = f"{run}/{name}/{inner}"
            quoted = urllib.parse.quote(place, safe="/:")
            start = str(request.base_url).rstrip("/")
            addresses[inner] = f"{start}/api/v1{FILES}/{quoted}?expires={expires}&signature={signed(place, expires)}"
        return JSONResponse({"urls": addresses, "expires": time_of(expires)})

    @router.get(FILES + "/{run}/{name}/{inner:path}")
    async def file(run: str, name: str, inner: str, request: Request) -> Response:
        given, expires = request.query_params.get("signature", ""), request.query_params.get("expires", "")
        if not expires.isdecimal() or len(expires) > 12 or int(expires) < service.clock():
            raise Refusal("the address of this file is no longer good: get a new one", status=403)
        if not hmac.compare_digest(given.encode(), signed(f"{run}/{name}/{inner}", int(expires)).encode()):
            raise Refusal("the address of this file is not one of this server's", status=403)
        meta = store.get(run, "external_weights", name)
        root = None if meta is None else (store.data(meta) / "files").resolve()
        path = None if root is None else (root / inner).resolve()
        if root is None or path is None or not path.is_relative_to(root) or not path.is_file():
            raise Refusal("there is no such file", status=404)
        return FileResponse(path)
