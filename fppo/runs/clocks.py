"""Clocks of schedules, which checkpoints of earlier versions lack."""

from __future__ import annotations

from pathlib import Path

from fppo.pipeline.program import RunState
from fppo.runtime import checkpoint
from fppo.runtime.checkpoint import CheckpointError
from fppo.steps.train_state import TrainState
from fppo.tree import replace


def as_saved(run: RunState, directory: Path, step: int) -> RunState:
    """The state without clocks for models that have none in the checkpoint: their schedules keep counting updates."""

    def known(role: str, state: TrainState) -> TrainState:
        if state.clock is None:
            return state
        try:
            checkpoint.load(0, directory, step, part=f".{role}.clock.first")
        except CheckpointError:
            return replace(state, clock=None)
        return state

    return replace(run, actor=known("actor", run.actor), critic=run.critic and known("critic", run.critic))
