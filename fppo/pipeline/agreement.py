"""What stages are bound to, held against each other: settings that a script can give to one and forget for another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fppo.pipeline import stages
from fppo.pipeline.passes import policy_pass
from fppo.pipeline.program import Program
from fppo.steps.actor import update_actor

Bound = Mapping[str, Any]


def problems(program: Program) -> list[str]:
    """What does not go together, one line each; of stages that are `functools.partial` of those that fppo has."""
    rollout = _bound(program.rollout, stages.rollout_stage)
    notes = _bound(program.annotate, stages.annotate) or _of_passes(_bound(program.annotate, stages.annotate_by))
    estimate = _bound(program.estimate, stages.estimate)
    update = _bound(program.update_actor, update_actor)
    return [*_temperatures(rollout, notes, estimate, update), *_old_log_probs(notes, estimate, update)]


def _bound(stage: Callable[..., Any], fn: Callable[..., Any]) -> Bound | None:
    """The keywords that a stage calls `fn` by, with its defaults; None if it is another function."""
    stage = inspect.unwrap(stage)
    if not isinstance(stage, partial) or stage.func is not fn:
        return None
    return {name: parameter.default for name, parameter in inspect.signature(stage).parameters.items()}


def _of_passes(notes: Bound | None) -> Bound | None:
    """What `annotate_by` is bound to, as `annotate` would be; without a temperature where its passes do not show it."""
    if notes is None:
        return None
    policy = _bound(notes["passes"].policy, policy_pass)
    return {**notes} if policy is None else {**notes, "temperature": policy["temperature"]}


def _temperatures(
    rollout: Bound | None, notes: Bound | None, estimate: Bound | None, update: Bound | None
) -> list[str]:
    """A correction may weigh what another temperature sampled; nothing makes up for the rest."""
    places: dict[str, float] = {}
    if rollout is not None and (estimate is None or estimate["correct"] is None):
        places["rollout (Sampling)"] = rollout["sampling"].temperature
    if notes is not None and "temperature" in notes:
        places["annotate"] = notes["temperature"]
    if update is not None:
        places["update_actor (PolicyTerms)"] = update["terms"].temperature
    if len(set(places.values())) < 2:
        return []
    text = ", ".join(f"{value} in {name}" for name, value in places.items())
    return [f"temperature = {text}: log-probs would be of different distributions; give all the same"]


def _old_log_probs(notes: Bound | None, estimate: Bound | None, update: Bound | None) -> list[str]:
    if notes is None:
        return []
    source, lines = notes["old_log_probs"], []
    if update is not None and (source == "update") != (update["old_log_probs"] == "update"):
        other = update["old_log_probs"]
        lines.append(f"old_log_probs = {source!r} in annotate, {other!r} in update_actor: give both the same")
    if estimate is None or source == "pass":
        return lines
    if estimate["correct"] is not None:
        text = "correct in estimate would compare the engine's with themselves; give 'pass', or leave it out"
        lines.append(f"old_log_probs = {source!r} in annotate: {text}")
    if source == "update" and estimate["kl_in_reward"]:
        text = "kl_in_reward in estimate needs them before the update; give 'pass'"
        lines.append(f"old_log_probs = {source!r} in annotate: {text}")
    return lines
