"""From settings to a run: models, prompts, rewards and stages, bound once. Only the command line comes through here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import attrs
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from fppo import data, rewards
from fppo.assembly.adapters import base_of_role, bases_of, policy_model, shape_of
from fppo.assembly.announce import input_lines, model_lines, sharing_lines
from fppo.assembly.answers import right_answers
from fppo.assembly.engines import engine_of, game_of, in_turns
from fppo.assembly.inputs import EvalInputs, Inputs, read_eval_inputs, read_inputs
from fppo.assembly.machine import resolved
from fppo.assembly.parts import offload_of
from fppo.assembly.placed import Placed
from fppo.assembly.pools import engine_pool, home_of
from fppo.assembly.program import Resources, pretrain_of, program_of
from fppo.assembly.readers import truth_signs_of
from fppo.assembly.rewards import reward_runner
from fppo.assembly.roles import Roles, Tools, make_engine, make_roles
from fppo.assembly.texts import vocabulary_size_of
from fppo.fleet import HERE, LOCAL_GROUP, AnyGroup, Call, Group, Here, LocalGroup
from fppo.key import Key
from fppo.losses import KLState
from fppo.metrics import Metrics
from fppo.models.model import Model, Params
from fppo.pipeline import stages
from fppo.pipeline.estimators import of_values
from fppo.pipeline.evaluate import EvaluateRun, OnScored, evaluate
from fppo.pipeline.games import Played
from fppo.pipeline.pretrain import Pretraining
from fppo.pipeline.program import Base, Draw, Program, RunState
from fppo.pipeline.truth import Known, OnBeside, critic_truth, one_answer
from fppo.rewards.distributed import SpreadRewardRunner
from fppo.rewards.early import EarlyRewardRunner
from fppo.rollout.engine import Engine
from fppo.rollout.interrupt import InterruptibleEngine
from fppo.rollout.placed import PlacedEngine
from fppo.rollout.pool import EnginePool
from fppo.rollout.turns.engine import TurnsEngine, environment_metrics
from fppo.runtime.layout import Extent
from fppo.runtime.mesh import LOCAL, Mesh, is_first
from fppo.runtime.offload import Lane
from fppo.settings.component import bound, value_of
from fppo.settings.learning import AdvantageSettings
from fppo.settings.rollout import RolloutSettings, TurnsSettings
from fppo.settings.tables import ESTIMATORS
from fppo.settings.train import DataSettings, TrainSettings
from fppo.steps.train_state import whole_shapes
from fppo_kernels.table import Kernels


@attrs.frozen
class DrawnPrompts:
    """The prompts of a run by what they are for, of which its checkpoints note digests."""

    sets: Mapping[str, data.PromptSet]
    may_change: bool
    _known: dict[str, str] = attrs.field(factory=dict, eq=False)

    def notes(self) -> dict[str, str]:
        """The digests of each set's tokens, and of what its rewards read; taken once."""
        if not self._known:
            for name, prompts in self.sets.items():
                self._known.update({f"{name}, {part}": x for part, x in data.digests_of(prompts).items()})
        return dict(self._known)


@attrs.frozen(kw_only=True)
class Assembly:
    """A run before its first step, its program, and what they were made from: all that a command needs of it."""

    run: RunState
    program: Program
    draw: Draw
    evaluate: EvaluateRun | None
    tokenizer: PreTrainedTokenizerBase
    processor: Any  # of a model that takes images; it has the tokenizer too
    generation: GenerationConfig  # which goes with the policy where it is exported
    model: Model
    critic_model: Model | None
    mesh: Mesh
    device: torch.device  # which has the batches; the state may be on the host
    works: torch.device  # what models work on, which in pools may be another
    shapes: dict[str, torch.Size | Extent]  # whole shapes of the leaves of `run` that a mesh may cut
    drawn: DrawnPrompts
    placed: Placed | None = None  # what of `run` is not in this process
    calls: Callable[[], list[Call]] = list  # to groups, since it was asked the last time


@contextlib.contextmanager
def assemble(
    settings: TrainSettings,
    *,
    kernels: Kernels | None = None,
    mesh: Mesh = LOCAL,
    sampling_mesh: Mesh | None = None,
    device: torch.device | None = None,
    groups: Mapping[str, AnyGroup] = MappingProxyType({}),
    engines: Sequence[Group] = (),
    announce: Callable[[Sequence[str]], None] = lambda lines: None,
) -> Iterator[Assembly]:
    """The run that the settings describe, before its first step. What is wrong with them is raised before any work.

    `kernels` stand in for those that the settings name, and `device` for the one they name. On a `mesh` of several
    ranks this is one rank's part of the run; what samples and scores has the groups of `sampling_mesh`, which there
    must be to sample ahead. `announce` is told what is loaded, in lines. `groups` are of roles elsewhere, and this is
    then one process: "actor" with the engine, "critic", "reference" (without one beside the actor), "reward" (a model).
    Groups of one rank each are `engines` in its engine's place.
    """
    settings, chosen = resolved(settings, device)
    key, sampling_mesh = Key(settings.seed), sampling_mesh or mesh
    inputs = read_inputs(settings, mesh=mesh, kernels=kernels, device=device)
    tokenizer, kernels, pad = inputs.tokenizer, inputs.kernels, inputs.prompts.pad_token_id
    device = home_of(settings, groups, inputs.device)
    announce(input_lines(settings, inputs, chosen))
    tools = Tools(kernels, Lane(device))
    roles = make_roles(settings, tools, LocalGroup(Here(mesh, device)), groups)
    model, critic_model = _models(settings, roles)
    shown = model_lines(model, settings.model.path, others=roles.others)
    announce([*shown, *sharing_lines(settings, model, kernels)])
    run = _fresh(settings, roles, key)
    engine = _engine(settings, roles, tools, pad, sampling_mesh, engines)
    with _answering(settings, engine, tokenizer, pad, sampling_mesh, device, groups) as answering:
        resources = _resources(settings, roles, inputs, answering, model, mesh, device)
        yield Assembly(
            run=run,
            program=program_of(settings, resources),
            draw=_draw(inputs, key.fold("data"), settings.rollout, settings.data),
            evaluate=None if inputs.eval is None else _evaluation(settings, inputs.eval, answering, resources),
            tokenizer=tokenizer,
            processor=None if inputs.images is None else inputs.images.processor,
            generation=inputs.generation,
            model=model,
            critic_model=critic_model,
            mesh=mesh,
            device=device,
            works=inputs.device,
            shapes=_shapes(run, roles),
            drawn=_drawn(inputs, saved=settings.rollout.from_ is not None, may_change=settings.data.may_change),
            placed=Placed.of(roles, inputs.device),
            calls=partial(_calls, [*groups.values(), *engines]),
        )


def _resources(
    settings: TrainSettings,
    roles: Roles,
    inputs: Inputs,
    answering: _Answering,
    model: Model,
    mesh: Mesh,
    device: torch.device,
) -> Resources:
    """The resources that the stages of the run work with."""
    return Resources(
        passes=roles.passes(truth_signs_of(settings.critic, inputs.tokenizer)),
        update_actor=roles.update_actor(),
        update_critic=roles.update_critic(),
        together=roles.together,
        hold=roles.hold(),
        bring=answering.bring,
        engine=answering.engine,
        sampling=inputs.sampling,
        pad_token_id=inputs.prompts.pad_token_id,
        vocabulary=model.config.vocab_size,
        device=device,
        writes=is_first(mesh),
        runner=answering.runner,
        score=answering.score,
        advantage=inputs.advantage,
    )


def _calls(groups: Sequence[AnyGroup]) -> list[Call]:
    own = dict.fromkeys(group for group in groups if isinstance(group, Group))
    return [call for group in own for call in group.calls()]


def _fresh(settings: TrainSettings, roles: Roles, key: Key) -> RunState:
    """The run before its first step."""
    return RunState(
        actor=roles.actor.state,
        critic=roles.critic and roles.critic.state,
        ref=roles.reference and roles.reference.params,
        kl=KLState(coef=settings.algorithm.kl.coef),
        key=key,
        pretraining=None if pretrain_of(settings) is None else Pretraining(),
        bases=bases_of(roles.bases(settings)),
    )


def _models(settings: TrainSettings, roles: Roles) -> tuple[Model, Model | None]:
    """The models of actor and critic: without parameters, for what is said of them, where those are elsewhere."""
    actor, critic = roles.actor.model, roles.critic and roles.critic.model
    return (
        actor if isinstance(actor, Model) else shape_of(settings),
        critic if critic is None or isinstance(critic, Model) else shape_of(settings, "value"),
    )


def _engine(
    settings: TrainSettings, roles: Roles, tools: Tools, pad: int, mesh: Mesh, engines: Sequence[Group]
) -> contextlib.AbstractContextManager[Engine]:
    """The engines as one, or without any the engine where the actor is."""
    model, group = roles.actor.model, roles.at["actor"]
    if engines:
        return engine_pool(settings, engines, roles, pad)
    if isinstance(group, LocalGroup):
        return engine_of(settings, model, tools.kernels, pad, mesh, tools.lane)
    engine = group.call(make_engine, HERE, settings, None, model, pad, stays=True, label="make engine")
    return contextlib.nullcontext(PlacedEngine(group, engine))


@attrs.frozen(kw_only=True)
class Evaluator:
    """An evaluation on held-out prompts with parameters of the policy, of which it holds none."""

    evaluate: EvaluateRun
    tokenizer: PreTrainedTokenizerBase
    model: Model
    device: torch.device  # where it wants them
    bases: dict[str, Base] | None = None  # of adapters


@contextlib.contextmanager
def assemble_evaluation(
    settings: TrainSettings, *, mesh: Mesh = LOCAL, device: torch.device | None = None
) -> Iterator[Evaluator]:
    """The evaluator of a policy, and no part for training alone: no other data, no parameters, no critic.

    Of the policy itself `settings.model.path` needs the config and the tokenizer alone, but for an adapter all, as its
    base. Raises ValueError for settings without held-out prompts.
    """
    if not settings.has_held_out:
        raise ValueError("data.eval_path is not set: there are no held-out prompts; give --data.eval-path FILE")
    settings, _ = resolved(settings, device)
    inputs = read_eval_inputs(settings, mesh=mesh, device=device)
    tokenizer, kernels, device, pad = inputs.tokenizer, inputs.kernels, inputs.device, inputs.held_out.pad_token_id
    model = policy_model(settings, mesh, device)
    engine = engine_of(settings, model, kernels, pad, mesh, Lane(device))
    with _answering(settings, engine, tokenizer, pad, mesh, device) as answering:
        place = torch.device("cpu") if offload_of(settings, "actor") == "all" else device
        evaluation = _evaluation(settings, inputs, answering)
        bases = bases_of({"actor": base_of_role(settings.model, "actor", model)})
        yield Evaluator(evaluate=evaluation, tokenizer=tokenizer, model=model, device=place, bases=bases)


@attrs.frozen(kw_only=True)
class _Answering:
    """The engine that answers prompts, and the scoring of its responses."""

    engine: Engine
    bring: Callable[[Params], None]  # weights that it will be asked with
    runner: EarlyRewardRunner
    score: stages.ScoreFn


@contextlib.contextmanager
def _answering(
    settings: TrainSettings,
    engine: contextlib.AbstractContextManager[Engine],
    tokenizer: PreTrainedTokenizerBase,
    pad: int,
    mesh: Mesh,
    device: torch.device,
    groups: Mapping[str, AnyGroup] = MappingProxyType({}),
) -> Iterator[_Answering]:
    sections, vocabulary = (settings.rollout, settings.data), vocabulary_size_of(settings.model)
    with (
        reward_runner(settings, tokenizer, mesh, device, groups.get("reward", LOCAL_GROUP)) as runner,
        engine as alone,
        in_turns(*sections, alone, tokenizer, pad, mesh, vocabulary=vocabulary) as with_turns,
    ):
        reward = SpreadRewardRunner(runner, mesh, device)
        failure = settings.reward.failure_score
        score = partial(rewards.score, reward=reward, tokenizer=tokenizer, failure_score=failure)
        bring = alone.bring if isinstance(alone, EnginePool) else _nothing
        every = settings.rollout.interrupt
        engines = InterruptibleEngine(engine=with_turns, every=every, pad_token_id=pad) if every else with_turns
        yield _Answering(engine=engines, bring=bring, runner=runner, score=score)


def _nothing(params: Params) -> None:
    del params


def _shapes(run: RunState, roles: Roles) -> dict[str, torch.Size | Extent]:
    """By the paths of a RunState's leaves, as far as they are here."""
    shapes: dict[str, torch.Size | Extent] = {}
    for role, state, part in (("actor", run.actor, roles.actor), ("critic", run.critic, roles.critic)):
        if state is not None and part is not None and isinstance(part.model, Model):
            shapes |= {f".{role}{path}": extent for path, extent in whole_shapes(state, part.model.extents).items()}
    if roles.reference is not None and isinstance(model := roles.reference.model, Model):
        shapes |= {f".ref[{name!r}]": extent for name, extent in model.extents.items()}
    return shapes


def _draw(inputs: Inputs, key: Key, rollout: RolloutSettings, rows: DataSettings) -> Draw:
    size, shuffle = rollout.batch_size // rollout.n, rows.shuffle
    return lambda cursor: data.next_batch(
        inputs.prompts, cursor, size=size, key=key, shuffle=shuffle, order=inputs.order
    )


def _drawn(inputs: Inputs, *, saved: bool, may_change: bool) -> DrawnPrompts:
    """The prompts that the run draws from: none where its rollouts are saved ones."""
    held_out = None if inputs.eval is None else inputs.eval.held_out
    sets = {} if saved else {"prompts": inputs.prompts}
    sets |= {} if held_out is None else {"held-out prompts": held_out}
    return DrawnPrompts(sets, may_change=may_change)


def _evaluation(
    settings: TrainSettings, inputs: EvalInputs, answering: _Answering, resources: Resources | None = None
) -> EvaluateRun:
    """The evaluation of the policy, and with a run's resources of its critic where the settings say so."""
    batches = partial(data.batches, inputs.held_out, max(settings.rollout.batch_size // settings.eval.n, 1))
    engine, score, sampling = answering.engine, answering.score, inputs.sampling
    truth, turns = None, settings.rollout.turns
    if resources is not None and settings.eval.exact_values:
        truth = _truth(settings.algorithm.advantage, turns, inputs, resources)

    def evaluation(
        run: RunState, keep: OnScored = lambda scored: None, keep_beside: OnBeside = lambda beside: None
    ) -> Metrics:
        how = {"engine": engine, "sampling": sampling, "score": score, "measure": (environment_metrics,)}
        report = evaluate(run, batches=batches(), on_scored=keep, **how)
        return report if truth is None else report | truth(run, prompts=batches(), keep=keep_beside)

    return evaluation


def _truth(
    advantage: AdvantageSettings, turns: TurnsSettings, inputs: EvalInputs, resources: Resources
) -> Callable[..., Metrics]:
    sampling, of_turns = attrs.evolve(resources.sampling, n=1), advantage.name == "turn_gae"
    gamma = 1.0 if of_turns else value_of(advantage, ESTIMATORS, "gamma", 1.0)  # of one turn
    if isinstance(resources.engine, TurnsEngine):
        exact = Played(game=game_of(turns), engine=resources.engine, sampling=sampling, gamma=gamma)
    else:
        answers = partial(right_answers, tokenizer=inputs.tokenizer, sampling=sampling)
        exact = partial(one_answer, answers=answers, gamma=gamma)
    return partial(
        critic_truth,
        known=Known(exact=exact, estimate=of_values(*bound(advantage, ESTIMATORS, "algorithm.advantage"))),
        engine=resources.engine,
        sampling=sampling,
        passes=resources.passes,
    )
