"""One step of a run: the one that training, replays, comparisons of kernels and scripts all take."""

from __future__ import annotations

import torch
from torch.profiler import record_function

from fppo import metrics
from fppo._errors import RunFailed
from fppo.batch import Experience, Scored
from fppo.data.cursor import DataCursor
from fppo.metrics import Metrics
from fppo.pipeline.agreement import problems
from fppo.pipeline.pretrain import pretrain
from fppo.pipeline.program import Draw, Program, RunState
from fppo.pipeline.timing import timed
from fppo.steps.train_state import Params
from fppo.tree import replace


def ppo_step(
    run: RunState, *, program: Program, draw: Draw, donate: bool = False
) -> tuple[RunState, Experience, Metrics]:
    """The run after its next step: a batch, annotated and estimated, and the updates of critic and actor on it.

    The batch is the first that waits in `run.ahead`, else one that is sampled here, of prompts from `draw(run.cursor)`.
    A run without a critic skips its update; the first `program.critic_warmup` steps skip the actor's, and so do those
    that are `run.pretraining` (`pretrain`). With `program.freeze_critic` the others skip the critic's. `donate` gives
    up the memory of `run`'s actor and critic. rollout/lag is how many updates the policy has had since it sampled.

    Raises ValueError for a run with a critic whose program never updates it, for one of `program.pretrain` and
    `run.pretraining` without the other, for stages that are bound to what does not
    go together (`agreement.problems`), and RunFailed, which is one too, where all of a model's first updates were
    skipped.
    """
    if wrong := problems(program):
        raise ValueError("\n".join(wrong))
    if run.critic is not None and program.update_critic is None:
        raise ValueError("the run has a critic, but the program has no update_critic: it would never learn")
    if (run.pretraining is None) != (program.pretrain is None):
        raise ValueError("RunState.pretraining and Program.pretrain belong together: give Pretraining() and its rule")
    if run.ahead:
        scored, cursor, sampled = run.ahead[0].scored, run.cursor, run.ahead[0].metrics
    else:
        scored, cursor, sampled = sample(run, program=program, draw=draw)
    key = run.key.fold("step", run.step)
    lag = run.actor.step - scored.versions
    everywhere = torch.ones_like(lag, dtype=torch.bool)
    aged = {"rollout/lag": metrics.masked_mean(lag, everywhere), "rollout/lag/max": metrics.masked_max(lag, everywhere)}
    with record_function("annotate"):
        annotated, noted = program.annotate(scored, run)
    experience, kl, estimated = timed("adv", program.estimate)(annotated, run.kl)
    reports: list[Metrics] = [sampled, aged, noted, estimated]
    progress = run.pretraining
    if progress is not None and program.pretrain is not None:
        progress, experience, pretrained = pretrain(progress, experience, rule=program.pretrain)
        reports.append(pretrained)
    critic, actor = run.critic, run.actor
    critic_alone = run.step < program.critic_warmup or (progress is not None and not progress.over)
    if critic is not None and program.update_critic is not None and (critic_alone or not program.freeze_critic):
        update, before = timed("update_critic", program.update_critic), critic.step
        critic, report = update(critic, experience, key=key.fold("critic"), donate=donate)
        _check_updates("critic", before, replace(run, critic=critic), report)
        reports.append(report)
    if not critic_alone:
        update = timed("update_actor", program.update_actor)
        actor, report = update(actor, experience, key=key.fold("actor"), donate=donate)
        _check_updates("actor", run.actor.step, replace(run, actor=actor, critic=critic), report)
        reports.append(report)
    after = replace(
        run,
        actor=actor,
        critic=critic,
        kl=kl,
        cursor=cursor,
        step=run.step + 1,
        pretraining=progress,
        ahead=run.ahead[1:],
    )
    return after, experience, metrics.merge(*reports)


def _check_updates(role: str, before: int, after: RunState, report: Metrics) -> None:
    """Raises RunFailed if these were the model's first updates (`before` there were 0), and no gradient was finite."""
    skipped = report.get(f"{role}/skipped")
    if before or not isinstance(skipped, metrics.Mean) or skipped.total < skipped.count:
        return
    models = {"actor": after.actor.params, "critic": after.critic and after.critic.params, "reference": after.ref}
    bad = [f"{name} of the {each}" for each, params in models.items() for name in _not_finite(params or {})]
    cause = "all parameters are finite: look at the loss, the advantages and returns, and the compute dtype"
    if bad:
        cause = f"{len(bad)} parameters are not finite either, first {bad[0]}: start from another model"
    raise RunFailed(f"the {role} cannot learn: its first updates were all skipped, as no gradient was finite; {cause}")


def _not_finite(params: Params) -> list[str]:
    return [name for name, x in params.items() if not x.isfinite().all()]


def sample(run: RunState, *, program: Program, draw: Draw) -> tuple[Scored, DataCursor, Metrics]:
    """The batch of step `run.step`, by the program's way to sample, and the cursor behind its prompts."""
    return program.sample(run, draw=draw, rollout=program.rollout, score=program.score)
