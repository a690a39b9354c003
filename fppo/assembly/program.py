"""From settings to a program: the stages of a step, bound to models, kernels, mesh and scalars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo import advantages, losses
from fppo.assembly.optimizers import optimizers_of, timeline_of
from fppo.assembly.parts import Role, micro_batching_of, offload_of, value_head_of
from fppo.batch import Annotated
from fppo.pipeline.checks import SCREENED, screened
from fppo.pipeline.draw import SampleGroups, SampleSaved, Saving, equal_groups, truncated
from fppo.pipeline.estimators import AdvantageFn, OfRows, by_token, reads, whitens
from fppo.pipeline.gap import WatchAnnotate, WatchUpdate
from fppo.pipeline.measure import Measured
from fppo.pipeline.passes import Passes, View
from fppo.pipeline.pretrain import Pretrain
from fppo.pipeline.program import EstimateStage, Program, SampleBatch, SampleStage, Together, UpdateStage
from fppo.pipeline.stages import Estimate, LeaveAgreed, LeaveDisputed, RollOut, ScoreFn
from fppo.pipeline.wiring import wire
from fppo.rewards.early import EarlyRewardRunner
from fppo.rollout import saved
from fppo.rollout.engine import Engine, Sampling
from fppo.rollout.turns.engine import turn_metrics
from fppo.runtime.offload import HostActivations, Lane, Offloaded
from fppo.settings import files
from fppo.settings.component import bound, requires, takes, value_of
from fppo.settings.learning import ActorSettings, CriticSettings
from fppo.settings.modules import kernels_named
from fppo.settings.resolve import old_log_probs_source
from fppo.settings.rollout import FilterSettings
from fppo.settings.tables import CORRECTIONS, ESTIMATORS, POLICY_LOSSES
from fppo.settings.train import TrainSettings
from fppo.steps.actor import LossFn, PolicyTerms, SelectiveLoss, UpdateActor
from fppo.steps.confidence import UpdateConfidence
from fppo.steps.critic import UpdateCritic
from fppo.steps.hidden import UpdateHidden
from fppo.steps.loop import Loop
from fppo.steps.optimizers import Optimizer
from fppo.steps.outputs import Forward
from fppo.steps.recorded import Recorder
from fppo.steps.train_state import Params
from fppo_kernels.table import Kernels

# the k3 divergence per token of two ways to compute the same: log-probs that differ by 0.01 (float32), 0.3 (16 bits)
_EXACT_GAP, _COARSE_GAP = 1e-4, 0.05
Correct = Callable[[Tensor, Tensor, Tensor], losses.Correction]  # of old log-probs, the engine's, and the mask
ROLLOUTS = "rollouts"  # where a run that saves its rollouts has them


@attrs.frozen(kw_only=True)
class Resources:
    """The passes, updates, engine and rewards that the stages of a run work with."""

    passes: Passes
    update_actor: UpdateStage
    update_critic: UpdateStage | None
    together: Together
    hold: Callable[[Params], Params]
    bring: Callable[[Params], None]
    engine: Engine
    sampling: Sampling
    pad_token_id: int
    vocabulary: int  # how many tokens the policy knows
    device: torch.device  # of batches
    writes: bool  # whether this process is the one that writes rollouts
    runner: EarlyRewardRunner
    score: ScoreFn
    advantage: Callable[[Mapping[str, float]], AdvantageFn]


def policy_loss(actor: ActorSettings) -> LossFn | SelectiveLoss:
    """The policy loss with its scalars bound, and its selection of tokens if it has one.

    Raises ValueError for a function of the user's that does not import.
    """
    functions = bound(actor.loss, POLICY_LOSSES, "actor.loss")
    return functions[0] if len(functions) == 1 else SelectiveLoss(*functions)


def advantage_of(settings: TrainSettings, kernels: Kernels) -> Callable[[Mapping[str, float]], AdvantageFn]:
    """The estimator that the settings name, for the weights of the reward's functions by their names.

    Raises ValueError if there is none, and for a critic's that does not say so in its source.
    """
    part = settings.algorithm.advantage
    (fn,) = bound(part, ESTIMATORS, "algorithm.advantage")
    if takes(fn, "kernel"):
        fn = partial(fn, kernel=kernels.gae)
    if reads(fn, "values") and not settings.algorithm.uses_critic:
        text = "it reads values, of a critic, and its source does not say so: define it with def in its module"
        raise ValueError(f"algorithm.advantage.name = {part.name!r}: {text}")
    correct = _correction_of(settings) or by_token
    weighs = takes(fn, "weights") and "weights" not in part.keywords
    by_turn = settings.algorithm.group_by == "turn"
    return lambda weights: OfRows(partial(fn, weights=weights) if weighs else fn, correct, by_turn)


def pretrain_of(settings: TrainSettings) -> Pretrain | None:
    """When the critic's pretraining ends; None for none."""
    critic, advantage = settings.critic, settings.algorithm.advantage
    if not (critic.pretrain and settings.algorithm.uses_critic):
        return None
    returns = advantages.turn_returns if advantage.name == "turn_gae" else advantages.discounted_returns
    returns_of = partial(returns, gamma=value_of(advantage, ESTIMATORS, "gamma", 1.0))
    return Pretrain(
        limit=critic.pretrain, patience=critic.pretrain_patience, rise=critic.pretrain_rise, returns_of=returns_of
    )


def program_of(settings: TrainSettings, resources: Resources) -> Program:
    """The stages of the settings' algorithm."""
    critic, estimate = settings.critic, _estimate(settings, resources)
    program = wire(
        rollout=RollOut(
            engine=resources.engine,
            sampling=resources.sampling,
            measure=(turn_metrics,) if settings.in_turns else (),
            make_on_finished=resources.runner.make_on_finished,
        ),
        score=resources.score,
        passes=resources.passes,
        estimate=estimate,
        update_critic=resources.update_critic,
        update_actor=resources.update_actor,
        old_log_probs=old_log_probs_source(settings),
        replay=settings.algorithm.router_replay,
        together=resources.together,
        check=False,  # `functions_of` has done it
    )
    stage: EstimateStage = LeaveAgreed(estimate, share=critic.leave_agreed) if critic.leave_agreed else estimate
    stage = LeaveDisputed(stage, share=critic.leave_disputed) if critic.leave_disputed else stage
    return attrs.evolve(
        program,
        annotate=_watched(WatchAnnotate, settings, program.annotate),
        estimate=stage,
        sample=sample_of(settings, resources),
        critic_warmup=critic.warmup_steps if settings.algorithm.uses_critic else 0,
        pretrain=pretrain_of(settings),
        steps=settings.steps,
        freeze_critic=critic.freeze,
        hold=resources.hold,
        bring=resources.bring,
        interrupts=settings.rollout.interrupt > 0,
    )


def _watched(watch: Callable[..., Any], settings: TrainSettings, stage: Any) -> Any:
    """The stage, which looks at the gap to the engine where the settings say so."""
    then = settings.rollout.gap
    if then == "off" or settings.rollout.from_ is not None:
        return stage
    return watch(stage=stage, limit=_gap_limit(settings), then=then)


def _gap_limit(settings: TrainSettings) -> float:
    """How far the dtypes let the engine's policy be from the trainer's."""
    dtypes = {settings.model.compute_dtype, settings.rollout.vllm.dtype or settings.model.compute_dtype}
    return _EXACT_GAP if dtypes == {"float32"} else _COARSE_GAP


def functions_of(
    settings: TrainSettings, kernels: Kernels, device: torch.device, *, check: bool
) -> Callable[[Mapping[str, float]], AdvantageFn]:
    """The estimator of the settings (`advantage_of`).

    All functions that they name as module:function are sought, and with `check` this one, the policy loss and the
    kernels are put through the laws that take no time. Raises ValueError for what does not import, SettingsError for
    what breaks a law.
    """
    loss_fn, advantage = policy_loss(settings.actor), advantage_of(settings, kernels)
    optimizers_of(settings, kernels, None)
    model, section = settings.model, settings.algorithm
    named = {
        "loss_fn": ("actor.loss.name", settings.actor.loss.name),
        "advantage_fn": ("algorithm.advantage.name", section.advantage.name),
        **{setting.rpartition(".")[2]: (setting, name) for setting, name in kernels_named(settings).items()},
    }
    wrong = (
        {}
        if not check
        else screened(
            loss_fn=loss_fn,
            advantage_fn=advantage({}) if ":" in section.advantage.name else None,
            kernels={op: getattr(kernels, op) for op in (*SCREENED, "gae")},
            group=settings.rollout.n,
            dtype=getattr(torch, model.compute_dtype),
            device=device,
        )
    )
    if wrong:
        hint = "\n  check = false starts all the same"
        raise files.SettingsError([f"{named[key][0]} = {named[key][1]!r}: {text}{hint}" for key, text in wrong.items()])
    return advantage


def _estimate(settings: TrainSettings, resources: Resources) -> Estimate:
    algorithm = settings.algorithm
    kl = algorithm.kl
    advantage_fn = resources.advantage({term.name: term.weight for term in resources.runner.terms})
    return Estimate(
        advantage_fn=advantage_fn,
        max_tokens=resources.sampling.max_tokens,
        kl_in_reward=kl.coef > 0,
        kl_kind=kl.kind,
        update_kl=partial(losses.update_kl, kind=kl.controller, target=kl.target, horizon=kl.horizon),
        correct=_by_row_if_needed(settings),
        drop=_dropped(settings.rollout.filter),
        whiten=whitens(advantage_fn) if algorithm.whiten is None else algorithm.whiten,
    )


def _correction_of(settings: TrainSettings) -> Correct | None:
    """The off-policy correction of the settings; None if nothing is to be corrected."""
    found = bound(settings.algorithm.correction, CORRECTIONS, "algorithm.correction")
    return found[0] if found else None


def _by_row_if_needed(settings: TrainSettings) -> Correct | None:
    """The off-policy correction of the policy loss: gmpo, whose loss is a row's, has one weight for a row."""
    correct = _correction_of(settings)
    if correct is None or settings.actor.loss.name != "gmpo":
        return correct

    def by_row(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> losses.Correction:
        correction = correct(old_log_probs, rollout_log_probs, mask)
        if correction.weights is None:
            return correction
        return correction._replace(weights=losses.geometric_mean(correction.weights, correction.mask))

    return by_row


def _dropped(section: FilterSettings) -> list[Callable[[Annotated], Tensor]]:
    """The functions that mark rows to be left out of training."""
    groups = [partial(equal_groups, by=section.by)] if section.groups else []
    return [*groups, *([truncated] if section.truncated else [])]


def sample_of(settings: TrainSettings, resources: Resources) -> SampleStage:
    """How the settings want a step's batch made."""
    section = settings.rollout
    if section.from_ is not None:
        routed = settings.algorithm.router_replay == "rollout"
        saved.check(Path(section.from_), until=settings.steps, rows=section.batch_size, routed=routed)
        place = Path(section.from_)
        return SampleSaved(directory=place, vocabulary=resources.vocabulary, device=resources.device)
    sample: SampleStage = SampleBatch()
    if section.filter.groups:
        draws, by = section.filter.max_draws, section.filter.by
        sample = SampleGroups(pad_token_id=resources.pad_token_id, max_draws=draws, by=by)
    if section.save and resources.writes:
        return Saving(stage=sample, directory=Path(settings.output_dir) / ROLLOUTS)
    return sample


def _measured(
    role: Role, update: UpdateStage, settings: TrainSettings, forward: Forward, loop: Loop, lane: Lane
) -> UpdateStage:
    """The update with its rates as metrics, and with what the settings keep on the host."""
    if settings.model.offload_activations:
        update = HostActivations(update, lane)
    if offload_of(settings, role) == "all":
        update = Offloaded(update, lane)
    return Measured(stage=update, role=role, forward=forward, epochs=loop.epochs)


def loop_of(section: ActorSettings | CriticSettings, batch_size: int) -> Loop:
    """The update loop that a section asks for."""
    return Loop(
        mini_batch_size=section.mini_batch(batch_size),
        micro_batching=micro_batching_of(section),
        epochs=section.epochs,
        weight_mode=section.weight_mode,
        horizon=section.horizon,
    )


def actor_update(
    settings: TrainSettings, forward: Forward, optimizer: Optimizer, lane: Lane, record: Recorder | None
) -> UpdateStage:
    """The policy's update. Raises ValueError for a loss of the user's that does not import."""
    actor, loop = settings.actor, loop_of(settings.actor, settings.rollout.batch_size)
    loop = attrs.evolve(loop, balance_rate=actor.experts.bias_rate, timeline=timeline_of(settings, "actor"))
    source = old_log_probs_source(settings)
    if source == "engine" and _needs_squares(settings):
        source = "pass"  # there is one, which measures the gap to the engine
    terms = PolicyTerms(
        temperature=settings.rollout.temperature,
        entropy_coef=actor.entropy_coef,
        kl_coef=actor.kl_coef,
        kl_kind=actor.kl_kind,
        nll_coef=actor.positive_nll_coef,
        balance_coef=actor.experts.balance_coef,
        router_z_coef=actor.experts.z_coef,
    )
    update = UpdateActor(
        forward=attrs.evolve(forward, replay=settings.algorithm.router_replay != "none"),
        loss_fn=policy_loss(actor),
        loop=loop,
        optimizer=optimizer,
        terms=terms,
        old_log_probs=source,
        record=record,
    )
    measured = _measured("actor", update, settings, forward, loop, lane)
    drifts = loop.epochs > 1 or loop.mini_batch_size < settings.rollout.batch_size
    return measured if drifts else _watched(WatchUpdate, settings, measured)


def critic_update(
    settings: TrainSettings,
    forward: Forward | None,
    optimizer: Optimizer,
    lane: Lane,
    *,
    view: View,
    record: Recorder | None,
) -> UpdateStage:
    """The update of the critic's model, which sees the `view` of a batch, or without a model of what it makes of the
    policy's confidence or of its hidden states."""
    loop, loss_fn = loop_of(settings.critic, settings.rollout.batch_size), value_head_of(settings).loss_fn
    loop = attrs.evolve(loop, timeline=timeline_of(settings, "critic"))
    how = {"loop": loop, "optimizer": optimizer, "loss_fn": loss_fn}
    if forward is None:
        return UpdateHidden(**how) if settings.critic.reads == "hidden" else UpdateConfidence(**how)
    update = UpdateCritic(forward=forward, view=view, record=record, **how)
    return _measured("critic", update, settings, forward, loop, lane)


def _needs_squares(settings: TrainSettings) -> bool:
    """Whether the estimator wants the sum of squared probabilities, which takes a pass of the policy."""
    return requires(settings.algorithm.advantage, ESTIMATORS, "sum_squared_probs")
