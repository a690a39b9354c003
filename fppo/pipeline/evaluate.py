"""Held-out prompts, answered and scored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import attrs

from fppo import metrics
from fppo.batch import Prompts, Rollout, Scored
from fppo.episodes import joined
from fppo.metrics import Metrics
from fppo.pipeline.program import RunState
from fppo.pipeline.stages import ScoreFn
from fppo.pipeline.truth import OnCompared
from fppo.rewards import summarize
from fppo.rollout.engine import Ask, Engine, Sampling

FAILED = ("errors", "timeouts")
OnScored = Callable[[Sequence[Scored]], None]


class EvaluateRun(Protocol):
    """Protocol of evaluations: they return metrics of a run's policy. `keep` gets all responses, and `keep_compared`
    some with their exact values."""

    def __call__(self, run: RunState, keep: OnScored = ..., keep_compared: OnCompared = ...) -> Metrics: ...


@attrs.frozen(kw_only=True)
class EvaluateHeldOut:
    """Evaluate a run's policy on the same prompts each time and, if `truth` is given, its critic by comparison with
    exact values."""

    batches: Callable[[], Iterable[Prompts]]
    engine: Engine
    sampling: Sampling
    score: ScoreFn
    measure: Sequence[Callable[[Rollout], Metrics]] = ()
    truth: Callable[..., Metrics] | None = None

    def __call__(
        self,
        run: RunState,
        keep: OnScored = lambda scored: None,
        keep_compared: OnCompared = lambda compared: None,
    ) -> Metrics:
        how = {"engine": self.engine, "sampling": self.sampling, "score": self.score, "measure": self.measure}
        report = evaluate(run, batches=self.batches(), on_scored=keep, **how)
        return report if self.truth is None else report | self.truth(run, prompts=self.batches(), keep=keep_compared)


def evaluate(
    run: RunState,
    *,
    batches: Iterable[Prompts],
    engine: Engine,
    sampling: Sampling,
    score: ScoreFn,
    measure: Sequence[Callable[[Rollout], Metrics]] = (),
    on_scored: OnScored = lambda scored: None,
) -> Metrics:
    """The held-out metrics of the policy: mean, best@k and majority@k of its scores, by source; val-aux/errors and
    val-aux/timeouts are the responses that could not be scored. The metrics that `measure` returns for rollouts are in
    val-aux/, too.

    Draws depend on the run's key and the prompt, not on the step, so evaluations differ by the policy alone. All
    responses with their scores go to `on_scored`, in batches; an episode of several rows is one response.
    """
    scored: list[Scored] = []
    reports: list[Metrics] = []
    for number, prompts in enumerate(batches):
        key = run.key.fold("evaluate", number)
        rollout = joined(engine.generate(run.actor.params, Ask(prompts, sampling, key, version=run.actor.step)))
        rows, report = score(rollout)
        scored.append(rows)
        reports.append({f"val-aux/{name}": report[f"reward/{name}"] for name in FAILED if f"reward/{name}" in report})
        reports += [{f"val-aux/{name}": x for name, x in fn(rollout).items()} for fn in measure]
    on_scored(scored)
    return summarize(scored, n=sampling.n) | metrics.merge(*reports)
