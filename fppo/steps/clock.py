"""Where a model stands on its schedule of learning rates, by what the run has done and has left to do."""

from __future__ import annotations

from typing import NamedTuple

import attrs

from fppo.metrics import Mean, Metrics
from fppo.tree import replace, state


@state
class Clock:
    """The counts that a schedule goes by, beside the number of updates: plain numbers, a part of the state.

    The warm-up counts the updates that were made, so that skipped ones do not use it up. What follows is measured in
    steps of the run, from the end of the warm-up to the last step: a run that begins its updates earlier than settings
    can know, or goes on with other epochs or mini-batches, neither jumps nor ends early.
    """

    first: int = -1  # the run's step in which the model was first updated; -1: none yet
    step: int = 0  # within a step: its number, the first is 0,
    steps: int = 0  # and how many the run has in all; neither says anything between steps
    made: int = 0  # updates of the warm-up that were not skipped
    ended: int = -1  # updates after which the warm-up was over, counted from `first`; -1: it is not over
    each: int = 1  # updates in a step, when that was


@attrs.frozen
class Timeline:
    """The schedule that the clock goes by: its `warmup_steps` and `total_steps`, in updates."""

    warmup: int
    total: int


def between(clock: Clock) -> Clock:
    """The clock after a step, without what that was told: a run that is to have more steps is the same until then."""
    return replace(clock, step=0, steps=0)


class UpdateTurn(NamedTuple):
    """One of the `each` updates of a step, the first being number 0."""

    timeline: Timeline
    number: int
    each: int


def at_step(clock: Clock, step: int, steps: int) -> Clock:
    """The clock at the begin of the run's step, out of so many, in which the model is updated."""
    return replace(clock, first=step if clock.first < 0 else clock.first, step=step, steps=steps)


def tick(clock: Clock, turn: UpdateTurn) -> tuple[Clock, float]:
    """The clock before an update, and the place at which the schedule is asked for its rate: the number of updates
    before, where the run is as the schedule has it."""
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


def tock(clock: Clock, turn: UpdateTurn, report: Metrics) -> Clock:
    """The clock after an update with the optimizer's metrics. It looks whether one was skipped in the warm-up alone:
    that waits for the device."""
    if clock.ended >= 0 or clock.made >= turn.timeline.warmup:
        return clock
    skipped = report.get("skipped")
    if isinstance(skipped, Mean) and bool(skipped.total > 0):
        return clock
    return replace(clock, made=clock.made + 1)
