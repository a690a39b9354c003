"""Compare a step of a run under other kernels with the run's own: the stages that differ, and the first leaf that
does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo import tree
from fppo.batch import Experience, Rollout, Scored, narrow
from fppo.data.cursor import DataCursor
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.pipeline.program import Draw, Program, RolloutStage, RunState, ScoreStage, UpdateStage
from fppo.pipeline.train import iterate
from fppo.steps.train_state import TrainState
from fppo_kernels.table import Kernels

Leaves = list[tuple[str, Any]]
ANNOTATIONS = (
    "old_log_probs",
    "ref_log_probs",
    "values",
    "disagreement",
    "sum_squared_probs",
    "entropy",
    "hidden",
    "truth_signs",
    "routed",
)
ESTIMATES = ("token_rewards", "advantages", "returns", "correction_weights", "entropy_mask", "response_mask")


@attrs.frozen(kw_only=True)
class StageDifference:
    """How one stage differs from the reference: its first differing `leaf` of `leaves`, and by how much.

    `max_abs` is the largest difference in that leaf, `relative` its ratio to the leaf's largest number, `worst` the
    largest `relative` in the stage. A leaf of another shape or dtype, or an unequal one that is not a tensor, is
    infinitely far. `leaf` is None if the stage is bit-equal.
    """

    stage: str
    leaf: str | None = None
    max_abs: float = 0.0
    relative: float = 0.0
    worst: float = 0.0
    differing: int = 0
    leaves: int = 0


@attrs.frozen(kw_only=True)
class Watched:
    """Kernels whose AdamW keeps, for each role, the gradients of the first update after the role is announced."""

    kernels: Kernels
    gradients: dict[str, list[Tensor]]
    announced: list[str]


@attrs.frozen(kw_only=True)
class Trace:
    """Results of one training step, kept stage by stage for a comparison.

    sampled: the batch that this step sampled and scored; None if it took a batch that was sampled ahead, in an earlier
    step.
    experience: the batch with its estimates, as the updates got it.
    after: the state of the run after the step.
    gradients: for each role, "actor" or "critic", each parameter's name and gradient in the role's first update. A role
    is missing if its optimizer did not pass all its parameters to the AdamW kernel in one call.
    """

    sampled: Scored | None
    experience: Experience
    after: RunState
    gradients: dict[str, Leaves]


def watch(kernels: Kernels) -> Watched:
    """Wrap kernels so that they keep gradients, for one trace."""
    gradients: dict[str, list[Tensor]] = {}
    announced: list[str] = []

    def adamw(params: list[Tensor], grads: list[Tensor], *args: Any, **kwargs: Any) -> None:
        if announced:
            gradients[announced.pop()] = [g.clone() for g in grads]
        kernels.adamw(params, grads, *args, **kwargs)

    return Watched(kernels=attrs.evolve(kernels, adamw=adamw), gradients=gradients, announced=announced)


def trace(
    run: RunState, *, program: Program, draw: Draw, watched: Watched, ahead: int = 0, reference: Trace | None = None
) -> Trace:
    """Trace the step after `run`, by a program of watched kernels. `run` keeps its memory.

    With a `reference` the stages after the rollout start from its batch, so that they stay comparable even if other
    tokens are sampled here. `ahead` is that of `iterate`.
    """
    batches: list[Scored] = []
    parameters: dict[str, list[str]] = {}

    def sample(
        state: RunState, *, draw: Draw, rollout: RolloutStage, score: ScoreStage
    ) -> tuple[Scored, DataCursor, Metrics]:
        scored, cursor, report = program.sample(state, draw=draw, rollout=rollout, score=score)
        if state.step == run.step:  # else it is sampled ahead
            batches.append(scored)
            if reference is not None and reference.sampled is not None:
                scored = reference.sampled
        return scored, cursor, report

    def announcing(role: str, update: UpdateStage) -> UpdateStage:
        def announced(state: TrainState, batch: Experience, *, key: Key, donate: bool) -> tuple[TrainState, Metrics]:
            watched.announced[:] = [role]
            parameters[role] = list(state.params)
            done = update(state, batch, key=key, donate=donate)
            watched.announced.clear()  # an optimizer without AdamW's kernel has not taken it
            return done

        return announced

    critic = program.update_critic
    whole = attrs.evolve(
        program,
        sample=sample,
        update_critic=None if critic is None else announcing("critic", critic),
        update_actor=announcing("actor", program.update_actor),
    )
    after, experience, _ = next(iterate(run, program=whole, draw=draw, ahead=ahead, donate=False))
    gradients = {
        role: list(zip(parameters[role], grads, strict=True))
        for role, grads in watched.gradients.items()
        if len(grads) == len(parameters[role])
    }
    sampled = batches[0] if batches else None
    return Trace(sampled=sampled, experience=experience, after=after, gradients=gradients)


def stage_differences(reference: Trace, other: Trace) -> list[StageDifference]:
    """Compare two traces: one result for each stage of the step, in order."""
    both = [_stages(reference), _stages(other)]
    return [_stage_difference(name, both[0][name], both[1].get(name, [])) for name in both[0]]


def _stages(step: Trace) -> dict[str, Leaves]:
    sampled = [] if step.sampled is None else tree.leaves_with_paths(narrow(Rollout, step.sampled))
    stages: dict[str, Leaves] = {"rollout": sampled}
    for name in ANNOTATIONS:
        stages[name] = _fields(step.experience, (name,))
    stages["advantages"] = _fields(step.experience, ESTIMATES)
    for role in ("critic", "actor"):
        stages[f"{role} gradients"] = step.gradients.get(role, [])
        state = getattr(step.after, role)
        stages[f"{role} state"] = [] if state is None else tree.leaves_with_paths(state)
    return {name: leaves for name, leaves in stages.items() if leaves}


def _fields(record: Any, names: Sequence[str]) -> Leaves:
    return [(name, getattr(record, name)) for name in names if getattr(record, name) is not None]


def _stage_difference(stage: str, expected: Leaves, actual: Leaves) -> StageDifference:
    others = dict(actual)
    gaps = [(name, _gap(value, others.get(name))) for name, value in expected]
    apart = [(name, gap) for name, gap in gaps if gap is not None]
    if not apart:
        return StageDifference(stage=stage, leaves=len(gaps))
    name, (largest, relative) = apart[0]
    return StageDifference(
        stage=stage,
        leaf=name,
        max_abs=largest,
        relative=relative,
        worst=max(gap[1] for _, gap in apart),
        differing=len(apart),
        leaves=len(gaps),
    )


def _gap(expected: Any, actual: Any) -> tuple[float, float] | None:
    """The largest difference between two leaves, and its ratio to the largest number in `expected`; None if their bits
    are equal, and infinity if they cannot be compared."""
    if not isinstance(expected, Tensor):
        return None if expected == actual else (torch.inf, torch.inf)
    if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return torch.inf, torch.inf
    if tree.digest(expected) == tree.digest(actual):
        return None
    a, b = expected.double(), actual.double()
    apart = (a != b) & ~(a.isnan() & b.isnan())
    gap = (a - b).abs().where(apart, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()
    largest = a.abs().where(a.isfinite(), 0.0).max().item()
    return gap, gap / largest if largest else gap
