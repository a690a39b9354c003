"""The roles of a run, each made where it runs: its state, and its stages bound to model, kernels and mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import attrs
import torch
from transformers.utils import logging as transformers_logging

from fppo import tree
from fppo.assembly.adapters import adapted_critic, base_of_role, load_policy, policy_model
from fppo.assembly.engines import embedded_engine, vllm_engine
from fppo.assembly.optimizers import optimizer_for
from fppo.assembly.parts import (
    Offload,
    Role,
    forward_micro_batching_of,
    kernels_of,
    load_reference,
    offload_of,
    on_device,
    value_head_of,
)
from fppo.assembly.program import actor_update, critic_update
from fppo.assembly.texts import load_tokenizer, vocabulary_size_of
from fppo.data import with_truth
from fppo.data.tokenizers import within
from fppo.fleet import HERE, AnyGroup, Group, Here, LocalGroup, Stays, at_once, on
from fppo.metrics import Metrics
from fppo.models.model import Model, Params
from fppo.pipeline.passes import (
    ConfidenceFn,
    Fetch,
    HiddenFn,
    Passes,
    PolicyFn,
    PolicyPass,
    TruthSigns,
    ValueFn,
    ValuePass,
    View,
    balance_of,
)
from fppo.pipeline.program import Base, Together, UpdateStage, in_turn
from fppo.rollout.pool import Generate
from fppo.runtime.offload import Lane, OnHost, to_host
from fppo.settings.train import TrainSettings
from fppo.steps.clock import Clock
from fppo.steps.confidence import confidence_values
from fppo.steps.hidden import hidden_values
from fppo.steps.loss_scale import loss_scaled
from fppo.steps.optimizers import Optimizer
from fppo.steps.outputs import Forward
from fppo.steps.popart import UpdatePopart
from fppo.steps.recorded import Recorder, graphs, records
from fppo.steps.shared import SortedRows
from fppo.steps.train_state import Scale, TrainState, init_state
from fppo.tree import state
from fppo.workers.imports import search
from fppo_kernels.table import Kernels


@attrs.frozen
class Tools:
    """The kernels and the lane of copies that all roles of one process use."""

    kernels: Kernels
    lane: Lane


@state
class Actor:
    """The policy that is trained."""

    state: TrainState
    update: UpdateStage
    policy: PolicyFn
    balance: Callable[[SortedRows], Metrics]
    model: Model


@state
class Reference:
    """The policy that it is compared with."""

    params: Params
    policy: PolicyFn
    model: Model


@state
class Critic:
    """The critic trained beside the policy: a model, or a reading of the policy's confidence or hidden states."""

    state: TrainState
    update: UpdateStage
    values: ValueFn | None = None
    confidence: ConfidenceFn | None = None
    hidden: HiddenFn | None = None
    model: Model | None = None


def make_actor(here: Here, settings: TrainSettings, tools: Tools | None = None) -> Actor:
    """The policy on a rank, before its first update."""
    tools = tools or _tools(here, settings)
    model, params = load_policy(settings, here.mesh, here.device)
    optimizer = _scaled(optimizer_for(settings, "actor", tools.kernels, tools.lane), model)
    forward, replay = _forward(here, settings, model, tools), settings.algorithm.router_replay == "rollout"
    record, fetch = _recorder(here, settings, model), _fetch(settings, "actor", tools.lane)
    return Actor(
        state=_state(params, optimizer, offload_of(settings, "actor")),
        update=actor_update(settings, forward, optimizer, tools.lane, record),
        policy=_policy_pass(settings, attrs.evolve(forward, replay=replay), fetch, record),
        balance=partial(balance_of, forward=forward),
        model=model,
    )


def make_reference(
    here: Here,
    settings: TrainSettings,
    tools: Tools | None = None,
    model: Model | None = None,
    params: Params | None = None,
) -> Reference:
    """The reference on a rank. `model` and `params` are the policy's before its first update, if they are there too.

    Of an adapted policy it is the policy as it starts: the base, which costs nothing, with a copy of the adapter where
    that is no fresh one, unless the settings name another.
    """
    tools = tools or _tools(here, settings)
    if model is None and settings.model.lora.used and settings.model.ref_path is None:
        model, params = load_policy(settings, here.mesh, here.device)
    policy = None if model is None or params is None else (model, params)
    model, params = load_reference(settings, here.mesh, policy)
    params = on_device(params, here.device)
    forward = attrs.evolve(_forward(here, settings, model, tools), replay=settings.algorithm.router_replay == "all")
    return Reference(
        params=to_host(params) if offload_of(settings, "ref") == "all" else params,
        policy=_policy_pass(settings, forward, _fetch(settings, "ref", tools.lane), _recorder(here, settings, model)),
        model=model,
    )


def make_critic(here: Here, settings: TrainSettings, tools: Tools | None = None, policy: Model | None = None) -> Critic:
    """The critic on a rank, before its first update. The `policy`, if it is there, may lend it its base."""
    tools = tools or _tools(here, settings)
    model, params = adapted_critic(settings, policy, here.mesh, here.device)
    optimizer = _scaled(optimizer_for(settings, "critic", tools.kernels, tools.lane), model)
    read = value_head_of(settings).read
    forward = None if model is None else attrs.evolve(_forward(here, settings, model, tools), read=read)
    fetch, micro_batching = _fetch(settings, "critic", tools.lane), forward_micro_batching_of(settings)
    view, record = _view(settings), None if model is None else _recorder(here, settings, model)
    state = _state(params, optimizer, offload_of(settings, "critic"))
    update = critic_update(settings, forward, optimizer, tools.lane, view=view, record=record)
    if rate := settings.critic.popart:
        state, update = tree.replace(state, scale=Scale()), UpdatePopart(stage=update, rate=rate)
    how = {"micro_batching": micro_batching, "fetch": fetch, "view": view, "record": record}
    return Critic(
        state=state,
        update=update,
        values=None if forward is None else ValuePass(forward=forward, **how),
        confidence=partial(confidence_values, read=read) if settings.critic.reads == "confidence" else None,
        hidden=partial(hidden_values, read=read) if settings.critic.reads == "hidden" else None,
        model=model,
    )


def make_engine(here: Here, settings: TrainSettings, tools: Tools | None, model: Model, pad_token_id: int) -> Generate:
    """The function that generates on a rank, by the model of the policy there, with the policy's own parameters."""
    tools = tools or _tools(here, settings)
    lane = tools.lane if offload_of(settings, "actor") == "all" else None
    size, routed = settings.rollout.cache_gb, settings.algorithm.router_replay == "rollout"
    return embedded_engine(size, model, tools.kernels, pad_token_id, here.mesh, lane, routed=routed).generate


def make_engine_of_pool(here: Here, settings: TrainSettings, pad_token_id: int) -> Generate:
    """The function that generates on a rank reserved for generation, with parameters passed to it."""
    tools, vllm = _tools(here, settings), settings.rollout.engine == "vllm"
    model = policy_model(settings, here.mesh, torch.device("cpu") if vllm else here.device)  # where parameters come
    if vllm:
        return vllm_engine(settings.rollout.vllm, model, pad_token_id, here.mesh, settings.model.lora.send).generate
    size, routed = settings.rollout.cache_gb, settings.algorithm.router_replay == "rollout"
    return embedded_engine(size, model, tools.kernels, pad_token_id, here.mesh, None, routed=routed).generate


@attrs.frozen(kw_only=True)
class Roles:
    """All roles of a run, and the group of each: their leaves are handles where that is not this process."""

    actor: Actor
    reference: Reference | None
    critic: Critic | None
    at: Mapping[str, AnyGroup]

    @property
    def others(self) -> list[str]:
        """The names of the roles beside the actor."""
        return [name for name in ("critic", "reference") if getattr(self, name) is not None]

    @property
    def placed(self) -> bool:
        """Whether some are not in this process."""
        return any(isinstance(group, Group) for group in self.at.values())

    @property
    def together(self) -> Together:
        """How stages of several roles run."""
        return at_once if self.placed else in_turn

    def passes(self, truth_signs: TruthSigns | None = None) -> Passes:
        """The passes over a batch that they make; what a critic without a model knows of the truth is made here."""
        actor, critic = self.actor, self.critic
        reference, beside = (actor, "actor") if self.reference is None else (self.reference, "reference")
        alone = isinstance(group := self.at["actor"], Group) and group.ranks == 1
        return Passes(
            policy=self._on("actor", actor.policy, "old_log_prob"),
            reference=self._on(beside, reference.policy, "ref"),
            values=critic and critic.values and self._on("critic", critic.values, "values"),
            confidence=critic and critic.confidence and self._on("critic", critic.confidence, "values"),
            hidden=critic and critic.hidden and self._on("critic", critic.hidden, "values"),
            truth_signs=truth_signs,
            **({} if alone else {"balance": self._on("actor", actor.balance, "balance")}),
        )

    def update_actor(self) -> UpdateStage:
        """The actor's update where it is."""
        return self._on("actor", self.actor.update, "update_actor", stays=(0,))

    def update_critic(self) -> UpdateStage | None:
        """The critic's update where it is."""
        return self.critic and self._on("critic", self.critic.update, "update_critic", stays=(0,))

    def bases(self, settings: TrainSettings) -> dict[str, Base | None]:
        """The bases under the adapters of actor and critic."""
        models = (
            {"actor": self.actor.model, "critic": self.critic and self.critic.model} if settings.model.lora.used else {}
        )
        of = partial(base_of_role, settings.model)
        return {role: self._on(role, of, "base")(role, model) for role, model in models.items()}

    def hold(self) -> Callable[[Params], Params]:
        """Copies the policy where it is."""
        return self._on("actor", tree.copy, "hold", stays=True)

    def _on(self, role: str, fn: Any, label: str, *, stays: Stays = ()) -> Any:
        return on(self.at[role], fn, stays=stays, label=label)


def make_roles(
    settings: TrainSettings, tools: Tools, local: LocalGroup, groups: Mapping[str, AnyGroup] = MappingProxyType({})
) -> Roles:
    """All of them, each on its group, or in this process without one; the reference beside the actor without one."""
    at = {role: groups.get(role, local) for role in ("actor", "critic")}
    at["reference"] = groups.get("reference", at["actor"])

    def make(role: str, fn: Callable[..., Any], *more: Any) -> Any:
        own = tools if isinstance(at[role], LocalGroup) else None
        return at[role].call(fn, HERE, settings, own, *more, stays=True, label=f"make {role}")

    work = {"actor": partial(make, "actor", make_actor)}
    beside = at["critic"] is at["actor"] and settings.model.lora.of_critic  # on the actor's base
    if settings.algorithm.uses_critic and not beside:
        work["critic"] = partial(make, "critic", make_critic)
    made = (at_once if groups else in_turn)(work)
    actor, reference = made["actor"], None
    if settings.algorithm.uses_critic and "critic" not in made:
        made["critic"] = make("critic", make_critic, actor.model)
    if settings.uses_reference:
        own = (actor.model, actor.state.params) if at["reference"] is at["actor"] else ()
        reference = make("reference", make_reference, *own)
    return Roles(actor=actor, reference=reference, critic=made.get("critic"), at=at)


def _tools(here: Here, settings: TrainSettings) -> Tools:
    """Create this process's kernels and transfer lane, where functions of the user's are not found yet either."""
    search(settings.module_dirs)
    transformers_logging.disable_progress_bar()  # the controller speaks
    return Tools(kernels_of(settings), Lane(here.device))


def _fetch(settings: TrainSettings, role: Role, lane: Lane) -> Fetch:
    """How passes without a gradient get at a role's parameters, which the settings may keep on the host."""
    on_host = offload_of(settings, role) == "all"
    return lambda params: OnHost(params, lane) if on_host else params


def _forward(here: Here, settings: TrainSettings, model: Model, tools: Tools) -> Forward:
    """A model bound to the kernels and the mesh of its passes. Recorded ones share prompts only if settings insist."""
    share = settings.model.share_prompts
    return Forward(
        model,
        tools.kernels,
        here.mesh,
        remove_padding=settings.model.remove_padding,
        share_prompts=False if share == "auto" and _records(here, settings, model) else share,
    )


def _recorder(here: Here, settings: TrainSettings, model: Model) -> Recorder | None:
    """Records passes as CUDA graphs where the settings say so, on a GPU, of a model that can be; None elsewhere."""
    return graphs(model, here.device) if _records(here, settings, model) else None


def _records(here: Here, settings: TrainSettings, model: Model) -> bool:
    return settings.model.graphs is True and here.device.type == "cuda" and records(model, here.mesh)


def _policy_pass(settings: TrainSettings, forward: Forward, fetch: Fetch, record: Recorder | None) -> PolicyPass:
    return PolicyPass(
        forward=forward,
        micro_batching=forward_micro_batching_of(settings),
        temperature=settings.rollout.temperature,
        fetch=fetch,
        record=record,
    )


def _view(settings: TrainSettings) -> View:
    """The function from rows to the critic's view of them."""
    if not settings.critic.privileged:
        return lambda rows: rows
    tokenizer, vocabulary = load_tokenizer(settings.model, settings.data), vocabulary_size_of(settings.model)

    def encode(text: str) -> list[int]:
        return within(tokenizer.encode(text, add_special_tokens=False), vocabulary)

    return partial(with_truth, encode=encode, limit=settings.critic.privileged)


def _scaled(optimizer: Optimizer, model: Model | None) -> Optimizer:
    """The optimizer of a model's updates: of one that computes in float16, with a loss scale."""
    half = model is not None and model.compute_dtype == torch.float16
    return loss_scaled(optimizer) if half else optimizer


def _state(params: Params, optimizer: Optimizer, offload: Offload) -> TrainState:
    """The state before the first update, with a clock for its schedule, on the host as far as that is asked for."""
    state = tree.replace(init_state(params, optimizer), clock=Clock())
    match offload:
        case "all":
            return to_host(state)
        case "moments":
            return tree.replace(state, opt=to_host(state.opt))
        case _:
            return state
