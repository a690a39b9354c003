"""The engines that settings name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import attrs

from fppo.assembly.parts import offload_of
from fppo.fields import only
from fppo.models.model import Model
from fppo.rollout.check import check_engine
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Engine
from fppo.rollout.spread import FetchingEngine, SpreadEngine
from fppo.runtime.mesh import Mesh
from fppo.runtime.offload import Lane
from fppo.settings.rollout import VllmSettings
from fppo.settings.train import TrainSettings
from fppo_kernels.record import Kernels

if TYPE_CHECKING:
    from fppo.rollout.vllm.engine import VllmEngine


@contextlib.contextmanager
def engine_of(
    settings: TrainSettings, model: Model, kernels: Kernels, pad_token_id: int, mesh: Mesh, lane: Lane
) -> Iterator[SpreadEngine]:
    """The engine that the settings name, on every rank, for as long as the context lasts."""
    idle = settings.rollout.from_ is not None and not settings.data.has_held_out  # nothing is ever asked of it
    by = lane if offload_of(settings, "actor") == "all" else None
    if settings.rollout.engine == "embedded" or idle:
        routed = settings.algorithm.router_replay == "rollout"
        yield embedded_engine(settings.rollout.cache_gb, model, kernels, pad_token_id, mesh, by, routed=routed)
        return
    with vllm_engine(settings.rollout.vllm, model, pad_token_id, mesh, settings.model.lora.send) as engine:
        yield SpreadEngine(engine=_fetching(engine, by), mesh=mesh, pad_token_id=pad_token_id)


def embedded_engine(
    cache_gb: float | None,
    model: Model,
    kernels: Kernels,
    pad_token_id: int,
    mesh: Mesh,
    lane: Lane | None,
    *,
    routed: bool,
) -> SpreadEngine:
    """The one that generates with the trainer's own parameters, on every rank; they come by the lane from the host, if
    there is one. Raises ValueError for a model that it cannot run."""
    check_engine(model)
    bound = None if cache_gb is None else round(cache_gb * 2**30)
    embedded = EmbeddedEngine(model=model, kernels=kernels, pad_token_id=pad_token_id, cache_bytes=bound, mesh=mesh)
    embedded = attrs.evolve(embedded, routed=routed)
    engine, together = _fetching(embedded, lane), embedded.together
    return SpreadEngine(engine=engine, mesh=mesh, pad_token_id=pad_token_id, together=together)


def _fetching(engine: Engine, lane: Lane | None) -> Engine:
    """The engine for parameters on the host, if there is a lane."""
    return engine if lane is None else FetchingEngine(engine=engine, lane=lane)


def vllm_engine(
    section: VllmSettings, model: Model, pad_token_id: int, mesh: Mesh, adapter: Literal["merged", "alone"] = "merged"
) -> VllmEngine:
    """A vLLM of its own, as the section says, to which an adapter goes so. Use it in a `with`, or close it."""
    from fppo.rollout.vllm.engine import VllmEngine  # here: it starts processes of another package

    return VllmEngine(
        model,
        pad_token_id=pad_token_id,
        mesh=mesh,
        options=attrs.evolve(section, adapter=adapter),
        bucket_bytes=section.bucket_mb << 20,
        **only(section, "send", "probe"),
    )
