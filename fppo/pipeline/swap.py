"""One step of a run under other kernels: in which stage, and in which leaf first, they part from the run's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo import tree
from fppo.batch import Experience, Prompts, Rollout, Scored
from fppo.pipeline.step import Program, RunState, ppo_step
from fppo_kernels.record import Kernels

Leaves = list[tuple[str, Any]]
ANNOTATIONS = ("old_log_probs", "ref_log_probs", "values", "sum_squared_probs")
ESTIMATES = ("token_rewards", "advantages", "returns", "correction_weights", "response_mask")


@attrs.frozen(kw_only=True)
class Parting:
    """How one stage differs from the reference: its first leaf that does, and by how much.

    `max_abs` is the largest difference in that leaf, `relative` that over the leaf's largest number, `worst` the
    largest `relative` in the stage. A leaf of another shape, or one that is not numbers, is infinitely far. `leaf` is
    None where the stage is bit-equal.
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
    """Kernels whose optimizer keeps, for each role, the gradients of the first update that is announced."""

    kernels: Kernels
    gradients: dict[str, list[Tensor]]
    announced: list[str]


@attrs.frozen(kw_only=True)
class Trace:
    """A step, stage by stage. `gradients` are those of the first update of each role, by parameter."""

    rollout: Rollout
    scored: Scored
    experience: Experience
    after: RunState
    gradients: dict[str, Leaves]


def watch(kernels: Kernels) -> Watched:
    """The kernels, watched; for one trace."""
    gradients: dict[str, list[Tensor]] = {}
    announced: list[str] = []

    def adamw(params: list[Tensor], grads: list[Tensor], *args: Any, **kwargs: Any) -> None:
        if announced:
            gradients[announced.pop()] = [g.clone() for g in grads]
        kernels.adamw(params, grads, *args, **kwargs)

    return Watched(kernels=attrs.evolve(kernels, adamw=adamw), gradients=gradients, announced=announced)


def trace(run: RunState, prompts: Prompts, *, program: Program, watched: Watched, given: Trace | None = None) -> Trace:
    """The step after `run`, by a program of watched kernels. `run` keeps its memory.

    With a `given` trace the stages after the rollout start from its scored batch, so that they stay comparable where
    the rollout's tokens are others.
    """
    made: dict[str, Any] = {}

    def rollout(*args: Any, **kwargs: Any) -> Any:
        made["rollout"], report = program.rollout(*args, **kwargs)
        return (made["rollout"] if given is None else given.rollout), report

    def score(batch: Rollout, **kwargs: Any) -> Any:
        if given is not None:
            return given.scored, {}
        made["scored"], report = program.score(batch, **kwargs)
        return made["scored"], report

    def announcing(role: str, update: Callable[..., Any] | None) -> Any:
        def announced(state: Any, *args: Any, **kwargs: Any) -> Any:
            watched.announced.append(role)
            made[role] = list(state.params)
            return update(state, *args, **kwargs)  # type: ignore[misc]

        return None if update is None else announced

    whole = attrs.evolve(
        program,
        rollout=rollout,
        score=score,
        update_critic=announcing("critic", program.update_critic),
        update_actor=announcing("actor", program.update_actor),
    )
    after, experience, _ = ppo_step(run, prompts, program=whole)
    gradients = {role: list(zip(made[role], found, strict=True)) for role, found in watched.gradients.items()}
    scored = made["scored"] if given is None else given.scored
    return Trace(rollout=made["rollout"], scored=scored, experience=experience, after=after, gradients=gradients)


def partings(reference: Trace, other: Trace) -> list[Parting]:
    """Every stage of the step in its order, each with where the other trace parts from the reference."""
    both = [_stages(reference), _stages(other)]
    return [_parting(name, both[0][name], both[1].get(name, [])) for name in both[0]]


def _stages(step: Trace) -> dict[str, Leaves]:
    found: dict[str, Leaves] = {"rollout": tree.leaves_with_paths(step.rollout)}
    for name in ANNOTATIONS:
        found[name] = _fields(step.experience, (name,))
    found["advantages"] = _fields(step.experience, ESTIMATES)
    for role in ("critic", "actor"):
        found[f"{role} gradients"] = step.gradients.get(role, [])
        state = getattr(step.after, role)
        found[f"{role} state"] = [] if state is None else tree.leaves_with_paths(state)
    return {name: leaves for name, leaves in found.items() if leaves}


def _fields(record: Any, names: Sequence[str]) -> Leaves:
    return [(name, getattr(record, name)) for name in names if getattr(record, name) is not None]


def _parting(stage: str, expected: Leaves, actual: Leaves) -> Parting:
    found = dict(actual)
    gaps = [(name, _gap(value, found.get(name))) for name, value in expected]
    apart = [(name, gap) for name, gap in gaps if gap is not None]
    if not apart:
        return Parting(stage=stage, leaves=len(gaps))
    name, (largest, relative) = apart[0]
    return Parting(
        stage=stage,
        leaf=name,
        max_abs=largest,
        relative=relative,
        worst=max(gap[1] for _, gap in apart),
        differing=len(apart),
        leaves=len(gaps),
    )


def _gap(expected: Any, actual: Any) -> tuple[float, float] | None:
    """The largest difference, and that over the largest number; None for equal bits."""
    if not isinstance(expected, Tensor):
        return None if expected == actual else (torch.inf, torch.inf)
    if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return torch.inf, torch.inf
    if tree.digest(expected) == tree.digest(actual):
        return None
    a, b = expected.double(), actual.double()
    gap = (a - b).abs().where(~(a.isnan() & b.isnan()), 0.0).nan_to_num(nan=torch.inf).max().item()
    largest = a.abs().nan_to_num(nan=0.0).max().item()
    return gap, gap / largest if largest else gap
