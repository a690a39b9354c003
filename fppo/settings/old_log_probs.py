"""Where a run's old log-probs come from, as its settings have it."""

from __future__ import annotations

from fppo.settings.algorithm import OldLogProbs
from fppo.settings.component import requires
from fppo.settings.problems import Problems, problem
from fppo.settings.tables import ESTIMATORS
from fppo.settings.train import TrainSettings


def source(settings: TrainSettings) -> OldLogProbs:
    """Where they come from; "auto" if every step sees whether the engine's will do."""
    asked = settings.algorithm.old_log_probs
    if asked in ("pass", "engine", "update"):
        return asked
    if not passes_before_update(settings):
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
    if algorithm.correction.name != "none":
        reasons.append("algorithm.correction compares the two")
    if requires(algorithm.advantage, ESTIMATORS, "sum_squared_probs"):
        reasons.append(f"{algorithm.advantage.name} needs a pass anyway")
    if requires(algorithm.advantage, ESTIMATORS, "values") and settings.critic.reads != "tokens":
        reasons.append(f"critic.reads = {settings.critic.reads} needs a pass anyway")
    return reasons


def passes_before_update(s: TrainSettings) -> list[str]:
    """Why the old log-probs must be there before the update, instead of from its own pass; empty if they need not.

    Its own pass will do where the ratio of new to old is 1 all along, and nothing else asks for the old ones.
    """
    size, correction = s.rollout.batch_size, s.algorithm.correction
    reasons = []
    if s.actor.epochs > 1 or (s.actor.mini_batch_size or size) != size:
        reasons.append("actor.epochs and actor.mini_batch_size make several updates of a batch")
    if s.algorithm.kl.coef > 0:
        reasons.append("algorithm.kl.coef puts their KL to the reference into the rewards")
    if correction.name != "none":
        reasons.append("algorithm.correction compares them with the engine's")
    if requires(s.algorithm.advantage, ESTIMATORS, "log_probs"):
        reasons.append(f"{s.algorithm.advantage.name} estimates advantages with them")
    return reasons


def old_log_probs_problems(s: TrainSettings) -> Problems:
    """What keeps the old log-probs from coming from where they are asked."""
    source, correction = s.algorithm.old_log_probs, s.algorithm.correction
    if source == "update" and (reasons := passes_before_update(s)):
        text = f"they are needed before the update: {'; '.join(reasons)}; give pass, or leave it out"
        yield problem("algorithm.old_log_probs", source, text)
    if source == "engine" and correction.name != "none":
        text = "algorithm.correction would compare the engine's with themselves, and all weights be 1; leave one out"
        yield problem("algorithm.old_log_probs", source, text)
