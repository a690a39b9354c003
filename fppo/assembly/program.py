"""From settings to a program: the stages of a step, bound to models, kernels, mesh and scalars."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import attrs
import torch

from fppo import losses
from fppo.advantages.columns import AdvantageFn, whitens
from fppo.assembly.functions import Correct, loss_correction
from fppo.assembly.inputs import Inputs
from fppo.assembly.learning import watch_of
from fppo.assembly.rewards import Scoring
from fppo.assembly.roles import Roles
from fppo.assembly.teacher import by_policy
from fppo.models.model import Model
from fppo.pipeline.draw import SampleGroups, SampleSaved, Saving, equal_groups, truncated
from fppo.pipeline.feedback import untaught
from fppo.pipeline.gap import WatchAnnotate
from fppo.pipeline.passes import Passes
from fppo.pipeline.pretrain import Pretrain, plain_returns
from fppo.pipeline.program import EstimateStage, Program, SampleBatch, SampleStage
from fppo.pipeline.stages import Estimate, LeaveAgreed, LeaveDisputed, RollOut, turn_metrics
from fppo.pipeline.wiring import wire
from fppo.rollout.engine import Engine
from fppo.rollout.pool import EnginePool
from fppo.runtime.mesh import is_first
from fppo.settings.component import value_of
from fppo.settings.learning import AlgorithmSettings, CriticSettings
from fppo.settings.resolve import old_log_probs_source
from fppo.settings.tables import ESTIMATORS
from fppo.settings.train import TrainSettings

ROLLOUTS = "rollouts"  # directory of saved rollouts, within the run's


@attrs.frozen
class ScoredEngine:
    """The engine of a run, and the scoring of its responses."""

    engine: Engine  # in turns, where the settings want them
    alone: Engine  # the engine of single turns under it
    scoring: Scoring


def program_of(
    inputs: Inputs, roles: Roles, passes: Passes, scored: ScoredEngine, model: Model, device: torch.device
) -> Program:
    """The stages of the settings' algorithm, with batches on `device`."""
    settings = inputs.settings
    critic, algorithm, rollout, runner = settings.critic, settings.algorithm, settings.rollout, scored.scoring.runner
    advantage_fn = inputs.advantage({term.name: term.weight for term in runner.terms})
    correct = loss_correction(algorithm.correction, settings.actor.loss)
    estimate = _estimate(advantage_fn, settings, correct)
    program = wire(
        rollout=RollOut(
            engine=scored.engine,
            sampling=inputs.sampling,
            measure=(turn_metrics,) if settings.in_turns else (),
            make_on_finished=runner.make_on_finished,
        ),
        score=scored.scoring.at(rollout.temperature),
        passes=passes,
        estimate=estimate,
        update_critic=roles.update_critic(),
        update_actor=roles.update_actor(),
        old_log_probs=old_log_probs_source(settings),
        replay=algorithm.router_replay,
        together=roles.together,
        check=False,  # `functions.check_laws` has done it
    )
    directory = Path(settings.output_dir) / ROLLOUTS if rollout.save and is_first(inputs.mesh) else None
    annotate, watch = program.annotate, watch_of(rollout, settings.model.compute_dtype)
    annotate = by_policy(settings, inputs.tokenizer, annotate, passes.policy)
    return attrs.evolve(
        program,
        annotate=annotate if watch is None else WatchAnnotate(stage=annotate, limit=watch[0], then=watch[1]),
        estimate=_leaving_out(estimate, critic),
        sample=_sample(inputs, directory, model.config.vocab_size, device),
        critic_warmup=critic.warmup_steps if algorithm.uses_critic else 0,
        pretrain=pretrain_of(critic, algorithm),
        steps=settings.steps,
        freeze_critic=critic.freeze,
        follow=roles.follow(settings.model.teacher_decay),
        hold=roles.hold(),
        bring=scored.alone.bring if isinstance(scored.alone, EnginePool) else program.bring,
        interrupts=rollout.interrupt > 0,
    )


def _estimate(advantage_fn: AdvantageFn, settings: TrainSettings, correct: Correct | None) -> Estimate:
    algorithm, rollout = settings.algorithm, settings.rollout
    dropped, kl = rollout.filter, algorithm.kl
    groups = [partial(equal_groups, by=dropped.by)] if dropped.groups else []
    of_reward = value_of(algorithm.advantage, ESTIMATORS, "score_coef") or not algorithm.reads("teacher_log_probs")
    groups += [untaught] if settings.data.teacher_function is not None and not of_reward else []
    return Estimate(
        advantage_fn=advantage_fn,
        max_tokens=rollout.max_tokens,
        kl_in_reward=kl.coef > 0,
        kl_kind=kl.kind,
        update_kl=partial(losses.update_kl, kind=kl.controller, target=kl.target, horizon=kl.horizon),
        correct=correct,
        drop=[*groups, *([truncated] if dropped.truncated else [])],
        whiten=whitens(advantage_fn) if algorithm.whiten is None else algorithm.whiten,
    )


def _leaving_out(stage: EstimateStage, critic: CriticSettings) -> EstimateStage:
    """Wrap the stage so that it leaves out the shares of rows that `critic.leave_agreed` and `critic.leave_disputed`
    give."""
    if critic.leave_agreed:
        stage = LeaveAgreed(stage, share=critic.leave_agreed)
    return LeaveDisputed(stage, share=critic.leave_disputed) if critic.leave_disputed else stage


def _sample(inputs: Inputs, directory: Path | None, vocabulary: int, device: torch.device) -> SampleStage:
    """The stage that makes a step's batch, and saves it in `directory` if given."""
    section = inputs.settings.rollout
    if section.from_ is not None:
        return SampleSaved(directory=Path(section.from_), vocabulary=vocabulary, device=device)
    learn = inputs.drawing.learn
    sample: SampleStage = SampleBatch(learn)
    if section.filter.groups:
        draws, by, pad = section.filter.max_draws, section.filter.by, inputs.prompts.pad_token_id
        sample = SampleGroups(pad_token_id=pad, max_draws=draws, by=by, learn=learn)
    return sample if directory is None else Saving(stage=sample, directory=directory)


def pretrain_of(critic: CriticSettings, algorithm: AlgorithmSettings) -> Pretrain | None:
    """The critic's pretraining and when it ends; None if the critic is not pretrained."""
    if not (critic.pretrain and algorithm.uses_critic):
        return None
    gamma = value_of(algorithm.advantage, ESTIMATORS, "gamma", 1.0)
    return Pretrain(
        limit=critic.pretrain,
        patience=critic.pretrain_patience,
        rise=critic.pretrain_rise,
        returns_of=partial(plain_returns, gamma=gamma, turns=algorithm.advantage.name == "turn_gae"),
    )
