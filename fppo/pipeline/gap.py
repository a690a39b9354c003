"""A check in every step that the engine samples from the policy that is trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import attrs
from torch import Tensor

from fppo import batch as batches
from fppo import metrics
from fppo.batch import Annotated, Experience, Scored
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.pipeline.program import AnnotateStage, RunState, UpdateStage
from fppo.steps.actor import OldLogProbs, rollout_gap
from fppo.steps.train_state import TrainState

Then = Literal["warn", "stop"]
_GAP = "rollout_corr/k3_kl"
_EQUAL = "training/rollout_equal"
WHOLE_STEPS = 2  # steps at the start of a run in which all rows are compared
COMPARED = 16  # in later steps one row in this many is compared
ROUNDING = 1e-4  # the most by which two ways to compute the same log-prob differ in float32; 1e-6 is usual


def of_engine(
    rows: Scored, run: RunState, log_probs: Callable[[Scored], Tensor]
) -> tuple[OldLogProbs, Tensor, Metrics]:
    """Choose the old log-probs [B, T] of rows: "engine", the engine's, if they equal the policy's own up to rounding;
    else "pass", those of a pass, `log_probs(rows)`. Returns the choice, the log-probs, and metrics.

    The engine's are chosen if the current policy sampled all rows, and a pass over one row in `COMPARED` differs by at
    most `ROUNDING`. Every step decides anew, so that it depends on its state alone. In the first `WHOLE_STEPS` of a run
    the pass is over all rows, and gives the old log-probs. Warns of a larger difference. The metric
    training/old_log_probs/gap is the largest difference in the rows compared; `rollout_gap` gives further ones.
    """
    if not bool((rows.versions == run.actor.step).all()):
        trainers = log_probs(rows)
        return "pass", trainers, rollout_gap(trainers, rows.rollout_log_probs, rows.response_mask)
    count = len(rows.versions)
    whole = run.step < WHOLE_STEPS or count == 1
    compared = rows if whole else batches.rows(rows, range(0, count, COMPARED))
    trainers, mask = log_probs(compared), compared.response_mask
    gap = metrics.masked_max((trainers - compared.rollout_log_probs).abs(), mask)
    report = rollout_gap(trainers, compared.rollout_log_probs, mask) | {"training/old_log_probs/gap": gap}
    alike = float(gap.value) <= ROUNDING  # False for nan
    if not alike:
        text = "the engine's log-probs differ from the policy's own by more than rounding explains"
        text += f" (training/old_log_probs/gap > {ROUNDING:g}): a pass gives the old ones wherever they do"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    if whole:
        return "pass", trainers, report
    return ("engine", rows.rollout_log_probs, report) if alike else ("pass", log_probs(rows), report)


@attrs.frozen(kw_only=True)
class WatchAnnotate:
    """Annotate by another stage, and warn or end the run if on-policy rows were sampled from other probabilities.

    The gap is the KL divergence of the engine's policy from the trainer's, in nats per token (k3,
    http://joschu.net/blog/kl-approx.html), if a pass measures it here. Batches with rows of an earlier policy are
    skipped. The stage raises ValueError to end the run, on all ranks alike.
    """

    stage: AnnotateStage
    limit: float
    then: Then

    def __call__(self, scored: Scored, run: RunState) -> tuple[Annotated, Metrics]:
        annotated, report = self.stage(scored, run)
        _look(report, scored, run.actor.step, self.limit, self.then)
        return annotated, report


@attrs.frozen(kw_only=True)
class WatchUpdate:
    """Watch the gap that an actor's update of a single optimizer step measures, as `WatchAnnotate` does."""

    stage: UpdateStage
    limit: float
    then: Then

    def __call__(self, state: TrainState, batch: Experience, *, key: Key, donate: bool) -> tuple[TrainState, Metrics]:
        after, report = self.stage(state, batch, key=key, donate=donate)
        _look(report, batch, state.step, self.limit, self.then)
        return after, report


@attrs.frozen
class HoldExact:
    """Update by another stage, and raise ValueError if it finds a log-prob of the engine whose bits are not those of
    the policy's own: training/rollout_equal is below 1."""

    stage: UpdateStage

    def __call__(self, state: TrainState, batch: Experience, *, key: Key, donate: bool) -> tuple[TrainState, Metrics]:
        after, report = self.stage(state, batch, key=key, donate=donate)
        equal = metrics.report({_EQUAL: report[_EQUAL]})[_EQUAL]
        if equal < 1:
            raise ValueError(
                f"rollout.exact: {1 - equal:.2%} of the engine's log-probs have other bits than those of the policy's "
                f"pass, after {state.step} updates ({_EQUAL} = {equal:.6g}). This machine or this model does not keep "
                "the promise where `laws.check_exact` looks closer; leave rollout.exact out"
            )
        return after, report


def _look(report: Metrics, rows: Scored, version: int, limit: float, then: Then) -> None:
    if _GAP not in report or not bool((rows.versions == version).all()):
        return
    gap = metrics.report({_GAP: report[_GAP]})[_GAP]
    if gap > limit:
        text = (
            f"the engine samples from another policy than the one that is trained, after {version} updates: "
            f"{_GAP} = {gap:.2g}, where rounding explains at most {limit:g}. The model may be one that the engine runs "
            'otherwise, or its dtype too coarse; rollout.gap = "off" looks no more'
        )
        if then == "stop":
            raise ValueError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
