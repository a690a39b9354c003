"""One step of a run, the same for training, replays, comparisons of kernels, and scripts."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.profiler import record_function

from fppo import metrics
from fppo._errors import RunFailed
from fppo.batch import Experience, Scored
from fppo.data.cursor import DataCursor
from fppo.metrics import Metrics
from fppo.pipeline.checks import disagreements
from fppo.pipeline.pretrain import pretrain
from fppo.pipeline.program import Draw, Program, RunState
from fppo.pipeline.timing import timed
from fppo.steps.clock import at_step, between
from fppo.steps.loss_scale import LEAST
from fppo.steps.train_state import Params, TrainState
from fppo.tree import replace


def ppo_step(
    run: RunState, *, program: Program, draw: Draw, donate: bool = False
) -> tuple[RunState, Experience, Metrics]:
    """Run the next step: annotate and estimate a batch, and update critic and actor on it.

    The batch is the first that waits in `run.ahead`, else one that is sampled here, of prompts from `draw(run.cursor)`.
    A run without a critic skips its update; the first `program.critic_warmup` steps skip the actor's, and so do steps
    of value pretraining (`run.pretraining`). With `program.freeze_critic` all other steps skip the critic's. `donate`
    gives up the memory of `run`'s actor and critic. rollout/lag is how many updates the policy has had since it
    sampled.

    Raises ValueError for a run with a critic whose program never updates it, for one of `program.pretrain` and
    `run.pretraining` without the other, and for stages with fields that contradict each other (`checks.disagreements`).
    Raises RunFailed, a ValueError, if all of a model's first updates were skipped.
    """
    stages = {name: getattr(program, name) for name in ("rollout", "annotate", "estimate", "update_actor")}
    if wrong := disagreements(**stages):
        raise ValueError("\n".join(wrong))
    if run.critic is not None and program.update_critic is None:
        raise ValueError("the run has a critic, but the program has no update_critic: it would never learn")
    if (run.pretraining is None) != (program.pretrain is None):
        raise ValueError("RunState.pretraining and Program.pretrain belong together: give Pretraining() and its rule")
    if run.ahead:
        scored, cursor, sampled = run.ahead[0].batch(), run.cursor, run.ahead[0].metrics
    else:
        scored, cursor, sampled = sample(run, program=program, draw=draw)
    key = run.key.fold("step", run.step)
    aged = _ages(scored, run.actor.step)
    with record_function("annotate"):
        annotated, noted = program.annotate(scored, run)
    experience, kl, estimated = timed("adv", program.estimate)(annotated, run.kl)
    progress, pretrained = run.pretraining, {}
    if progress is not None and program.pretrain is not None:
        progress, experience, pretrained = pretrain(progress, experience, rule=program.pretrain)
    critic_alone = run.step < program.critic_warmup or (progress is not None and not progress.over)
    skipped = {"critic": program.freeze_critic and not critic_alone, "actor": critic_alone}
    updates = {
        "critic": (_timed(run.critic, run, program), program.update_critic),
        "actor": (_timed(run.actor, run, program), program.update_actor),
    }
    of_role = {"critic": experience, "actor": replace(experience, hidden=None, truth_signs=None)}  # unread by the actor
    work = {
        role: partial(timed(f"update_{role}", update), state, of_role[role], key=key.fold(role), donate=donate)
        for role, (state, update) in updates.items()
        if state is not None and update is not None and not skipped[role]
    }
    done = {} if program.together is None else program.together(work)
    if program.together is None:
        for role, do in work.items():
            done[role] = do()
    before = {"critic": run.critic, "actor": run.actor}
    critic, actor = (_untimed(done[role][0]) if role in done else state for role, state in before.items())
    teacher = run.teacher
    if teacher is not None and "actor" in done:
        teacher = program.follow(teacher, actor.params)
    after = replace(run, actor=actor, critic=critic, teacher=teacher, kl=kl, pretraining=progress)
    after = replace(after, cursor=cursor, step=run.step + 1, ahead=run.ahead[1:])
    for role, (state, _) in updates.items():
        if role in done and state is not None:
            check_updates(role, state.step, after, done[role][1])
    updated = [report for _, report in done.values()]
    return after, experience, metrics.merge(sampled, aged, noted, estimated, pretrained, *updated)


def _timed(state: TrainState | None, run: RunState, program: Program) -> TrainState | None:
    """Set the state's clock, if it has one, to this step. Raises ValueError for a clock without `Program.steps`."""
    if state is None or state.clock is None:
        return state
    if program.steps is None:
        raise ValueError("TrainState.clock needs Program.steps, the steps of the run in all: give both or neither")
    return replace(state, clock=at_step(state.clock, run.step, program.steps))


def _untimed(state: TrainState) -> TrainState:
    return state if state.clock is None else replace(state, clock=between(state.clock))


def _ages(scored: Scored, version: int) -> Metrics:
    """Metrics of how many updates the policy has had since it sampled the rows or, if tokens have versions of their
    own, the tokens; for tokens also the number of each age, and the oldest version. `version`: the policy's updates by
    now."""
    versions, mask = scored.token_versions, scored.response_mask
    if versions is None:
        versions, mask = scored.versions, torch.ones_like(scored.versions, dtype=torch.bool)
    lag = version - versions
    ages = {"rollout/lag": metrics.masked_mean(lag, mask), "rollout/lag/max": metrics.masked_max(lag, mask)}
    if scored.token_versions is None:
        return ages
    counts = torch.bincount(lag[mask]).tolist()
    tokens = {f"rollout/lag/tokens/{age}": metrics.total(count) for age, count in enumerate(counts)}
    oldest = version - metrics.masked_max(lag, mask).value
    return ages | tokens | {"rollout/oldest_version": metrics.Min(oldest)}


def check_updates(role: str, before: int, after: RunState, report: Metrics) -> None:
    """Raise RunFailed if all of a step's updates of a role were skipped for gradients that are not finite, and no later
    update can do better: they were the model's first (`before`, its earlier updates, is 0) or, with a loss scale, had
    the smallest scale."""
    skipped, scale = report.get(f"{role}/skipped"), report.get(f"{role}/loss_scale")
    may_pass = before > 0
    if isinstance(scale, metrics.Mean):
        may_pass = bool(scale.total > LEAST * scale.count)  # a smaller one follows
    if may_pass or not isinstance(skipped, metrics.Mean) or skipped.total < skipped.count:
        return
    models = {"actor": after.actor.params, "critic": after.critic and after.critic.params, "reference": after.ref}
    bad = [f"{name} of the {each}" for each, params in models.items() for name in _not_finite(params or {})]
    seen = "all parameters are finite: " if _all_here(after) else ""
    cause = f"{seen}look at the loss, the advantages and returns, and the compute dtype"
    if bad:
        cause = f"{len(bad)} parameters are not finite either, first {bad[0]}: start from another model"
    which = "first updates" if scale is None else f"updates, its loss scaled by {LEAST}"
    name = "policy" if role == "supervised" else role
    raise RunFailed(f"the {name} cannot learn: its {which} were all skipped, as no gradient was finite; {cause}")


def _not_finite(params: Params) -> list[str]:
    return [name for name, x in params.items() if isinstance(x, Tensor) and not x.isfinite().all()]


def _all_here(run: RunState) -> bool:
    """True if all parameters live in this process."""
    trees = (run.actor.params, run.critic and run.critic.params, run.ref, run.teacher)
    return all(isinstance(x, Tensor) for params in trees for x in (params or {}).values())


def sample(run: RunState, *, program: Program, draw: Draw) -> tuple[Scored, DataCursor, Metrics]:
    """Sample the batch of step `run.step` by the program; return it, and the cursor after its prompts."""
    return program.sample(run, draw=draw, rollout=program.rollout, score=program.score)
