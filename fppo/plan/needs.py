"""A run's needs in a few numbers: memory of a rank, time, and disk."""

from __future__ import annotations

import attrs

from fppo.plan.case import Case
from fppo.plan.host import state_of
from fppo.plan.passes import FROZEN, Built
from fppo.plan.plan import Plan, plan
from fppo.plan.run import case_of
from fppo.settings.plan import PlanSettings
from fppo.settings.resolve import old_log_probs_source
from fppo.settings.train import TrainSettings

_LOG_PROBS = "log-probs"


@attrs.frozen(kw_only=True)
class RunNeeds:
    """Bytes and seconds that a run is planned to take."""

    gpu: str  # what a rank runs on
    ranks: int
    memory: float  # of the rank that holds most
    available: float  # memory of a rank
    host: float  # memory of a rank's process on the host
    step: float  # seconds of a step, if all responses are as long as they may be; without rewards by functions
    run: float  # seconds of all steps
    checkpoint: float  # bytes of one
    model: float  # bytes of the exported policy
    disk: float  # bytes of all that the run writes, with the checkpoint under way

    @property
    def fits(self) -> bool:
        """Whether a rank holds it."""
        return self.memory <= self.available


def needs_of(of: TrainSettings, options: PlanSettings) -> RunNeeds:
    """Plan a run's memory, time and disk. Raises ValueError for a model, a GPU or a case that cannot be planned."""
    planned = plan(case_of(of, options))
    checkpoint, model = _saved(planned.case)
    step = _step_seconds(of, planned)
    samples = 0.0 if of.log.samples == 0 else 1e9 * of.log.samples_gb
    return RunNeeds(
        gpu=planned.case.hardware.name,
        ranks=planned.case.world,
        memory=planned.needs,
        available=planned.case.hardware.memory,
        host=0.0 if planned.host is None else planned.host.needs,
        step=step,
        run=step * of.steps,
        checkpoint=checkpoint,
        model=model,
        disk=(of.checkpoint.keep + 1) * checkpoint + model + samples,
    )


def _step_seconds(of: TrainSettings, planned: Plan) -> float:
    """Seconds of a whole step: the stages of a mini-batch as often as the step has them, and the rollout."""
    times = of.rollout.batch_size / planned.case.mini_batch
    epochs = {"update actor": of.actor.epochs, "update critic": of.critic.epochs}
    skipped = {_LOG_PROBS} if old_log_probs_source(of) in ("update", "engine") else set[str]()
    each = [x.seconds.total * epochs.get(x.name, 1) for x in planned.stages if x.name not in skipped]
    return sum(each) * times + (0.0 if planned.rollout is None else planned.rollout.seconds)


def _saved(case: Case) -> tuple[float, float]:
    """Bytes of a checkpoint, of all ranks together, and of the exported policy, in the dtype of its state."""
    alone = attrs.evolve(case, mesh=dict.fromkeys(case.mesh, 1), virtual_stages=1)
    sizes = {name: sum(each) for name, (_, each) in state_of(alone, Built()).items() if not name.startswith(FROZEN)}
    return float(sum(sizes.values())), float(sizes.get("actor's parameters", 0))
