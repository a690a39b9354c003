"""What a run is, what does not change in it, and one step of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo import metrics
from fppo.batch import Annotated, Column, Experience, Prompts, Rollout, Scored
from fppo.data.cursor import DataCursor
from fppo.key import Key
from fppo.losses import KLState
from fppo.metrics import Metrics
from fppo.pipeline.draw import Sample, roll_out, sample_batch
from fppo.pipeline.measure import timed
from fppo.steps.train_state import Params, TrainState
from fppo.tree import replace, state


@state
class RunState:
    """What a run is, whole: saving it saves everything, and two runs from equal states are equal."""

    actor: TrainState
    key: Key
    critic: TrainState | None = None
    ref: Params | None = None
    kl: KLState = attrs.field(factory=lambda: KLState(coef=0.0))
    cursor: DataCursor = attrs.field(factory=DataCursor)
    step: int = 0
    ahead: tuple[dict[str, Tensor | Column], ...] = ()  # batches of the next steps, made already: see pipeline.ahead


@attrs.frozen(kw_only=True)
class Program:
    """What does not change in a run: the stages, bound to models, kernels, mesh and scalars. A script may swap any.

    rollout(params, prompts, *, key, version) -> (Rollout, Metrics)
    score(rollout, *, params, prompts) -> (Scored, Metrics)
    annotate(run, scored) -> (Annotated, Metrics)
    estimate(annotated, kl) -> (Experience, KLState, Metrics)
    update_critic(critic, experience, *, key, donate) -> (TrainState, Metrics); update_actor likewise
    sample(params, cursor, *, draw, key, step, version, rollout, score) -> (Scored, DataCursor, Metrics): how a loop
        makes a step's batch, see pipeline.sample
    """

    rollout: Callable[..., tuple[Rollout, Metrics]]
    score: Callable[..., tuple[Scored, Metrics]]
    annotate: Callable[[RunState, Scored], tuple[Annotated, Metrics]]
    estimate: Callable[[Annotated, KLState], tuple[Experience, KLState, Metrics]]
    update_actor: Callable[..., tuple[TrainState, Metrics]]
    update_critic: Callable[..., tuple[TrainState, Metrics]] | None = None
    sample: Sample = sample_batch
    critic_warmup: int = 0  # steps at the start that train the critic alone


def ppo_step(
    run: RunState, prompts: Prompts, *, program: Program, donate: bool = False
) -> tuple[RunState, Experience, Metrics]:
    """One iteration: roll out, score, and `learn`. The cursor is the caller's to move: it says what was drawn."""
    key = run.key.fold("step", run.step).fold("rollout")
    scored, sampled = roll_out(run.actor.params, prompts, key, run.actor.step, program.rollout, program.score)
    after, experience, learned = learn(run, scored, program=program, donate=donate)
    return after, experience, metrics.merge(sampled, learned)


def learn(
    run: RunState, scored: Scored, *, program: Program, donate: bool = False
) -> tuple[RunState, Experience, Metrics]:
    """The rest of an iteration, from scored responses: annotate, estimate, update the critic, update the actor.

    A run without a critic skips its update; the first `program.critic_warmup` steps skip the actor's. `donate` gives up
    the memory of `run`'s actor and critic. rollout/lag is how many updates the policy has had since it sampled.
    """
    key = run.key.fold("step", run.step)
    lag = run.actor.step - scored.versions
    everywhere = torch.ones_like(lag, dtype=torch.bool)
    aged = {"rollout/lag": metrics.masked_mean(lag, everywhere), "rollout/lag/max": metrics.masked_max(lag, everywhere)}
    annotated, noted = program.annotate(run, scored)
    experience, kl, estimated = timed("adv", program.estimate)(annotated, run.kl)
    reports: list[dict[str, Any]] = [aged, noted, estimated]
    critic, actor = run.critic, run.actor
    if critic is not None:
        if program.update_critic is None:
            raise ValueError("the run has a critic, but the program has no update_critic: it would never learn")
        update = timed("update_critic", program.update_critic)
        critic, report = update(critic, experience, key=key.fold("critic"), donate=donate)
        reports.append(report)
    if run.step >= program.critic_warmup:
        update = timed("update_actor", program.update_actor)
        actor, report = update(actor, experience, key=key.fold("actor"), donate=donate)
        reports.append(report)
    after = replace(run, actor=actor, critic=critic, kl=kl, step=run.step + 1)
    return after, experience, metrics.merge(*reports)
