"""Resuming a run from a checkpoint: the bases of its adapters, its prompts, the clocks of its schedules."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from fppo.assembly.run import MADE_BY, DrawnPrompts
from fppo.pipeline.program import Base, RunState
from fppo.runtime import checkpoint
from fppo.runtime.checkpoint import CheckpointError
from fppo.steps.train_state import TrainState
from fppo.tree import replace


def check_bases(own: Mapping[str, Base] | None, path: Path) -> None:
    """Raise ValueError if the adapters in the checkpoint at `path` differ from a run's `own` in base weights, dtype or
    adapter config, by role; CheckpointError if it has no adapters."""
    for role, base in (own or {}).items():
        before = checkpoint.load(base, path.parent, checkpoint.step_of(path), part=f".bases[{role!r}]")
        setting = "model.path" if role == "actor" else "model.critic_path"
        if before.adapter != base.adapter:
            raise ValueError(
                f"model.lora: the {role}'s adapter in {path} is {before.adapter}, but the settings give "
                f"{base.adapter}: give the same, or another output_dir to start anew"
            )
        if before.dtype != base.dtype:
            raise ValueError(
                f"model.compute_dtype or model.lora.base: the {role}'s adapter in {path} has base weights in "
                f"{before.dtype}, the settings give {base.dtype}: give the same, or another output_dir to start anew"
            )
        if before.digest != base.digest:
            raise ValueError(
                f"{setting}: the {role}'s adapter in {path} was trained on the weights of {before.source}, whose "
                f"digest was {before.digest}; those of {base.source} have {base.digest}: give that model"
            )


_TRAINED = "prompts, "  # prefix of the notes of training prompts


def check_prompts(own: DrawnPrompts, path: Path, *, speaks: bool) -> None:
    """Raise ValueError if the training prompts of a run differ from those of the checkpoint at `path`, unless they may
    change. `speaks`: print permitted changes, such as of held-out prompts, on stderr. Prompts without notes in the
    checkpoint are not compared."""
    before, now = checkpoint.notes_of(path), own.notes()
    if before.get(MADE_BY) != now.get(MADE_BY):
        one, other = (notes.get(MADE_BY, "fppo train") for notes in (before, now))
        raise ValueError(f"{path} was made by {one}, and {other} does not go on from it: give another output_dir")
    changed = [name for name in now if name in before and before[name] != now[name]]
    trained = [name for name in changed if name.startswith(_TRAINED)]
    if trained and not own.may_change:
        raise ValueError(
            f"data: {_listed(trained)} differ from those that {path} was made with, and the run would go on in the "
            "middle of them: a file of data.path, the tokenizer or the chat template has changed (a template that "
            "writes the date does so daily); give the same, or data.may_change = true to go on with these"
        )
    if changed and speaks:
        print(f"going on with other data than {path.name} was made with: {_listed(changed)}", file=sys.stderr)


def _listed(names: list[str]) -> str:
    return " and ".join(f"the {name.replace(', ', ' ')}" for name in names)


def with_saved_clocks(run: RunState, directory: Path, step: int) -> RunState:
    """The state with clocks for the models that have one in the checkpoint; those of earlier versions do not have any.
    The others' schedules go on as they began, by the number of updates."""

    def known(role: str, state: TrainState) -> TrainState:
        if state.clock is None:
            return state
        try:
            checkpoint.load(0, directory, step, part=f".{role}.clock.first")
        except CheckpointError:
            return replace(state, clock=None)
        return state

    return replace(run, actor=known("actor", run.actor), critic=run.critic and known("critic", run.critic))
