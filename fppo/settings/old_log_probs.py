"""Where a run's old log-probs come from, as its settings have it."""

from __future__ import annotations

from fppo.settings import checks
from fppo.settings.train import OldLogProbs, TrainSettings


def source(settings: TrainSettings) -> OldLogProbs:
    """Where they come from; "auto" if every step sees whether the engine's will do."""
    asked = settings.algorithm.old_log_probs
    if asked in ("pass", "engine", "update"):
        return asked
    if not checks.passes_before_update(settings):
        return "update"
    return "auto" if asked == "auto" and not passes_besides(settings) else "pass"


def passes_besides(settings: TrainSettings) -> list[str]:
    """Why the engine's log-probs cannot stand for the policy's own; empty if they may be the same but for rounding."""
    rollout, algorithm = settings.rollout, settings.algorithm
    reasons = []
    if rollout.engine != "embedded":
        reasons.append(f"rollout.engine = {rollout.engine} is a copy of the policy, which computes otherwise")
    if settings.model.compute_dtype != "float32":
        reasons.append(f"model.compute_dtype = {settings.model.compute_dtype} rounds the engine's otherwise")
    if rollout.ahead or rollout.from_ is not None:
        reasons.append(f"rollout.{'ahead' if rollout.ahead else 'from'} trains on what an earlier policy sampled")
    if algorithm.correction.mode != "none" or algorithm.correction.rejection:
        reasons.append("algorithm.correction compares the two")
    if algorithm.advantage == "optimal_token_baseline":
        reasons.append("optimal_token_baseline needs a pass anyway")
    return reasons
