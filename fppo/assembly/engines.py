"""The engines that settings name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import attrs

from fppo.assembly.parts import offload_of
from fppo.models.model import Model
from fppo.rollout.check import check_engine
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Engine
from fppo.rollout.spread import FetchingEngine, SpreadEngine
from fppo.runtime.mesh import Mesh
from fppo.runtime.offload import Lane
from fppo.settings.checks_data import has_held_out
from fppo.settings.train import TrainSettings
from fppo.settings.vllm import VllmSettings
from fppo_kernels.table import Kernels

if TYPE_CHECKING:
    from fppo.rollout.vllm.engine import VllmEngine


@contextlib.contextmanager
def engine_of(
    settings: TrainSettings, model: Model, kernels: Kernels, pad_token_id: int, mesh: Mesh, lane: Lane
) -> Iterator[SpreadEngine]:
    """The engine that the settings name, on every rank, for as long as the context lasts."""
    idle = settings.rollout.from_ is not None and not has_held_out(settings)  # nothing is ever asked of it
    if settings.rollout.engine == "embedded" or idle:
        yield embedded_engine(settings, model, kernels, pad_token_id, mesh, lane)
        return
    with vllm_engine(settings.rollout.vllm, model, pad_token_id, mesh, settings.model.lora.send) as engine:
        yield SpreadEngine(engine=_fetching(settings, engine, lane), mesh=mesh, pad_token_id=pad_token_id)


def embedded_engine(
    settings: TrainSettings, model: Model, kernels: Kernels, pad_token_id: int, mesh: Mesh, lane: Lane
) -> SpreadEngine:
    """The one that generates with the trainer's own parameters, on every rank. Raises ValueError for a model that it
    cannot run."""
    check_engine(model)
    bound = None if (size := settings.rollout.cache_gb) is None else round(size * 2**30)
    embedded = EmbeddedEngine(model=model, kernels=kernels, pad_token_id=pad_token_id, cache_bytes=bound, mesh=mesh)
    embedded = attrs.evolve(embedded, routed=settings.algorithm.router_replay == "rollout")
    engine, together = _fetching(settings, embedded, lane), embedded.together
    return SpreadEngine(engine=engine, mesh=mesh, pad_token_id=pad_token_id, together=together)


def _fetching(settings: TrainSettings, engine: Engine, lane: Lane) -> Engine:
    """The engine for parameters where the settings have them."""
    return FetchingEngine(engine=engine, lane=lane) if offload_of(settings, "actor") == "all" else engine


def vllm_engine(
    section: VllmSettings, model: Model, pad_token_id: int, mesh: Mesh, adapter: Literal["merged", "alone"] = "merged"
) -> VllmEngine:
    """A vLLM of its own, as the section says, to which an adapter goes so. Use it in a `with`, or close it."""
    from fppo.rollout.vllm.engine import VllmEngine, VllmOptions  # here: it starts processes of another package

    options = VllmOptions(
        max_model_len=section.max_model_len,
        max_rows=section.max_rows,
        cache_gb=section.cache_gb,
        memory_share=section.memory_share,
        dtype=section.dtype,
        eager=section.eager is not False,
        prefix_cache=section.prefix_cache,
        sleep=section.sleep,
        host=section.host,
        cluster=section.cluster,
        tensor_parallel=section.tensor_parallel,
        devices=section.devices,
        transport=section.transport,
        restarts=section.restarts,
        patience=section.patience,
        start_patience=section.start_patience,
        adapter=adapter,
        extra=section.extra,
    )
    return VllmEngine(
        model,
        pad_token_id=pad_token_id,
        mesh=mesh,
        options=options,
        bucket_bytes=section.bucket_mb << 20,
        send=section.send,
        probe=section.probe,
    )
