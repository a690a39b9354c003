"""Resuming a run from a checkpoint: the bases of its adapters, its prompts, the clocks of its schedules."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from fppo.assembly.functions import rate_of
from fppo.assembly.run import MADE_BY, PromptRecord
from fppo.pipeline.program import Base, RunState
from fppo.runtime import checkpoint
from fppo.runtime.checkpoint import CheckpointError
from fppo.settings.learning import OptimizerSettings
from fppo.settings.train import TrainSettings
from fppo.steps.clock import Timeline, UpdateTurn, at_step, before_update
from fppo.steps.train_state import TrainState
from fppo.tree import replace


def check_bases(own: Mapping[str, Base] | None, path: Path) -> None:
    """Raise ValueError if the adapters in the checkpoint at `path` differ from a run's adapters in base weights, dtype
    or adapter config. `own` has the run's bases by role (None: no adapters). Raises CheckpointError if the checkpoint
    has none."""
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


def check_prompts(own: PromptRecord, path: Path, *, speaks: bool) -> None:
    """Raise ValueError if the run's training prompts, recorded in `own`, differ from those of the checkpoint at `path`,
    unless they may change; and if another command made the checkpoint. With `speaks` permitted changes, such as of
    held-out prompts, are printed on stderr. Prompts that the checkpoint has no notes of are not compared."""
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
    """Remove the clocks of models without one in the checkpoint, since earlier versions wrote none. A schedule without
    a clock goes on as it began, by the number of updates."""

    def known(role: str, state: TrainState) -> TrainState:
        if state.clock is None:
            return state
        try:
            checkpoint.load(0, directory, step, part=f".{role}.clock.first")
        except CheckpointError:
            return replace(state, clock=None)
        return state

    return replace(run, actor=known("actor", run.actor), critic=run.critic and known("critic", run.critic))


def say_rates(before: TrainSettings | None, settings: TrainSettings, run: RunState, *, supervised: bool) -> None:
    """Print on stderr each learning rate of the next update that differs from its value under the earlier settings
    `before`. A schedule that ends with the run has higher rates in a longer run."""
    if before is None:
        return
    then, prefix = dict(_schedules(before, supervised=supervised)), "supervised" if supervised else None
    for role, (section, updates, each) in _schedules(settings, supervised=supervised):
        state = run.actor if role == "actor" else run.critic
        if state is None or role not in then:
            continue
        old = _rate(state, *then[role], run.step, before.steps)
        new = _rate(state, section, updates, each, run.step, settings.steps)
        if not math.isclose(old, new, rel_tol=1e-6):
            print(
                f"going on from step {run.step} with another learning rate: {prefix or role}/lr is {new:.4g}, and was "
                f"to be {old:.4g}: {_course(section, settings.steps)}, before {_course(then[role][0], before.steps)}",
                file=sys.stderr,
            )


def _schedules(s: TrainSettings, *, supervised: bool) -> Iterator[tuple[str, tuple[OptimizerSettings, int, int]]]:
    """Yield, for each role that learns, its optimizer, the number of its updates in the run, and that in a step."""
    if supervised:
        yield "actor", (s.sft.optimizer, s.steps, 1)
        return
    roles = (("actor", s.actor, s.actor_steps), ("critic", s.critic, s.steps))
    for role, section, steps in roles[: 1 + s.algorithm.uses_critic]:
        each = section.updates(s.rollout.batch_size, s.rollout.n)
        yield role, (section.optimizer, steps * each, each)


def _rate(
    state: TrainState, section: OptimizerSettings, updates: int, updates_per_step: int, step: int, steps: int
) -> float:
    """The learning rate of the first update after `step` of `steps`, as `optimizer_step` will compute it. `updates` are
    those of the run so far."""
    rate = rate_of(section, updates)
    if state.clock is None:
        return rate(state.step)
    turn = UpdateTurn(Timeline(section.warmup(updates), updates), 0, updates_per_step)
    return rate(before_update(at_step(state.clock, step, steps), turn)[1])


def _course(section: OptimizerSettings, steps: int) -> str:
    if section.schedule == "constant":
        return f"constant {section.lr:g}"
    course = f"{section.schedule} from {section.lr:g} to {section.lr * section.min_lr_ratio:g} at step {steps}"
    return course if section.num_cycles == 1 else f"{course} in {section.num_cycles} cycles"
