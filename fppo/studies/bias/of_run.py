"""The bias of a run: the math of its step, read from its settings."""

from __future__ import annotations

from fppo._errors import UsageError
from fppo.advantages.columns import WEIGHTS, OfRows, columns_of, name_of, whitens
from fppo.assembly.functions import advantage_of, loss_correction, policy_loss
from fppo.laws.expectation import KL, SCORE, StepMath
from fppo.settings.resolve import old_log_probs_source
from fppo.settings.train import TrainSettings
from fppo.steps.actor import SelectiveLoss
from fppo.studies.bias.run import RunBias
from fppo.studies.bias.study import WorldSizes
from fppo_kernels.table import Kernels

LAG = 0.1  # the assumed distance of a run's engine from its policy, if anything corrects for it
MOST = 4  # rows of a group: with two prompts, all batches are listed in a second


def run_bias(of: TrainSettings, sizes: WorldSizes) -> RunBias:
    """Read the math of a run's step from its settings, for worlds with groups of at most four rows. Raises UsageError
    for a loss of selected tokens: of noise, whose batches cannot be enumerated, or of a policy's entropy."""
    loss_fn, estimator = policy_loss(of.actor.loss), advantage_of(of.algorithm, Kernels.named())
    correct = loss_correction(of.algorithm.correction, of.actor.loss)
    if isinstance(loss_fn, SelectiveLoss):
        name = name_of(loss_fn.loss_fn)
        raise UsageError(f"actor.loss.name = {of.actor.loss.name!r}: {name} selects tokens by noise; give another loss")
    if (share := of.actor.top_entropy_share) < 1:
        raise UsageError(f"actor.top_entropy_share = {share}: it selects tokens by a policy's entropy; leave it out")
    estimator = estimator({SCORE: 1.0})
    needed, _ = columns_of(estimator.fn) if isinstance(estimator, OfRows) else ([], [])
    kl = None
    if of.algorithm.kl.coef > 0:
        kl = KL(of.algorithm.kl.kind, of.algorithm.kl.coef)
    elif of.actor.kl_coef > 0:
        kl = KL(of.actor.kl_kind, of.actor.kl_coef, where="loss")
    engine = old_log_probs_source(of) == "engine"
    step = StepMath(
        estimator=estimator,
        loss_fn=loss_fn,
        mode=of.actor.weight_mode,
        n=max(2, min(of.rollout.n, MOST)) if "groups" in needed else 2,
        kl=kl,
        correct=correct,
        old_log_probs="engine" if engine else "pass",
    )
    return RunBias(
        step=step,
        sizes=sizes,
        lag=LAG if engine or correct is not None or WEIGHTS in needed else 0.0,
        whitens=whitens(estimator) if of.algorithm.whiten is None else of.algorithm.whiten,
    )
