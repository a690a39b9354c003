"""Held-out prompts, answered and scored."""

from __future__ import annotations

from collections.abc import Iterable

from fppo.batch import Prompts, Scored
from fppo.metrics import Metrics
from fppo.pipeline.program import RunState
from fppo.pipeline.stages import ScoreFn
from fppo.rewards import summarize
from fppo.rollout.engine import Ask, Engine, Sampling


def evaluate(
    run: RunState, *, batches: Iterable[Prompts], engine: Engine, sampling: Sampling, score: ScoreFn
) -> Metrics:
    """The held-out metrics of the policy: mean, best@k and majority@k of its scores, by source.

    Draws depend on the run's key and the prompt, not on the step, so evaluations differ by the policy alone.
    """
    scored: list[Scored] = []
    for number, prompts in enumerate(batches):
        key = run.key.fold("evaluate", number)
        rollout = engine.generate(run.actor.params, Ask(prompts, sampling, key, version=run.actor.step))
        scored.append(score(rollout)[0])
    return summarize(scored, n=sampling.n)
