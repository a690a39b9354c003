"""The engines that settings name, and responses of several turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from transformers import PreTrainedTokenizerBase

from fppo.assembly.environments import environment_runner, prompt_encoder
from fppo.assembly.inputs import Inputs
from fppo.assembly.parts import Tools
from fppo.assembly.texts import chat_options
from fppo.data import vocabulary_size
from fppo.environments.runner import PlayerRunner
from fppo.fields import WrongSetting, only
from fppo.fleet import Here
from fppo.models.model import Model
from fppo.rollout.check import check_engine
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Engine
from fppo.rollout.exact_probe import probe_exact
from fppo.rollout.interrupt import InterruptibleEngine
from fppo.rollout.pool import Generate
from fppo.rollout.spread import FetchingEngine, SpreadEngine
from fppo.rollout.turns import tools
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.games import Game
from fppo.rollout.turns.observations import ChatTemplate, Encode, PlainText, Within, chat_template
from fppo.rollout.turns.runner import ToolRunner
from fppo.runtime.mesh import Mesh
from fppo.runtime.offload import Lane
from fppo.settings.model import ModelSettings, params_on_host
from fppo.settings.rollout import RolloutSettings, TurnsSettings, VllmSettings
from fppo.settings.train import DataSettings

if TYPE_CHECKING:
    from fppo.rollout.vllm.engine import VllmEngine


@attrs.frozen(kw_only=True)
class EngineOptions:
    """How the engine of the policy's responses runs."""

    vllm: VllmSettings | None  # None: the embedded engine
    cache_bytes: int | None
    halve_on_oom: bool  # whether the embedded engine's rows are halved where they do not fit
    bucket_mb: int  # of parameters that are sent at once
    routed: bool  # whether it records the experts that routers choose
    exact: bool  # whether its log-probs are those of training, bit for bit
    draft_tokens: int  # the most tokens of a draft
    on_host: bool  # whether the policy's parameters wait on the host


def engine_options(section: RolloutSettings, model: ModelSettings, *, routed: bool, held_out: bool) -> EngineOptions:
    """The options of the settings' engine, which records routers' choices if `routed`. vLLM is not used if all rollouts
    are read from files and no prompts are `held_out`."""
    used = section.engine == "vllm" and (section.from_ is None or held_out)
    return EngineOptions(
        vllm=attrs.evolve(section.vllm, adapter=model.lora.send) if used else None,
        cache_bytes=section.cache_bytes,
        halve_on_oom=section.cache_gb == "auto",
        bucket_mb=section.vllm.bucket_mb,
        routed=routed,
        exact=section.exact,
        draft_tokens=section.draft_tokens,
        on_host=params_on_host(model.offload),
    )


@contextlib.contextmanager
def engine_of(options: EngineOptions, model: Model, pad_token_id: int, mesh: Mesh, tools: Tools) -> Iterator[Engine]:
    """Yield the engine that `options` describe, on every rank; a vLLM engine is closed when the context ends."""
    if options.vllm is None:
        yield embedded_engine(options, model, pad_token_id, mesh, tools)
        return
    with vllm_engine(options.vllm, model, pad_token_id, mesh) as engine:
        lane = tools.lane if options.on_host else None
        yield SpreadEngine(engine=_fetching(engine, lane), mesh=mesh, pad_token_id=pad_token_id)


def embedded_engine(options: EngineOptions, model: Model, pad_token_id: int, mesh: Mesh, tools: Tools) -> SpreadEngine:
    """The embedded engine, on every rank: it uses the trainer's own parameters, and fetches them if they are on the
    host.

    Raises ValueError for a model that it cannot run, and for an exact engine if this machine cannot be exact.
    """
    check_engine(model)
    embedded = EmbeddedEngine(
        model=model,
        kernels=tools.kernels,
        pad_token_id=pad_token_id,
        cache_bytes=options.cache_bytes,
        halve_on_oom=options.halve_on_oom,
        mesh=mesh,
        routed=options.routed,
        exact=options.exact,
        draft_tokens=options.draft_tokens,
    )
    if options.exact:
        probe_exact(model, tools.kernels, tools.lane.device)
    engine = _fetching(embedded, tools.lane if options.on_host else None)
    return SpreadEngine(engine=engine, mesh=mesh, pad_token_id=pad_token_id, together=embedded.together)


def make_engine(
    here: Here, begin: Callable[[Here], Tools], options: EngineOptions, model: Model, pad_token_id: int
) -> Generate:
    """Make an embedded engine on a rank of the actor; returns its `generate`. `begin` makes this process's tools."""
    return embedded_engine(options, model, pad_token_id, here.mesh, begin(here)).generate


def make_engine_of_pool(
    here: Here,
    begin: Callable[[Here], Tools],
    load: Callable[[Mesh, torch.device], Model],
    options: EngineOptions,
    pad_token_id: int,
) -> Generate:
    """Make an engine on a rank of its own, to which the actor's parameters are sent; returns its `generate`. `begin`
    makes the tools of this process, and `load` the model."""
    tools = begin(here)
    model = load(here.mesh, here.device if options.vllm is None else torch.device("cpu"))  # where parameters arrive
    if options.vllm is not None:
        return vllm_engine(options.vllm, model, pad_token_id, here.mesh).generate
    return embedded_engine(attrs.evolve(options, on_host=False), model, pad_token_id, here.mesh, tools).generate


def _fetching(engine: Engine, lane: Lane | None) -> Engine:
    """Wrap the engine to fetch parameters from the host, if there is a lane."""
    return engine if lane is None else FetchingEngine(engine=engine, lane=lane)


def vllm_engine(section: VllmSettings, model: Model, pad_token_id: int, mesh: Mesh) -> VllmEngine:
    """A new vLLM engine with the section's options. Use it in a `with`, or close it."""
    from fppo.rollout.vllm.engine import VllmEngine  # here: it starts processes of another package

    return VllmEngine(
        model,
        pad_token_id=pad_token_id,
        mesh=mesh,
        options=section,
        bucket_bytes=section.bucket_mb << 20,
        **only(section, "send", "probe"),
    )


@contextlib.contextmanager
def answering(inputs: Inputs, engine: Engine, pad_token_id: int, mesh: Mesh) -> Iterator[Engine]:
    """Yield the engine that samples the run's responses. If the settings name an agent, environment or tool, it samples
    them in turns with that one; else it is `engine`. If `rollout.interrupt` is set, it takes newer weights between the
    pieces of a response. The agent, environment or tool runs until the context ends.

    Raises ValueError if there is no such environment or tool, or the chat template does not take its messages.
    """
    rollout, rows, tokenizer = inputs.settings.rollout, inputs.settings.data, inputs.tokenizer
    turns, environment, vocabulary = rollout.turns, rollout.environment, vocabulary_size(inputs.config)
    how = {**only(turns, "max_turns", "turn_tokens", "thinking"), "pad_token_id": pad_token_id, "mesh": mesh}
    with contextlib.ExitStack() as opened:
        if environment.is_agent:
            from fppo.assembly.agents import agent_engine  # here: it takes a server's packages

            engine = opened.enter_context(agent_engine(inputs, engine, pad_token_id, mesh))
        elif environment.used:
            encode = _turn_encoder(tokenizer, rows)
            engine = TurnsEngine(
                engine=engine,
                tools=opened.enter_context(environment_runner(environment, turns)),
                encode=Within(encode, vocabulary),
                tokenizer=tokenizer,
                prompt=prompt_encoder(tokenizer, encode, vocabulary),
                prompt_tokens=rows.max_prompt_tokens,
                failure=environment.failure,
                **how,
            )
        elif turns.respond is not None:
            respond = tools.resolve(turns.respond)
            encode = _turn_encoder(tokenizer, rows, roles=("tool",) if turns.failure else ())
            if turns.thinking == "drop":
                _check_thinking_drop(encode, tokenizer)
            engine = TurnsEngine(
                engine=engine,
                tools=opened.enter_context(_tool_runner(respond, turns)),
                encode=Within(encode, vocabulary),
                tokenizer=tokenizer,
                prompt=prompt_encoder(tokenizer, encode, vocabulary),
                draws=respond.draws if isinstance(respond, Game) else None,
                **how,
            )
        if rollout.interrupt:
            engine = InterruptibleEngine(engine=engine, every=rollout.interrupt, pad_token_id=pad_token_id)
        yield engine


def _turn_encoder(tokenizer: PreTrainedTokenizerBase, rows: DataSettings, *, roles: Sequence[str] = ()) -> Encode:
    """The encoder of messages of these roles that follow a turn: by the chat template, or as plain text."""
    if not rows.chat:
        return PlainText(tokenizer)
    return chat_template(tokenizer, roles=roles, options=chat_options(rows))


def _tool_runner(respond: tools.Respond, turns: TurnsSettings) -> PlayerRunner:
    """The runner of a tool, with the settings' limits."""
    limits = only(turns, "failure", "time_limit", "workers", "concurrency", "retries")
    return ToolRunner(respond, **limits, inline=turns.respond in tools.TOOLS)


def _check_thinking_drop(encode: Encode, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that `rollout.turns.thinking = "drop"`, which leaves out earlier thoughts, can work with this chat
    template.

    Raises WrongSetting, a ValueError, if the template shows a tool's message only after the call that it answers, and
    the tokenizer has no response template with which to find the calls in a turn.
    """
    calls = isinstance(encode, ChatTemplate) and encode.behind_calls
    if calls and getattr(tokenizer, "response_template", None) is None:
        text = "the chat template shows a tool's message behind a call alone, and the tokenizer has no"
        text = f"{text} response_template, which would read calls in turns; give keep"
        raise WrongSetting("rollout.turns.thinking", "drop", text)


def game_of(turns: TurnsSettings) -> Game:
    """The game named by `rollout.turns.respond`, which answers the policy's turns. Raises ValueError if that setting
    names anything but a game."""
    name = str(turns.respond)
    game = tools.resolve(name)
    if not isinstance(game, Game):
        text = f"rollout.turns.respond = {name!r} is no rollout.Game, whose ways to be played are known"
        raise ValueError(f"eval.exact_values = True: {text}")
    return game
