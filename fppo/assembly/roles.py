"""The roles of a run, each made where it runs: its state, and its stages bound to model, kernels and mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import attrs
import torch
from transformers import PreTrainedTokenizerBase

from fppo import devices, tree
from fppo.assembly.adapters import adapted_critic, base_of_role, load_policy
from fppo.assembly.functions import distill_term, policy_loss, value_head_of
from fppo.assembly.learning import Learning, learning_of, update_watch
from fppo.assembly.parts import (
    Tools,
    forward_micro_batching_of,
    load_reference,
    make_tools,
    offload_of,
    on_device,
)
from fppo.assembly.texts import load_tokenizer, vocabulary_size_of
from fppo.data import truth_signs, with_truth
from fppo.data.tokenizers import within
from fppo.fields import only
from fppo.fleet import HERE, AnyGroup, Group, Here, LocalGroup, Stays, at_once, on
from fppo.key import Key
from fppo.models.model import Model, Params
from fppo.pipeline.passes import (
    BalanceFn,
    ConfidenceFn,
    Fetch,
    HiddenFn,
    Passes,
    PolicyFn,
    PolicyPass,
    RouterReplay,
    TruthSigns,
    ValueFn,
    ValuePass,
    View,
    balance_of,
)
from fppo.pipeline.program import Base, Together, UpdateStage, in_turn
from fppo.pipeline.teacher import follow
from fppo.runtime.mesh import Mesh
from fppo.runtime.offload import Lane, OnHost, to_host
from fppo.settings.learning import ActorSettings, CriticSettings, DistillSettings
from fppo.settings.model import ModelSettings, Offload, params_on_host
from fppo.settings.modules import kernels_named
from fppo.settings.resolve import old_log_probs_source
from fppo.settings.train import DataSettings, TrainSettings
from fppo.steps.actor import OldLogProbs, PolicyTerms, UpdateActor
from fppo.steps.confidence import UpdateConfidence, confidence_values
from fppo.steps.critic import UpdateCritic, as_it_is
from fppo.steps.hidden import UpdateHidden, hidden_values
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.outputs import Forward, Top
from fppo.steps.popart import UpdatePopart
from fppo.steps.recorded import Recorder, graphs, records
from fppo.steps.train_state import Scale, TrainState
from fppo.tree import state
from fppo_kernels.table import Kernels

Load = Callable[[Mesh, torch.device], tuple[Model, Params]]


@attrs.frozen(kw_only=True)
class PassOptions:
    """How passes over rows run, whichever role makes them."""

    remove_padding: bool
    share_prompts: Literal["auto"] | bool
    graphs: bool  # whether a GPU records passes as CUDA graphs where it can
    micro_batching: MicroBatching  # of passes without a gradient
    temperature: float
    replay: RouterReplay
    top: Top | None = None  # the tokens of a teacher's distributions

    def forward(self, here: Here, kernels: Kernels, model: Model) -> Forward:
        """A model bound to kernels and its mesh. Recorded passes share prompts only if settings insist."""
        recorded = self.record(here, model) is not None
        share = False if self.share_prompts == "auto" and recorded else self.share_prompts
        how = {"remove_padding": self.remove_padding, "share_prompts": share, "top": self.top}
        return Forward(model, kernels, here.mesh, **how)

    def record(self, here: Here, model: Model) -> Recorder | None:
        """The recorder of a model's passes as CUDA graphs; None without a GPU, if the settings do not want graphs, or
        if the passes cannot be recorded."""
        if self.graphs and devices.kind_of(here.device).graphs and records(model, here.mesh):
            return graphs(model, here.device)
        return None

    def policy(self, forward: Forward, record: Recorder | None, fetch: Fetch, replay: RouterReplay) -> PolicyPass:
        """The pass of a policy over rows. It replays the routers' recorded choices of experts if `replay` equals the
        run's setting."""
        return PolicyPass(
            forward=attrs.evolve(forward, replay=self.replay == replay),
            micro_batching=self.micro_batching,
            temperature=self.temperature,
            fetch=fetch,
            record=record,
        )


@state
class Actor:
    """The policy that is trained."""

    state: TrainState
    update: UpdateStage
    policy: PolicyFn
    balance: BalanceFn
    model: Model


@state
class Reference:
    """The policy that the actor is compared with."""

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


def make_actor(
    here: Here,
    tools: Tools,
    load: Load,
    passes: PassOptions,
    learning: Learning,
    section: ActorSettings,
    old_log_probs: OldLogProbs,
    watched: Callable[..., UpdateStage] | None,
) -> Actor:
    """The policy on a rank, before its first update. `watched`, if given, wraps the update stage.

    Raises ValueError for a user's loss that does not import.
    """
    model, params = load(here.mesh, here.device)
    optimizer = learning.optimizer_on(tools, model)
    forward, record = passes.forward(here, tools.kernels, model), passes.record(here, model)
    terms = PolicyTerms(
        temperature=passes.temperature,
        **only(section, "entropy_coef", "top_entropy_share", "entropy_quantiles", "kl_coef", "kl_kind"),
        nll_coef=section.positive_nll_coef,
        balance_coef=section.experts.balance_coef,
        router_z_coef=section.experts.z_coef,
    )
    update = UpdateActor(
        forward=attrs.evolve(forward, replay=passes.replay != "none"),
        loss_fn=policy_loss(section.loss),
        loop=learning.loop,
        optimizer=optimizer,
        terms=terms,
        old_log_probs=old_log_probs,
        record=record,
        distill=distill_term(section.distill, passes.top),
    )
    stage = learning.measured(update, forward, tools.lane)
    return Actor(
        state=learning.state(params, optimizer),
        update=stage if watched is None else watched(stage=stage),
        policy=passes.policy(forward, record, fetch_of(learning.offload, tools.lane), "rollout"),
        balance=partial(balance_of, forward=forward),
        model=model,
    )


def make_reference(
    here: Here,
    tools: Tools,
    load: Load,
    passes: PassOptions,
    section: ModelSettings,
    model: Model | None = None,
    params: Params | None = None,
) -> Reference:
    """The reference on a rank. `model` and `params` are the policy's before its first update, where that is on the same
    rank; elsewhere `load` loads an adapted policy.

    The reference of an adapted policy is the policy as it starts, unless the settings name another: its base, which
    takes no memory, and a copy of an adapter that is not a fresh one.
    """
    if model is None and section.lora.used and section.ref_path is None:
        model, params = load(here.mesh, here.device)
    policy = None if model is None or params is None else (model, params)
    model, params = load_reference(section, here.mesh, policy)
    params, offload = on_device(params, here.device), offload_of(section.offload, section.ref_offload)
    forward = passes.forward(here, tools.kernels, model)
    return Reference(
        params=to_host(params) if params_on_host(offload) else params,
        policy=passes.policy(forward, passes.record(here, model), fetch_of(offload, tools.lane), "all"),
        model=model,
    )


def make_critic(
    here: Here,
    tools: Tools,
    load: Callable[..., tuple[Model | None, Params]],
    passes: PassOptions,
    learning: Learning,
    section: CriticSettings,
    make_view: Callable[[], View],
    policy: Model | None = None,
) -> Critic:
    """The critic on a rank, before its first update. It may share the base of `policy`, if given."""
    model, params = load(here.mesh, here.device, policy)
    optimizer, head = learning.optimizer_on(tools, model), value_head_of(section.loss)
    how, read, values = {"loop": learning.loop, "optimizer": optimizer, "loss_fn": head.loss_fn}, head.read, None
    if model is None:
        update = UpdateHidden(**how) if section.reads == "hidden" else UpdateConfidence(**how)
    else:
        forward = attrs.evolve(passes.forward(here, tools.kernels, model), read=read)
        seen = {"forward": forward, "view": make_view(), "record": passes.record(here, model)}
        update = learning.measured(UpdateCritic(**seen, **how), forward, tools.lane)
        fetch = fetch_of(learning.offload, tools.lane)
        values = ValuePass(micro_batching=passes.micro_batching, fetch=fetch, **seen)
    state = learning.state(params, optimizer)
    if section.popart:
        state, update = tree.replace(state, scale=Scale()), UpdatePopart(stage=update, rate=section.popart)
    return Critic(
        state=state,
        update=update,
        values=values,
        confidence=partial(confidence_values, read=read) if section.reads == "confidence" else None,
        hidden=partial(hidden_values, read=read) if section.reads == "hidden" else None,
        model=model,
    )


@attrs.frozen(kw_only=True)
class Roles:
    """All roles of a run and the group of each (`at`); `begin` makes the tools of another process. Leaves are
    handles."""

    actor: Actor
    reference: Reference | None
    critic: Critic | None
    at: Mapping[str, AnyGroup]
    tools: Tools  # of this process
    begin: Callable[[Here], Tools]  # makes the tools of another process

    @property
    def others(self) -> list[str]:
        """The names of the roles beside the actor."""
        return [name for name in ("critic", "reference") if getattr(self, name) is not None]

    @property
    def placed(self) -> bool:
        """Whether any role is in another process."""
        return any(isinstance(group, Group) for group in self.at.values())

    @property
    def together(self) -> Together | None:
        """How the stages of several roles run: at once if any role is in another process, else in turn (None)."""
        return at_once if self.placed else None

    def passes(self, section: CriticSettings, tokenizer: PreTrainedTokenizerBase) -> Passes:
        """The forward passes over a batch, each run by its role's group. A critic without a model also reads signs of
        the ground truth, which are made in this process."""
        actor, critic = self.actor, self.critic
        reference, beside = (actor, "actor") if self.reference is None else (self.reference, "reference")
        alone = isinstance(group := self.at["actor"], Group) and group.ranks == 1
        return Passes(
            policy=self._on("actor", actor.policy, "old_log_prob"),
            reference=self._on(beside, reference.policy, "ref"),
            values=critic and critic.values and self._on("critic", critic.values, "values"),
            confidence=critic and critic.confidence and self._on("critic", critic.confidence, "values"),
            hidden=critic and critic.hidden and self._on("critic", critic.hidden, "values"),
            truth_signs=truth_signs_of(section, tokenizer),
            **({} if alone else {"balance": self._on("actor", actor.balance, "balance")}),
        )

    def update_actor(self) -> UpdateStage:
        """The actor's update, on its group."""
        return self._on("actor", self.actor.update, "update_actor", stays=(0,))

    def update_critic(self) -> UpdateStage | None:
        """The critic's update, on its group."""
        return self.critic and self._on("critic", self.critic.update, "update_critic", stays=(0,))

    def bases(self, section: ModelSettings) -> dict[str, Base | None]:
        """The bases under the adapters of actor and critic."""
        models = {"actor": self.actor.model, "critic": self.critic and self.critic.model} if section.lora.used else {}
        of = partial(base_of_role, section)
        return {role: self._on(role, of, "base")(role, model) for role, model in models.items()}

    def follow(self, decay: float | None) -> Callable[[Params, Params], Params]:
        """A function that moves an average of the policy's past, on the actor's group."""
        return self._on("actor", partial(follow, decay=1.0 if decay is None else decay), "follow", stays=True)

    def hold(self) -> Callable[[Params], Params]:
        """A function that copies the policy's parameters on the actor's group."""
        return self._on("actor", tree.copy, "hold", stays=True)

    def _on(self, role: str, fn: Any, label: str, *, stays: Stays = ()) -> Any:
        return on(self.at[role], fn, stays=stays, label=label)


def make_roles(
    settings: TrainSettings, kernels: Kernels, local: LocalGroup, groups: Mapping[str, AnyGroup] = MappingProxyType({})
) -> Roles:
    """Make every role on its group, or with these kernels in this process.

    A reference without a group of its own is on the actor's.
    """
    tools = Tools(kernels, Lane(local.here.device))
    begin = partial(make_tools, names=kernels_named(settings), module_dirs=settings.module_dirs)
    model, actor, critic, algorithm = settings.model, settings.actor, settings.critic, settings.algorithm
    rows, key = settings.data, Key(settings.seed)
    at = {role: groups.get(role, local) for role in ("actor", "critic")}
    at["reference"] = groups.get("reference", at["actor"])
    passes = _pass_options(model, actor, settings.rollout.temperature, algorithm.router_replay)
    passes = attrs.evolve(passes, top=top_of(actor.distill, model))

    def make(role: str, fn: Callable[..., Any], *args: Any) -> Any:
        group, own = at[role], tools
        if isinstance(group, Group):
            own = group.call(begin, HERE, stays=True, label="make tools")
        return group.call(fn, HERE, own, *args, stays=True, label=f"make {role}")

    source = old_log_probs_source(settings)
    if source == "engine" and algorithm.reads("sum_squared_probs"):
        source = "pass"  # it runs anyway, to measure the gap to the engine
    sizes = only(settings.rollout, "batch_size", "n")
    how = partial(learning_of, **sizes, **only(model, "offload_activations", "moments_directory"))
    learning = how("actor", actor, steps=settings.actor_steps, offload=model.offload)
    watched = update_watch(settings.rollout, model.compute_dtype, learning.loop)
    load = partial(load_policy, model, critic, key)
    work = {"actor": partial(make, "actor", make_actor, load, passes, learning, actor, source, watched)}
    kept = offload_of(model.offload, critic.offload) if critic.reads == "tokens" else "none"
    load_critic, view = partial(adapted_critic, model, critic, key), partial(view_of, critic.privileged, model, rows)
    of_critic = (load_critic, passes, how("critic", critic, steps=settings.steps, offload=kept), critic, view)
    beside = at["critic"] is at["actor"] and model.lora.of_critic  # on the actor's base
    if algorithm.uses_critic and not beside:
        work["critic"] = partial(make, "critic", make_critic, *of_critic)
    made = (at_once if groups else in_turn)(work)
    policy, reference = made["actor"], None
    if algorithm.uses_critic and beside:
        made["critic"] = make("critic", make_critic, *of_critic, policy.model)
    if settings.uses_reference:
        own = (policy.model, policy.state.params) if at["reference"] is at["actor"] else ()
        reference = make("reference", make_reference, load, passes, model, *own)
    return Roles(actor=policy, reference=reference, critic=made.get("critic"), at=at, tools=tools, begin=begin)


def _pass_options(
    section: ModelSettings, actor: ActorSettings, temperature: float, replay: RouterReplay
) -> PassOptions:
    """The settings' options of passes over rows, for responses sampled at this temperature."""
    return PassOptions(
        **only(section, "remove_padding", "share_prompts"),
        graphs=section.graphs is True,
        micro_batching=forward_micro_batching_of(section, actor),
        temperature=temperature,
        replay=replay,
    )


def top_of(distill: DistillSettings, model: ModelSettings) -> Top | None:
    """The tokens of a teacher's distributions that a run reads, of those that the policy may sample; None if none."""
    if not distill.used:
        return None
    count = vocabulary_size_of(model)
    return Top(count if distill.top == "all" else distill.top, count)


def fetch_of(offload: Offload, lane: Lane) -> Fetch:
    """How passes without a gradient get the parameters: fetched from the host if `offload` keeps them there, else as
    they are."""
    return lambda params: OnHost(params, lane) if params_on_host(offload) else params


def view_of(limit: int, section: ModelSettings, rows: DataSettings) -> View:
    """The function from rows to the critic's view of them, with up to `limit` tokens of the ground truth."""
    if not limit:
        return as_it_is
    tokenizer, vocabulary = load_tokenizer(section, rows), vocabulary_size_of(section)

    def encode(text: str) -> list[int]:
        return within(tokenizer.encode(text, add_special_tokens=False), vocabulary)

    return partial(with_truth, encode=encode, limit=limit)


def truth_signs_of(critic: CriticSettings, tokenizer: PreTrainedTokenizerBase) -> TruthSigns | None:
    """The function that computes signs of the ground truth from rows, for a critic without a model that may see the
    truth; None for any other critic."""
    limit = critic.privileged
    if not limit or critic.reads == "tokens":
        return None
    return partial(truth_signs, encode=partial(tokenizer.encode, add_special_tokens=False), limit=limit)
