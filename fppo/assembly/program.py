"""From settings to a program: the stages of a step, bound to models, kernels, mesh and scalars."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from fppo import losses
from fppo.assembly.parts import micro_batching_of
from fppo.models.model import Model
from fppo.pipeline import stages
from fppo.pipeline.draw import Sample, equal_groups, sample_batch, sample_groups, sample_saved, saving, truncated
from fppo.pipeline.estimators import WHITENED, estimator
from fppo.pipeline.measure import with_mfu
from fppo.pipeline.step import Program
from fppo.rewards.functions import Term
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
from fppo.steps.update import update_actor, update_critic
from fppo_kernels.record import Kernels

ROLLOUTS = "rollouts"  # where a run that saves its rollouts has them


def policy_loss(actor: ActorSettings) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """The policy loss with its scalars bound, and its selection of tokens if it has one."""
    name = actor.loss.name
    if ":" in name:
        return _imported(name), None
    loss = partial(getattr(losses, name), **files.loss_scalars(actor.loss))
    if name not in checks.SELECTION_KEYWORDS:
        return loss, None
    return loss, partial(getattr(losses, f"select_{name}"), **files.selection_scalars(actor.loss))


def _imported(name: str) -> Callable[..., Any]:
    """The policy loss of "module:function". Raises ValueError if it does not import."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"actor.loss.name = {name!r} does not import: {error}") from error


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


def program_of(
    settings: TrainSettings,
    *,
    model: Model,
    critic_model: Model | None,
    engine: Engine,
    kernels: Kernels,
    mesh: Mesh,
    lane: Lane,
    sampling: Sampling,
    pad_token_id: int,
    score: stages.ScoreFn,
    listen: Callable[..., Any],
    loss: tuple[Callable[..., Any], Callable[..., Any] | None],
    parts: Sequence[Term],
) -> Program:
    """The stages of the settings' algorithm, bound; `parts` are the functions of its reward."""
    actor, algorithm = settings.actor, settings.algorithm
    mini = files.mini_batch_size(actor, settings.rollout.batch_size)
    corrected = algorithm.correction.mode != "none" or bool(algorithm.correction.rejection)
    alone = actor.epochs == 1 and mini == settings.rollout.batch_size
    sum_squared = algorithm.advantage == "optimal_token_baseline"
    bypass = algorithm.correction.bypass
    measured = () if settings.rollout.turns.respond is None else (turn_metrics,)
    on_policy = alone and algorithm.kl.coef == 0 and not (corrected or bypass or sum_squared)
    if settings.model.offload != "none":
        kernels = attrs.evolve(kernels, adamw=offloaded_adamw(kernels.adamw, lane))
    shared = {"kernels": kernels, "mesh": mesh, "remove_padding": settings.model.remove_padding}
    policy = shared | {"temperature": sampling.temperature}
    return Program(
        rollout=partial(stages.rollout_stage, engine=engine, sampling=sampling, measure=measured, listen=listen),
        score=_score_stage(algorithm.advantage, engine, sampling, score),
        annotate=partial(
            stages.annotate,
            model=model,
            critic_model=critic_model,
            micro_batching=micro_batching_of(actor),
            sum_squared=sum_squared,
            by_engine=on_policy or bypass,
            held=(lambda params: OnHost(params, lane)) if settings.model.offload == "all" else (lambda params: params),
            **policy,
        ),
        estimate=_estimate_stage(settings, sampling, kernels, {part.name: part.weight for part in parts}),
        update_critic=_update_critic(settings, critic_model, lane, shared),
        update_actor=_update_actor(settings, model, lane, loss, on_policy, policy),
        sample=sample_of(settings, pad_token_id, mesh, vocabulary=model.config.vocab_size),
        critic_warmup=settings.critic.warmup_steps if critic_model is not None else 0,
    )


def _estimate_stage(
    settings: TrainSettings, sampling: Sampling, kernels: Kernels, weights: Mapping[str, float]
) -> Callable[..., Any]:
    algorithm = settings.algorithm
    kl, corrected = algorithm.kl, files.correction_keywords(algorithm.correction)
    estimate = estimator(
        algorithm.advantage,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        scale=algorithm.scale,
        gae=kernels.gae,
        weights=weights,
    )
    return partial(
        stages.estimate,
        advantage_fn=estimate,
        max_tokens=sampling.max_tokens,
        kl_in_reward=kl.coef > 0,
        kl_kind=kl.kind,
        update_kl=partial(losses.update_kl, kind=kl.controller, target=kl.target, horizon=kl.horizon),
        correct=_correction(corrected, settings.actor.loss.name) if corrected else None,
        drop=_dropped(settings.rollout.filter),
        whiten=algorithm.whiten if algorithm.advantage == "gae" else algorithm.advantage in WHITENED,
    )


def _correction(keywords: dict[str, Any], loss: str) -> Callable[..., losses.Correction]:
    """The off-policy correction of a policy loss: gmpo, whose loss is a row's, has one weight for a row."""
    correct = partial(losses.rollout_correction, **keywords)
    if loss != "gmpo":
        return correct

    def by_row(*given: Tensor) -> losses.Correction:
        found = correct(*given)
        if found.weights is None:
            return found
        return found._replace(weights=losses.geometric_mean(found.weights, found.mask))

    return by_row


def _dropped(section: FilterSettings) -> list[Callable[..., Any]]:
    """What says which rows are not trained on."""
    groups = [partial(equal_groups, by=section.by)] if section.groups else []
    return [*groups, *([truncated] if section.truncated else [])]


def sample_of(settings: TrainSettings, pad_token_id: int, mesh: Mesh, *, vocabulary: int) -> Sample:
    """How the settings want a step's batch made, for a model that knows `vocabulary` tokens."""
    section = settings.rollout
    if section.from_ is not None:
        saved.check(Path(section.from_), until=settings.steps, rows=section.batch_size)
        return partial(sample_saved, directory=Path(section.from_), vocabulary=vocabulary)
    kept, sample = section.filter, sample_batch
    if kept.groups:
        sample = partial(sample_groups, pad_token_id=pad_token_id, max_draws=kept.max_draws, by=kept.by)
    if section.save and is_first(mesh):
        return saving(sample, Path(settings.output_dir) / ROLLOUTS)
    return sample


def _score_stage(advantage: str, engine: Engine, sampling: Sampling, score: stages.ScoreFn) -> Callable[..., Any]:
    if advantage != "remax":
        return partial(stages.score_stage, score=score)
    greedy = attrs.evolve(sampling, greedy=True, n=1)
    return partial(stages.score_with_greedy, score=score, engine=engine, sampling=greedy)


def _measured(role: str, update: Callable[..., Any], settings: TrainSettings, lane: Lane) -> Callable[..., Any]:
    """The update with its rates as metrics, and with what the settings keep on the host."""
    if settings.model.offload_activations:
        update = activations_on_host(update, lane)
    return with_mfu(role, offloaded(update, lane) if settings.model.offload == "all" else update)


def _update_actor(
    settings: TrainSettings,
    model: Model,
    lane: Lane,
    loss: tuple[Callable[..., Any], Callable[..., Any] | None],
    on_policy: bool,
    shared: dict[str, Any],
) -> Callable[..., Any]:
    actor, algorithm, batch_size = settings.actor, settings.algorithm, settings.rollout.batch_size
    mini = files.mini_batch_size(actor, batch_size)
    return partial(
        _measured("actor", update_actor, settings, lane),
        model=model,
        loss_fn=loss[0],
        select_fn=loss[1],
        optimizer=optimizer_of(actor.optimizer, settings.steps * actor.epochs * batch_size // mini),
        mini_batch_size=mini,
        micro_batching=micro_batching_of(actor),
        epochs=actor.epochs,
        weight_mode=actor.weight_mode,
        horizon=actor.horizon,
        entropy_coef=actor.entropy_coef,
        kl_coef=actor.kl_coef,
        kl_kind=actor.kl_kind,
        whole_batch=True,
        on_policy=on_policy,
        measure_gap=algorithm.correction.bypass and algorithm.advantage != "optimal_token_baseline",
        **shared,
    )


def _update_critic(settings: TrainSettings, critic_model: Model | None, lane: Lane, shared: dict[str, Any]) -> Any:
    critic, batch_size = settings.critic, settings.rollout.batch_size
    if critic_model is None:
        return None
    mini = files.mini_batch_size(critic, batch_size)
    return partial(
        _measured("critic", update_critic, settings, lane),
        model=critic_model,
        optimizer=optimizer_of(critic.optimizer, settings.steps * critic.epochs * batch_size // mini),
        mini_batch_size=mini,
        micro_batching=micro_batching_of(critic),
        epochs=critic.epochs,
        clip=critic.value_clip,
        weight_mode=critic.weight_mode,
        horizon=critic.horizon,
        whole_batch=True,
        **shared,
    )
