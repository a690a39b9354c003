"""Complaints about the first step of a run: responses that are cut, teachers that no response has, and scores that tell
nothing apart."""

from __future__ import annotations

import sys

from fppo.batch import Scored
from fppo.pipeline.train import StepRecord
from fppo.settings.train import TrainSettings


class FirstStep:
    """An observer that says on standard error what is wrong with a run's first batch."""

    def __init__(self, settings: TrainSettings) -> None:
        self._settings = settings

    def __call__(self, record: StepRecord) -> None:
        if record.run.step == 1 and isinstance(record.experience, Scored):
            for text in complaints(record.experience, self._settings):
                print(f"step 1: {text}", file=sys.stderr, flush=True)


def complaints(rows: Scored, settings: TrainSettings) -> list[str]:
    """The faults of a batch as a whole, a text each: most responses were cut, none is taught, or their scores are all
    alike or 0."""
    cut, count = sum(end == "length" for end in rows.finish), len(rows.finish)
    found: list[str] = []
    if 2 * cut > count:
        rollout = settings.rollout
        limits = [f"rollout.max_tokens = {rollout.max_tokens}"]
        if settings.in_turns and rollout.turns.turn_tokens is not None:
            limits.append(f"rollout.turns.turn_tokens = {rollout.turns.turn_tokens}")
        ends = "; a cut turn ends its episode" if settings.in_turns else ""
        found.append(f"{cut} of {count} responses were cut at {' or '.join(limits)}{ends}: give more, or mend the end")
    if rows.taught is not None and not rows.taught.any():
        limit = f"data.teacher_prompt_tokens = {settings.data.teacher_prompt_tokens}"
        found.append(
            f"no response is taught: data.teacher_prompt returned None for each, or a prompt longer than {limit}"
        )
    scores = rows.outcome[~rows.outcome.isnan()]
    if not settings.has_reward or len(scores) < 2:
        return found
    least, most = float(scores.min()), float(scores.max())
    if least == most:
        found.append(f"all {len(scores)} responses have the score {most:g}: there is nothing to tell them apart by")
    elif most <= 0:
        found.append(f"no response of {len(scores)} scored above 0: the scores are {least:g} to {most:g}")
    return found
