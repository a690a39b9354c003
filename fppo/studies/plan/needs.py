"""A run's needs in a few numbers: memory of a rank, time, and disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import attrs

from fppo.settings.plan import PlanSettings
from fppo.settings.resolve import old_log_probs_source
from fppo.settings.train import TrainSettings
from fppo.studies.plan.case import TRAINED, Case, Pace, Role
from fppo.studies.plan.host import state_of
from fppo.studies.plan.pace import paced
from fppo.studies.plan.passes import Built
from fppo.studies.plan.plan import Plan, plan
from fppo.studies.plan.rollout import OUTSIDE
from fppo.studies.plan.run import case_of
from fppo.studies.plan.search import TOKENS, Remedy, single_remedies
from fppo_kernels.table import Kernels

_LOG_PROBS = "log-probs"
SAVED = (*TRAINED, "reference")  # roles whose state is in a checkpoint


@attrs.frozen(kw_only=True)
class RunNeeds:
    """Bytes and seconds that a run is planned to take."""

    gpu: str  # what a rank runs on
    ranks: int
    memory: float  # of the rank that holds most
    tensors: Mapping[str, float]  # of it, those of tensors at the peak of each stage, the rollout's where it is planned
    available: float  # memory of a rank
    host: float  # memory of a rank's process on the host
    step: float  # seconds of a step, if all responses are as long as they may be; without rewards by functions
    prompt: int  # tokens of a prompt in that step
    response: int  # tokens of a response in it
    pace: Pace | None  # of this machine, if it was measured
    run: float  # seconds of all steps
    checkpoint: float  # bytes of one
    model: float  # bytes of the exported policy
    disk: float  # bytes of all that the run writes, with the checkpoint under way
    helping: tuple[str, ...] = ()  # single changes with which it would fit, as flags, the fastest first

    @property
    def fits(self) -> bool:
        """Whether a rank holds it."""
        return self.memory <= self.available


def needs_of(
    of: TrainSettings, options: PlanSettings, *, lengths: Sequence[int] = (), kernels: Kernels | None = None
) -> RunNeeds:
    """Plan a run's memory, time and disk; for one that does not fit, try single changes that would help if
    `options.tries`. Raises ValueError for a model, a GPU or a case that cannot be planned.

    `lengths` are the prompts' tokens, if they are known: the longest counts for memory, their mean for time; else all
    are as long as they may be. With the run's `kernels` the pace of this machine's CPU is measured.
    """
    given = of.data.max_prompt_tokens
    longest, mean = max(lengths, default=given), max(1, round(fmean(lengths or (given,))))
    of = attrs.evolve(of, data=attrs.evolve(of.data, max_prompt_tokens=max(longest, 1)))
    case = case_of(of, options)
    pace = None if kernels is None or case.hardware.on_gpu else _pace_of(case, kernels)
    planned = plan(case if pace is None else attrs.evolve(case, pace=pace))
    checkpoint, model = _saved(planned.case)
    step = _step_seconds(of, planned, mean)
    found = single_remedies(planned, Built()) if options.tries and not planned.fits else []
    samples = 0.0 if of.log.samples == 0 else 1e9 * of.log.samples_gb
    return RunNeeds(
        gpu=planned.case.hardware.name,
        ranks=planned.case.world,
        memory=planned.needs,
        tensors=_tensors(planned),
        available=planned.case.hardware.memory,
        host=0.0 if planned.host is None else planned.host.needs,
        step=step,
        prompt=mean,
        response=of.rollout.max_tokens,
        pace=pace,
        run=step * of.steps,
        checkpoint=checkpoint,
        model=model,
        disk=(of.checkpoint.keep + 1) * checkpoint + model + samples,
        helping=tuple(attrs.evolve(x, flags=flags_of(of, x)).words for x in found),
    )


def _tensors(planned: Plan) -> dict[str, float]:
    """Bytes of tensors on the fullest rank at the peak of each stage. A rollout of vLLM is left out: other processes
    and torch's allocator share its memory."""
    own = planned.rollout if planned.case.sampling and planned.case.sampling.engine == "embedded" else None
    rollout = {} if own is None else {"rollout": own.total - own.memory[OUTSIDE]}
    stays = 0.0 if own is None else own.stays
    return rollout | {stage.name: stage.total - stage.memory[OUTSIDE] + stays for stage in planned.stages}


def _pace_of(case: Case, kernels: Kernels) -> Pace | None:
    """The pace of this machine; None for a model that cannot be made small, whose time is then by formulas alone."""
    try:
        return paced(case, kernels).pace
    except Exception:  # any code of a model may fail where it has fewer layers than its config says
        return None


def _step_seconds(of: TrainSettings, planned: Plan, prompt: int) -> float:
    """Seconds of a whole step: the stages of a mini-batch as often as the step has them, and the rollout.

    With prompts of `prompt` tokens, shorter than planned, stages and prefill take less time in proportion to their
    tokens.
    """
    times = of.rollout.batch_size / planned.case.mini_batch
    longest, response = of.data.max_prompt_tokens, of.rollout.max_tokens
    part = (prompt + response) / (longest + response)
    epochs = {"update actor": of.actor.epochs, "update critic": of.critic.epochs}
    skipped = {_LOG_PROBS} if old_log_probs_source(of) in ("update", "engine") else set[str]()
    each = [x.seconds.total * epochs.get(x.name, 1) for x in planned.stages if x.name not in skipped]
    sampled = planned.rollout
    rollout = 0.0 if sampled is None else sampled.seconds - sampled.prefill * (1 - prompt / longest)
    return sum(each) * times * part + rollout


def _saved(case: Case) -> tuple[float, float]:
    """Bytes of a checkpoint, over all ranks, and bytes of the exported policy in the dtype of its state."""
    alone = attrs.evolve(case, mesh=dict.fromkeys(case.mesh, 1), virtual_stages=1)
    sizes = {name: sum(each) for name, (_, each) in state_of(alone, Built()).items() if name.startswith(SAVED)}
    return float(sum(sizes.values())), float(sizes.get("actor's parameters", 0))


def flags_of(of: TrainSettings, remedy: Remedy) -> dict[str, Any]:
    """The changes of a remedy as settings of the run: a token budget becomes a micro-batch size if the run sets that,
    and also applies to the critic if its passes are those of the actor."""
    flags, case = dict(remedy.flags), remedy.plan.case
    if (tokens := flags.pop(TOKENS, None)) is None:
        return flags
    critic = case.critic and case.has("critic") and case.roles.get("critic", Role()).tokens is None
    sections = {"actor": of.actor if case.has("actor") else None, "critic": of.critic if critic else None}
    for name, section in sections.items():
        if section is not None and section.micro_batch_size:
            flags[f"{name}.micro-batch-size"] = tokens // case.length
        elif section is not None:
            flags[f"{name}.token-budget"] = tokens
    return flags
