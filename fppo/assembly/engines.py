"""The engines that settings name, and responses of several turns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import attrs
from transformers import PreTrainedTokenizerBase

from fppo.assembly.environments import environment_runner, prompt_encoder
from fppo.assembly.parts import offload_of
from fppo.assembly.texts import chat_options
from fppo.fields import only
from fppo.models.model import Model
from fppo.rollout.check import check_engine
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Engine
from fppo.rollout.spread import FetchingEngine, SpreadEngine
from fppo.rollout.turns import tools
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.games import Game
from fppo.rollout.turns.observations import PlainText, Within, chat_template
from fppo.rollout.turns.runner import ToolRunner
from fppo.runtime.mesh import Mesh
from fppo.runtime.offload import Lane
from fppo.settings.rollout import RolloutSettings, TurnsSettings, VllmSettings
from fppo.settings.train import DataSettings, TrainSettings
from fppo_kernels.table import Kernels

if TYPE_CHECKING:
    from fppo.rollout.vllm.engine import VllmEngine


@contextlib.contextmanager
def engine_of(
    settings: TrainSettings, model: Model, kernels: Kernels, pad_token_id: int, mesh: Mesh, lane: Lane
) -> Iterator[SpreadEngine]:
    """The engine that the settings name, on every rank, for as long as the context lasts."""
    idle = settings.rollout.from_ is not None and not settings.has_held_out  # nothing is ever asked of it
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


@contextlib.contextmanager
def in_turns(
    section: RolloutSettings,
    rows: DataSettings,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    pad_token_id: int,
    mesh: Mesh,
    *,
    vocabulary: int,
) -> Iterator[Engine]:
    """The engine with the settings' environment or tool, for as long as the context lasts; the engine itself without
    one. What the policy is told holds tokens below `vocabulary`.

    Raises ValueError if there is no such environment or tool, or the chat template does not take its messages.
    """
    turns = section.turns
    how = {**only(turns, "max_turns", "turn_tokens"), "pad_token_id": pad_token_id, "mesh": mesh}
    if section.environment.used:
        encode = chat_template(tokenizer, options=chat_options(rows)) if rows.chat else PlainText(tokenizer)
        with environment_runner(section.environment, turns) as player:
            yield TurnsEngine(
                engine=engine,
                tools=player,
                encode=Within(encode, vocabulary),
                tokenizer=tokenizer,
                prompt=prompt_encoder(tokenizer, rows, vocabulary),
                prompt_tokens=rows.max_prompt_tokens,
                **how,
            )
        return
    if turns.respond is None:
        yield engine
        return
    respond = tools.resolve(turns.respond)
    roles = ("tool",) if turns.failure else ()
    chat = rows.chat
    encode = chat_template(tokenizer, roles=roles, options=chat_options(rows)) if chat else PlainText(tokenizer)
    limits = only(turns, "failure", "time_limit", "workers")
    with ToolRunner(respond, **limits, inline=turns.respond in tools.TOOLS) as ready:
        yield TurnsEngine(
            engine=engine,
            tools=ready,
            encode=Within(encode, vocabulary),
            tokenizer=tokenizer,
            draws=respond.draws if isinstance(respond, Game) else None,
            **how,
        )


def game_of(turns: TurnsSettings) -> Game:
    """The game that answers the policy's turns. Raises ValueError if something else does."""
    name = str(turns.respond)
    game = tools.resolve(name)
    if not isinstance(game, Game):
        text = f"rollout.turns.respond = {name!r} is no rollout.Game, whose ways to be played are known"
        raise ValueError(f"eval.exact_values = True: {text}")
    return game
