"""A model's position on its schedule of learning rates, from the run's completed and remaining steps."""

from __future__ import annotations

from typing import NamedTuple

import attrs

from fppo.metrics import Mean, Metrics
from fppo.tree import replace, state


@state
class Clock:
    """Counts that a schedule uses besides the number of updates: plain numbers, saved as a part of the state.

    The warm-up counts only updates that were applied, not skipped ones. Afterwards the position is measured in steps of
    the run, from the end of the warm-up to the last step. So a run whose updates begin later than planned, or which
    resumes with other epochs or mini-batches, neither jumps on the schedule nor ends early.
    """

    first: int = -1  # the run's step with the model's first update; -1: none yet
    step: int = 0  # the number of the current step, from 0; unused between steps
    steps: int = 0  # the number of steps in the run; unused between steps
    made: int = 0  # applied updates in the warm-up
    ended: int = -1  # updates, counted from `first`, after which the warm-up ended; -1: it has not ended
    each: int = 1  # updates in a step at that time


@attrs.frozen
class Timeline:
    """A schedule's `warmup_steps` and `total_steps`, in updates."""

    warmup: int
    total: int


def between(clock: Clock) -> Clock:
    """Clear the step and the number of steps between steps, so that runs of different lengths have equal states."""
    return replace(clock, step=0, steps=0)


class UpdateTurn(NamedTuple):
    """The number of an update among the `per_step` updates of a step, from 0, and the schedule's `timeline`."""

    timeline: Timeline
    number: int
    per_step: int


def at_step(clock: Clock, step: int, steps: int) -> Clock:
    """The clock at the start of step `step` out of `steps`, in which the model is updated."""
    return replace(clock, first=step if clock.first < 0 else clock.first, step=step, steps=steps)


def before_update(clock: Clock, turn: UpdateTurn) -> tuple[Clock, float]:
    """The clock before an update, and the update's position on the schedule, which may have a fraction. In a run that
    goes as planned the position is the number of earlier updates."""
    timeline, number, each = turn
    before = (clock.step - clock.first) * each + number
    if clock.ended < 0 and clock.made < timeline.warmup:
        return clock, clock.made
    if clock.ended < 0:
        clock = replace(clock, ended=before, each=each)
    ended = clock.ended if clock.each == each else clock.ended * each / clock.each
    left = (clock.steps - clock.first) * each - ended
    stretch = (max(timeline.total, timeline.warmup + 1) - timeline.warmup) / max(left, 1)
    place = timeline.warmup + (before - ended) * stretch
    return clock, int(place) if place == int(place) else place


def after_update(clock: Clock, turn: UpdateTurn, report: Metrics) -> Clock:
    """The clock after an update that returned the metrics `report`. Only during the warm-up does it read the metric of
    skipped updates, which waits for the device."""
    if clock.ended >= 0 or clock.made >= turn.timeline.warmup:
        return clock
    skipped = report.get("skipped")
    if isinstance(skipped, Mean) and bool(skipped.total > 0):
        return clock
    return replace(clock, made=clock.made + 1)
