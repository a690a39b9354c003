"""Numbers of a run that depend on the clock, and the settings that read them."""

from __future__ import annotations

from fppo.settings.checks_rollout import exact_hindrances
from fppo.settings.resolve import old_log_probs_source
from fppo.settings.train import TrainSettings


def said_of_clock(settings: TrainSettings) -> list[str]:
    """A line on sampled log-probs whose last bits vary from run to run, since timing decides which rows are decoded
    together, and on the settings that read them; empty for runs without such log-probs."""
    if not settings.in_turns or settings.rollout.exact:
        return []
    algorithm, source = settings.algorithm, old_log_probs_source(settings)
    readers = [f"algorithm.old_log_probs = {algorithm.old_log_probs!r}"] if source in ("engine", "auto") else []
    readers += [f"algorithm.correction = {algorithm.correction.name!r}"] if algorithm.correction.name != "none" else []
    reads = any(map(algorithm.reads, ("rollout_log_probs", "sampling_log_probs")))
    readers += [f"algorithm.advantage = {algorithm.advantage.name!r}"] if reads else []
    verb = "reads" if len(readers) == 1 else "read"
    who = f"{' and '.join(readers)} {verb} them, so updates vary" if readers else "metrics alone read them"
    exact = "" if [*exact_hindrances(settings)] else "; rollout.exact = true keeps all bits"
    text = "turns are decoded as answers come, so the last digits of sampled log-probs vary from run to run"
    return [f"{text}: {who}{exact}"]
