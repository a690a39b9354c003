"""From settings to a program: the stages of a step, bound to models, kernels, mesh and scalars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import attrs
from torch import Tensor

from fppo import losses
from fppo.assembly.parts import micro_batching_of
from fppo.batch import Annotated
from fppo.metrics import Metrics
from fppo.models.model import Model
from fppo.pipeline import stages
from fppo.pipeline.draw import equal_groups, sample_groups, sample_saved, saving, truncated
from fppo.pipeline.estimators import WHITENED, AdvantageFn, estimator
from fppo.pipeline.measure import with_mfu
from fppo.pipeline.program import EstimateStage, Program, SampleStage, ScoreStage, UpdateStage, sample_batch
from fppo.rewards.early import EarlyRewardRunner
from fppo.rollout import saved
from fppo.rollout.engine import Engine, Sampling
from fppo.rollout.turns.engine import turn_metrics
from fppo.runtime.mesh import Mesh, is_first
from fppo.runtime.offload import Lane, OnHost, activations_on_host, offloaded, offloaded_adamw
from fppo.settings import checks, files
from fppo.settings.rollout import FilterSettings
from fppo.settings.train import ActorSettings, OptimizerSettings, TrainSettings
from fppo.steps.optimizer import Optimizer
from fppo.steps.schedules import schedule
from fppo.steps.update import SelectFn, update_actor, update_critic
from fppo.workers.imports import imported
from fppo_kernels.record import Kernels

ROLLOUTS = "rollouts"  # where a run that saves its rollouts has them


class PolicyLoss(NamedTuple):
    """A policy loss with its scalars bound, and its selection of tokens if it has one."""

    loss_fn: Callable[..., tuple[Tensor, Metrics]]
    select_fn: SelectFn | None = None


@attrs.frozen(kw_only=True)
class Resources:
    """What the stages of a run work with."""

    model: Model
    critic_model: Model | None
    engine: Engine
    sampling: Sampling
    pad_token_id: int
    kernels: Kernels
    mesh: Mesh
    lane: Lane
    runner: EarlyRewardRunner
    score: stages.ScoreFn
    loss: PolicyLoss
    advantage: Callable[[Mapping[str, float]], AdvantageFn]


def policy_loss(actor: ActorSettings) -> PolicyLoss:
    """The policy loss that the settings name. Raises ValueError if there is none."""
    name = actor.loss.name
    if ":" in name:
        return PolicyLoss(imported(name, "actor.loss.name"))
    loss = partial(getattr(losses, name), **files.loss_scalars(actor.loss))
    if name not in checks.SELECTION_KEYWORDS:
        return PolicyLoss(loss)
    return PolicyLoss(loss, partial(getattr(losses, f"select_{name}"), **files.selection_scalars(actor.loss)))


def advantage_of(settings: TrainSettings, kernels: Kernels) -> Callable[[Mapping[str, float]], AdvantageFn]:
    """The estimator that the settings name, for the weights of the reward's functions by their names.

    Raises ValueError if there is none.
    """
    algorithm = settings.algorithm
    if ":" in algorithm.advantage:
        own: AdvantageFn = imported(algorithm.advantage, "algorithm.advantage")
        return lambda weights: own
    return lambda weights: estimator(
        algorithm.advantage,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        scale=algorithm.scale,
        gae=kernels.gae,
        weights=weights,
    )


def optimizer_of(settings: OptimizerSettings, updates: int) -> Optimizer:
    """The optimizer for a run of `updates` updates."""
    rate = schedule(
        settings.schedule,
        settings.lr,
        total_steps=updates,
        warmup_steps=settings.warmup_steps,
        min_ratio=settings.min_lr_ratio,
    )
    return Optimizer(
        schedule=rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm or None,
    )


def program_of(settings: TrainSettings, resources: Resources) -> Program:
    """The stages of the settings' algorithm, bound."""
    if settings.model.offload != "none":
        kernels = attrs.evolve(resources.kernels, adamw=offloaded_adamw(resources.kernels.adamw, resources.lane))
        resources = attrs.evolve(resources, kernels=kernels)
    measured = () if settings.rollout.turns.respond is None else (turn_metrics,)
    critic_model, lane = resources.critic_model, resources.lane
    return Program(
        rollout=partial(
            stages.rollout_stage,
            engine=resources.engine,
            sampling=resources.sampling,
            measure=measured,
            make_on_finished=resources.runner.make_on_finished,
        ),
        score=_score_stage(settings, resources),
        annotate=partial(
            stages.annotate,
            model=resources.model,
            critic_model=critic_model,
            kernels=resources.kernels,
            mesh=resources.mesh,
            micro_batching=micro_batching_of(settings.actor),
            temperature=resources.sampling.temperature,
            old_log_probs=files.old_log_probs(settings),
            sum_squared=settings.algorithm.advantage == "optimal_token_baseline",
            remove_padding=settings.model.remove_padding,
            fetch=(lambda params: OnHost(params, lane)) if settings.model.offload == "all" else (lambda params: params),
        ),
        estimate=_estimate_stage(settings, resources),
        update_critic=None if critic_model is None else _update_critic(settings, resources, critic_model),
        update_actor=_update_actor(settings, resources),
        sample=sample_of(
            settings, resources.pad_token_id, resources.mesh, vocabulary=resources.model.config.vocab_size
        ),
        critic_warmup=settings.critic.warmup_steps if critic_model is not None else 0,
    )


def _estimate_stage(settings: TrainSettings, resources: Resources) -> EstimateStage:
    algorithm = settings.algorithm
    kl, correction = algorithm.kl, files.correction_keywords(algorithm.correction)
    return partial(
        stages.estimate,
        advantage_fn=resources.advantage({term.name: term.weight for term in resources.runner.terms}),
        max_tokens=resources.sampling.max_tokens,
        kl_in_reward=kl.coef > 0,
        kl_kind=kl.kind,
        update_kl=partial(losses.update_kl, kind=kl.controller, target=kl.target, horizon=kl.horizon),
        correct=_correction(correction, settings.actor.loss.name) if correction else None,
        drop=_dropped(settings.rollout.filter),
        whiten=algorithm.whiten if algorithm.advantage == "gae" else algorithm.advantage in WHITENED,
    )


def _correction(keywords: Mapping[str, Any], loss: str) -> Callable[[Tensor, Tensor, Tensor], losses.Correction]:
    """The off-policy correction of a policy loss: gmpo, whose loss is a row's, has one weight for a row."""
    correct = partial(losses.rollout_correction, **keywords)
    if loss != "gmpo":
        return correct

    def by_row(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> losses.Correction:
        correction = correct(old_log_probs, rollout_log_probs, mask)
        if correction.weights is None:
            return correction
        return correction._replace(weights=losses.geometric_mean(correction.weights, correction.mask))

    return by_row


def _dropped(section: FilterSettings) -> list[Callable[[Annotated], Tensor]]:
    """What says which rows are not trained on."""
    groups = [partial(equal_groups, by=section.by)] if section.groups else []
    return [*groups, *([truncated] if section.truncated else [])]


def sample_of(settings: TrainSettings, pad_token_id: int, mesh: Mesh, *, vocabulary: int) -> SampleStage:
    """How the settings want a step's batch made, for a model that knows `vocabulary` tokens."""
    section = settings.rollout
    if section.from_ is not None:
        saved.check(Path(section.from_), until=settings.steps, rows=section.batch_size)
        return partial(sample_saved, directory=Path(section.from_), vocabulary=vocabulary)
    sample: SampleStage = sample_batch
    if section.filter.groups:
        draws, by = section.filter.max_draws, section.filter.by
        sample = partial(sample_groups, pad_token_id=pad_token_id, max_draws=draws, by=by)
    if section.save and is_first(mesh):
        return saving(sample, Path(settings.output_dir) / ROLLOUTS)
    return sample


def _score_stage(settings: TrainSettings, resources: Resources) -> ScoreStage:
    if settings.algorithm.advantage != "remax":
        return partial(stages.score_stage, score=resources.score)
    greedy = attrs.evolve(resources.sampling, greedy=True, n=1)
    return partial(stages.score_with_greedy, score=resources.score, engine=resources.engine, sampling=greedy)


def _measured(
    role: str, update: UpdateStage, settings: TrainSettings, resources: Resources, model: Model, epochs: int
) -> UpdateStage:
    """The update with its rates as metrics, and with what the settings keep on the host."""
    if settings.model.offload_activations:
        update = activations_on_host(update, resources.lane)
    if settings.model.offload == "all":
        update = offloaded(update, resources.lane)
    return with_mfu(role, update, model=model, mesh=resources.mesh, epochs=epochs)


def _update_actor(settings: TrainSettings, resources: Resources) -> UpdateStage:
    actor, algorithm, batch_size = settings.actor, settings.algorithm, settings.rollout.batch_size
    mini, source = files.mini_batch_size(actor, batch_size), files.old_log_probs(settings)
    update = partial(
        update_actor,
        model=resources.model,
        loss_fn=resources.loss.loss_fn,
        select_fn=resources.loss.select_fn,
        optimizer=optimizer_of(actor.optimizer, settings.steps * actor.epochs * batch_size // mini),
        kernels=resources.kernels,
        mesh=resources.mesh,
        mini_batch_size=mini,
        micro_batching=micro_batching_of(actor),
        epochs=actor.epochs,
        temperature=resources.sampling.temperature,
        weight_mode=actor.weight_mode,
        horizon=actor.horizon,
        entropy_coef=actor.entropy_coef,
        kl_coef=actor.kl_coef,
        kl_kind=actor.kl_kind,
        on_policy=source == "update",
        measure_gap=source == "engine" and algorithm.advantage != "optimal_token_baseline",  # whose pass measures it
        remove_padding=settings.model.remove_padding,
        whole_batch=True,
    )
    return _measured("actor", update, settings, resources, resources.model, actor.epochs)


def _update_critic(settings: TrainSettings, resources: Resources, model: Model) -> UpdateStage:
    critic, batch_size = settings.critic, settings.rollout.batch_size
    mini = files.mini_batch_size(critic, batch_size)
    update = partial(
        update_critic,
        model=model,
        optimizer=optimizer_of(critic.optimizer, settings.steps * critic.epochs * batch_size // mini),
        kernels=resources.kernels,
        mesh=resources.mesh,
        mini_batch_size=mini,
        micro_batching=micro_batching_of(critic),
        epochs=critic.epochs,
        clip=critic.value_clip,
        weight_mode=critic.weight_mode,
        horizon=critic.horizon,
        remove_padding=settings.model.remove_padding,
        whole_batch=True,
    )
    return _measured("critic", update, settings, resources, model, critic.epochs)
