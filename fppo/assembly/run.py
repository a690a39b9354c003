"""From settings to a run: models, prompts, rewards and stages, bound once. Only the command line comes through here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import attrs
import torch
from transformers import PreTrainedTokenizerBase

from fppo import data, devices
from fppo.advantages.columns import of_values
from fppo.assembly.adapters import base_of_role, bases_of, policy_model, shape_of
from fppo.assembly.announce import clock_lines, input_lines, model_lines, optimizer_lines, sharing_lines
from fppo.assembly.checks import EVALUATE, TRAIN
from fppo.assembly.engines import (
    EngineOptions,
    answering,
    engine_of,
    engine_options,
    game_of,
    make_engine,
    make_engine_of_pool,
)
from fppo.assembly.idle import idle_lines
from fppo.assembly.inputs import Inputs
from fppo.assembly.machine import resolved
from fppo.assembly.parts import Tools
from fppo.assembly.placed import Placed
from fppo.assembly.pools import ALL_HERE, RolePlaces, batch_device_of
from fppo.assembly.program import ScoredEngine, pretrain_of, program_of
from fppo.assembly.rewards import Scoring, scoring
from fppo.assembly.roles import Roles, make_roles
from fppo.fields import only
from fppo.fleet import HERE, Call, Group, Here, LocalGroup
from fppo.key import Key
from fppo.losses import KLState
from fppo.models.model import Model
from fppo.pipeline.evaluate import EvaluateHeldOut, EvaluateRun
from fppo.pipeline.games import Played
from fppo.pipeline.passes import Passes
from fppo.pipeline.pretrain import Pretraining
from fppo.pipeline.program import Base, Draw, Program, RunState
from fppo.pipeline.stages import environment_metrics
from fppo.pipeline.train import StepsOf, iterate
from fppo.pipeline.truth import Known, critic_truth, one_answer, right_answers
from fppo.rewards.functions import Reward
from fppo.rollout.engine import Engine
from fppo.rollout.pool import EnginePool, Generate, PlacedEngine, Policy
from fppo.rollout.turns.engine import TurnsEngine
from fppo.runtime.layout import Extent
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.runtime.offload import Lane
from fppo.settings import files
from fppo.settings.clock import said_of_clock
from fppo.settings.component import bound, value_of
from fppo.settings.learning import CriticSettings
from fppo.settings.model import ModelSettings
from fppo.settings.placement import EngineSettings
from fppo.settings.resolve import said_of_old_log_probs, sharing_hindrances
from fppo.settings.tables import ESTIMATORS
from fppo.settings.train import TrainSettings
from fppo.steps.train_state import whole_shapes
from fppo_kernels.table import Kernels

MADE_BY = "made by"  # the note of a checkpoint with the command that made it


@attrs.frozen
class PromptRecord:
    """The prompts of a run by purpose; its checkpoints note their digests. Also the command that makes the run, if it
    is not fppo train."""

    sets: Mapping[str, Any]
    may_change: bool
    digests_of: Callable[[Any], Mapping[str, str]] = data.digests_of
    made_by: str | None = None
    _known: dict[str, str] = attrs.field(factory=dict, eq=False)

    def notes(self) -> dict[str, str]:
        """Digests of each set's tokens and of the columns that its rewards read, computed once, for a checkpoint."""
        if not self._known:
            for name, prompts in self.sets.items():
                self._known.update({f"{name}, {part}": x for part, x in self.digests_of(prompts).items()})
            self._known.update({} if self.made_by is None else {MADE_BY: self.made_by})
        return dict(self._known)


@attrs.frozen(kw_only=True)
class Assembly:
    """A run before its first step, its program, and what they were made from: all that a command needs of it."""

    run: RunState
    program: Program
    draw: Draw
    evaluate: EvaluateRun | None
    inputs: Inputs
    model: Model
    critic_model: Model | None
    mesh: Mesh
    device: torch.device  # which has the batches; the state may be on the host
    shapes: dict[str, torch.Size | Extent]  # whole shapes of the leaves of `run` that a mesh may cut
    drawn: PromptRecord
    placed: Placed | None = None  # the parts of `run` that are in other processes
    calls: Callable[[], list[Call]] = list  # to groups, since the last query

    @property
    def steps(self) -> Callable[..., StepsOf]:
        """The steps from a state: `pipeline.iterate` with this run's program."""
        how = {"program": self.program, "draw": self.draw, "ahead": self.inputs.settings.rollout.ahead}
        return partial(iterate, **how, mesh=self.mesh)


@contextlib.contextmanager
def assemble(
    settings: TrainSettings,
    *,
    kernels: Kernels | None = None,
    mesh: Mesh = LOCAL,
    sampling_mesh: Mesh | None = None,
    device: torch.device | None = None,
    places: RolePlaces = ALL_HERE,
    announce: Callable[[Sequence[str]], None] = lambda lines: None,
    rewards: Mapping[str, Reward] = MappingProxyType({}),
) -> Iterator[Assembly]:
    """The run that the settings describe, before its first step. Invalid settings are raised before any work.

    `kernels` and `device` replace those that the settings name, as `rewards` do, by name, for reward functions. On a
    `mesh` this is one rank's part of the run; sampling and scoring use the groups of `sampling_mesh`, which sampling
    ahead needs. `announce` gets lines on what is loaded. `places` has the roles and the engines that run elsewhere, as
    `placement.roles` says.
    """
    settings, chosen = resolved(settings, device)
    section, rollout, key, sampling_mesh = settings.model, settings.rollout, Key(settings.seed), sampling_mesh or mesh
    inputs = Inputs(settings=settings, mesh=mesh, own_kernels=kernels, own_device=device, own_rewards=rewards)
    inputs = inputs.need(*TRAIN)
    device, pad = batch_device_of(places.roles, inputs.device, settings.model_roles), inputs.prompts.pad_token_id
    home = devices.home_of(device)
    plain, _ = resolved(TrainSettings(model=ModelSettings(cpp=section.cpp)), inputs.device)
    said = files.differing(settings, plain), chosen, said_of_old_log_probs(settings), idle_lines(settings)
    chats = {"thinking": rollout.turns.thinking, "rows": settings.data if settings.in_turns else None}
    announce(input_lines(inputs, *said, **chats) + clock_lines(said_of_clock(settings)))
    roles = make_roles(settings, inputs.kernels, LocalGroup(Here(mesh, device)), places.roles)
    model, critic_model = _models(section, settings.critic, roles)
    shown = sharing_lines(section, rollout.n, sharing_hindrances(settings), model, inputs.kernels)
    shown += optimizer_lines("actor", settings.actor.optimizer, model)
    shown += optimizer_lines("critic", settings.critic.optimizer, critic_model)
    announce(model_lines(model, section.path, [*roles.others, *["teacher"] * settings.loads_teacher]) + shown)
    run = _fresh(inputs, roles)
    options = engine_options(rollout, section, routed=settings.algorithm.routed, held_out=settings.has_held_out)
    load = partial(policy_model, section, settings.critic, key)
    made = _engine(places.engines, settings.placement.engines, options, roles, load, model.extents, pad, sampling_mesh)
    scores = scoring(inputs, sampling_mesh, device, places.roles)
    with _scored(inputs, scores, made, pad, sampling_mesh) as scored:
        passes = roles.passes(settings.critic, inputs.tokenizer)
        truth = _truth(inputs, scored.engine, passes)
        yield Assembly(
            run=run,
            program=program_of(inputs, roles, passes, scored, model, home),
            draw=_draw(inputs),
            evaluate=None if inputs.held_out is None else _evaluation(inputs, inputs.held_out, scored, truth),
            inputs=inputs,
            model=model,
            critic_model=critic_model,
            mesh=mesh,
            device=device,
            shapes=_shapes(run, roles),
            drawn=_drawn(inputs),
            placed=Placed.of(roles, inputs.device),
            calls=places.calls,
        )


@contextlib.contextmanager
def _scored(
    inputs: Inputs,
    scores: contextlib.AbstractContextManager[Scoring],
    made: contextlib.AbstractContextManager[Engine],
    pad: int,
    mesh: Mesh,
) -> Iterator[ScoredEngine]:
    """Open the scoring and the engine for as long as the context lasts, in turns where the settings want them."""
    with scores as entered, made as alone, answering(inputs, alone, pad, mesh) as engine:
        yield ScoredEngine(engine, alone, entered)


def _fresh(inputs: Inputs, roles: Roles) -> RunState:
    """The run before its first step."""
    s, hold = inputs.settings, roles.hold()
    return RunState(
        actor=roles.actor.state,
        critic=roles.critic and roles.critic.state,
        ref=roles.reference and roles.reference.params,
        teacher=hold(roles.actor.state.params) if s.averages_policy else None,
        kl=KLState(coef=s.algorithm.kl.coef),
        key=Key(s.seed),
        cursor=inputs.drawing.begin,
        pretraining=Pretraining() if pretrain_of(s.critic, s.algorithm) else None,
        bases=bases_of(roles.bases(s.model)),
    )


def _engine(
    groups: Sequence[Group],
    section: EngineSettings,
    options: EngineOptions,
    roles: Roles,
    load: Callable[[Mesh, torch.device], Model],
    names: Iterable[str],
    pad: int,
    mesh: Mesh,
) -> contextlib.AbstractContextManager[Engine]:
    """The engine of the policy's responses, on the actor's ranks. With `groups` it is instead a pool of one engine per
    group, each with a model from `load` and sent the actor's parameters that `names` lists."""
    if groups:
        make = partial(make_engine_of_pool, begin=roles.begin, load=load, options=options, pad_token_id=pad)
        return _engine_pool(groups, make, section, options, roles, names, pad)
    model, group = roles.actor.model, roles.at["actor"]
    if isinstance(group, LocalGroup):
        return engine_of(options, model, pad, mesh, roles.tools)
    engine = group.call(make_engine, HERE, roles.begin, options, model, pad, stays=True, label="make engine")
    return contextlib.nullcontext(PlacedEngine(group, engine))


def _engine_pool(
    engines: Sequence[Group],
    make: Callable[[Here], Generate],
    section: EngineSettings,
    options: EngineOptions,
    roles: Roles,
    names: Iterable[str],
    pad: int,
) -> EnginePool:
    """One engine for the whole pool: `make` makes an engine on each group, and each is sent the actor's parameters that
    `names` lists."""
    return EnginePool(
        engines,
        lambda group: group.call(make, HERE, stays=True, label="make engine"),
        Policy(group=roles.at["actor"], model=roles.actor.model, bucket_bytes=options.bucket_mb << 20),
        names=names,
        pad_token_id=pad,
        **only(section, "rows", "restarts"),
        on_host=options.vllm is not None,
    )


def _models(section: ModelSettings, critic: CriticSettings, roles: Roles) -> tuple[Model, Model | None]:
    """The models of actor and critic; of those in other processes, models without tensors, to be described."""
    actor, other = roles.actor.model, roles.critic and roles.critic.model
    return (
        actor if isinstance(actor, Model) else shape_of(section),
        other if other is None or isinstance(other, Model) else shape_of(section, critic),
    )


@attrs.frozen(kw_only=True)
class Evaluator:
    """An evaluation on held-out prompts. It is called with the policy's parameters, and holds none itself."""

    evaluate: EvaluateRun
    tokenizer: PreTrainedTokenizerBase
    model: Model
    device: torch.device  # where it wants the parameters
    bases: dict[str, Base] | None = None  # of adapters


@contextlib.contextmanager
def assemble_evaluation(
    settings: TrainSettings, *, mesh: Mesh = LOCAL, device: torch.device | None = None
) -> Iterator[Evaluator]:
    """The evaluator of a policy, without anything for training alone: no other data, no parameters, no critic.

    `settings.model.path` needs only a config and a tokenizer, but weights too if it is the base of an adapter. Raises
    ValueError for settings without held-out prompts.
    """
    if not settings.has_held_out:
        raise ValueError("data.eval_path is not set: there are no held-out prompts; give --data.eval-path FILE")
    settings, _ = resolved(settings, device)
    section, rollout, key = settings.model, settings.rollout, Key(settings.seed)
    inputs = Inputs(settings=settings, mesh=mesh, own_device=device, trains=False).need(*EVALUATE)
    tokenizer, device, held_out = inputs.tokenizer, inputs.device, inputs.held_out
    assert held_out is not None  # since the settings have some
    pad = held_out.pad_token_id
    model = policy_model(section, settings.critic, key, mesh, device)
    options = engine_options(rollout, section, routed=settings.algorithm.routed, held_out=True)
    tools = Tools(inputs.kernels, Lane(device))
    scores, alone = scoring(inputs, mesh, device), engine_of(options, model, pad, mesh, tools)
    with _scored(inputs, scores, alone, pad, mesh) as scored:
        place = torch.device("cpu") if options.on_host else device
        evaluation = _evaluation(inputs, held_out, scored)
        bases = bases_of({"actor": base_of_role(section, "actor", model)})
        yield Evaluator(evaluate=evaluation, tokenizer=tokenizer, model=model, device=place, bases=bases)


def _shapes(run: RunState, roles: Roles) -> dict[str, torch.Size | Extent]:
    """Whole, uncut shapes of the leaves of a RunState that are in this process, by path."""
    shapes: dict[str, torch.Size | Extent] = {}
    for role, state, part in (("actor", run.actor, roles.actor), ("critic", run.critic, roles.critic)):
        if state is not None and part is not None and isinstance(part.model, Model):
            shapes |= {f".{role}{path}": extent for path, extent in whole_shapes(state, part.model.extents).items()}
    if roles.reference is not None and isinstance(model := roles.reference.model, Model):
        shapes |= {f".ref[{name!r}]": extent for name, extent in model.extents.items()}
    if run.teacher is not None and isinstance(model := roles.actor.model, Model):
        shapes |= {f".teacher[{name!r}]": extent for name, extent in model.extents.items()}
    return shapes


def _draw(inputs: Inputs) -> Draw:
    """The function that draws the prompts of a step."""
    rollout, key = inputs.settings.rollout, Key(inputs.settings.seed).fold("data")
    how = {"size": rollout.batch_size // rollout.n, "shuffle": inputs.settings.data.shuffle}
    return partial(data.next_batch, inputs.prompts, key=key, **how, **only(inputs.drawing, "order", "curriculum"))


def _drawn(inputs: Inputs) -> PromptRecord:
    """The prompts that the run draws from: those to train on, unless its rollouts are saved ones, and held-out ones."""
    sets = {} if inputs.settings.rollout.from_ is not None else {"prompts": inputs.prompts}
    sets |= {} if inputs.held_out is None else {"held-out prompts": inputs.held_out}
    return PromptRecord(sets, may_change=inputs.settings.data.may_change)


def _evaluation(
    inputs: Inputs, held_out: data.PromptSet, scored: ScoredEngine, truth: Callable[..., Any] | None = None
) -> EvaluateRun:
    """The evaluation of the policy on held-out prompts and, if `truth` is given, of its critic by comparison with exact
    values."""
    size, sampling = inputs.settings.rollout.batch_size // inputs.settings.eval.n, inputs.eval_sampling
    batches = partial(data.batches, held_out, max(size, 1))
    how = {"sampling": sampling, "score": scored.scoring.at(sampling.temperature), "measure": (environment_metrics,)}
    return EvaluateHeldOut(batches=batches, engine=scored.engine, truth=truth, **how)


def _truth(inputs: Inputs, engine: Engine, passes: Passes) -> Callable[..., Any] | None:
    """The comparison of the critic with exact values on held-out prompts; None where the settings want none."""
    if not inputs.settings.eval.exact_values:
        return None
    advantage, sampling = inputs.settings.algorithm.advantage, attrs.evolve(inputs.sampling, n=1)
    of_turns = advantage.name == "turn_gae"
    gamma = 1.0 if of_turns else value_of(advantage, ESTIMATORS, "gamma", 1.0)  # within a turn
    if isinstance(engine, TurnsEngine):
        exact = Played(game=game_of(inputs.settings.rollout.turns), engine=engine, sampling=sampling, gamma=gamma)
    else:
        answers = partial(right_answers, tokenizer=inputs.tokenizer, sampling=sampling)
        exact = partial(one_answer, answers=answers, gamma=gamma)
    known = Known(exact=exact, estimate=of_values(*bound(advantage, ESTIMATORS, "algorithm.advantage")))
    return partial(critic_truth, known=known, engine=engine, sampling=sampling, passes=passes)
