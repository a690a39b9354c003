"""Whether an engine samples from the policy that is trained, looked at in every step."""

from __future__ import annotations

import functools
import warnings
from typing import Literal

from fppo import metrics
from fppo.batch import Annotated, Experience, Scored
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.pipeline.program import AnnotateStage, RunState, UpdateStage
from fppo.steps.train_state import TrainState

Then = Literal["warn", "stop"]
_GAP = "rollout_corr/k3_kl"


def watch_annotate(annotate: AnnotateStage, *, limit: float, then: Then) -> AnnotateStage:
    """`annotate`, which warns or ends the run where on-policy rows were sampled from other probabilities.

    The gap is the KL divergence of the engine's policy from the trainer's, in nats per token (k3,
    http://joschu.net/blog/kl-approx.html), if a pass measures it here. Rows that an earlier policy sampled are passed
    over. The stage raises ValueError to end the run, on all ranks alike.
    """

    @functools.wraps(annotate)
    def watched(scored: Scored, run: RunState) -> tuple[Annotated, Metrics]:
        annotated, report = annotate(scored, run)
        _look(report, scored, run.actor.step, limit, then)
        return annotated, report

    return watched


def watch_update(update: UpdateStage, *, limit: float, then: Then) -> UpdateStage:
    """As `watch_annotate`, for an actor's update that is one optimizer step and measures the gap itself."""

    @functools.wraps(update)
    def watched(state: TrainState, batch: Experience, *, key: Key, donate: bool) -> tuple[TrainState, Metrics]:
        after, report = update(state, batch, key=key, donate=donate)
        _look(report, batch, state.step, limit, then)
        return after, report

    return watched


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
