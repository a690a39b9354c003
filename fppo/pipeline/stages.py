"""The stages of a step: frozen values that are called with a record and return the record of the next stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import advantages, losses, metrics
from fppo._errors import RunFailed, listed
from fppo.advantages.columns import Estimator
from fppo.advantages.experience import estimate
from fppo.batch import Annotated, Experience, Prompts, Rollout, Scored, extend
from fppo.episodes import joined, layout_of, num_episodes
from fppo.key import Key
from fppo.losses import Correction, KLState
from fppo.metrics import Metrics
from fppo.pipeline.gap import of_engine
from fppo.pipeline.measure import batch_metrics, token_metrics
from fppo.pipeline.passes import Passes, PolicyFn, RouterReplay, ValueFn, read_values, required
from fppo.pipeline.program import EstimateStage, RunState, Together, in_turn
from fppo.pipeline.timing import timed
from fppo.rollout.engine import Ask, Engine, Newer, OnFinished, Sampling
from fppo.rollout.turns.engine import FAILURES, INFO
from fppo.steps.actor import OldLogProbs, rollout_gap
from fppo.steps.experts import rerouted
from fppo.steps.outputs import TokenOutputs
from fppo.steps.packed import sorted_rows
from fppo.steps.train_state import Params
from fppo.tree import replace

ScoreFn = Callable[[Rollout], tuple[Scored, Metrics]]
NUMBERS = 1000  # the most names in an environment's info in a batch
_PASSES = ("old_log_prob", "ref", "values")


def no_callback(prompts: Prompts, n: int) -> OnFinished | None:
    """Make no callback for finished rows."""
    del prompts, n


@attrs.frozen(kw_only=True)
class RollOut:
    """Sample responses to prompts by the engine, and report how far its two kinds of log-probs differ, and the metrics
    of `measure`. `make_on_finished(prompts, n)` gives the function that the engine calls for each row as it
    finishes."""

    engine: Engine
    sampling: Sampling
    measure: Sequence[Callable[[Rollout], Metrics]] = ()
    make_on_finished: Callable[[Prompts, int], OnFinished | None] = no_callback

    def __call__(
        self, prompts: Prompts, params: Params, *, key: Key, version: int, newer: Newer | None = None
    ) -> tuple[Rollout, Metrics]:
        """Sample a rollout by the policy `params` after `version` updates; `newer` gives newer weights, as in `Ask`."""
        on_finished = self.make_on_finished(prompts, self.sampling.n)
        ask = Ask(prompts, self.sampling, key, version=version, on_finished=on_finished, newer=newer)
        rollout = self.engine.generate(params, ask)
        kept = (rollout.rollout_log_probs - rollout.sampling_log_probs).exp()
        reports = [fn(rollout) for fn in self.measure]
        kept_mass = metrics.masked_mean(kept, rollout.response_mask)
        report = metrics.merge({"rollout/kept_mass": kept_mass}, draft_metrics(rollout), *reports)
        return replace(rollout, drafts=None, earlier=None), report


def draft_metrics(rollout: Rollout) -> Metrics:
    """The mean tokens that were drafted for a response, the share of them that was accepted, and the tokens of a
    response for each pass of the model; none without drafts."""
    if rollout.drafts is None:
        return {}
    (drafted, accepted), tokens = rollout.drafts.sum(0), rollout.response_mask.sum()
    return {
        "rollout/drafts/tokens": metrics.mean(drafted, len(rollout.drafts)),
        "rollout/drafts/accepted": metrics.mean(accepted, drafted),
        "rollout/drafts/tokens_per_pass": metrics.mean(tokens, tokens - accepted),
    }


@attrs.frozen(kw_only=True)
class Score:
    """Add the scores of a reward to a rollout."""

    score: ScoreFn

    def __call__(self, rollout: Rollout, *, params: Params, prompts: Prompts | None) -> tuple[Scored, Metrics]:
        del params, prompts
        return self.score(rollout)


@attrs.frozen(kw_only=True)
class ScoreWithGreedy:
    """Add scores, and as the baseline the score of each prompt's greedy response (ReMax, arXiv:2310.10505), which the
    engine samples by `sampling`."""

    score: ScoreFn
    engine: Engine
    sampling: Sampling

    def __call__(self, rollout: Rollout, *, params: Params, prompts: Prompts | None) -> tuple[Scored, Metrics]:
        """Score the rows, which are in the order of engines: all responses to a prompt are adjacent. Raises ValueError
        without prompts."""
        if prompts is None:
            raise ValueError("remax samples a greedy response to each prompt: a rollout from a file has no prompts")
        scored, report = self.score(rollout)
        greedy = self.engine.generate(params, Ask(prompts, self.sampling, Key(0), version=int(rollout.versions[0])))
        baselines, _ = self.score(joined(greedy))
        per_row = baselines.scores.repeat_interleave(num_episodes(rollout) // len(prompts.tokens))
        per_row = per_row if rollout.episodes is None else per_row[layout_of(rollout).episode_of]
        report["critic/baseline/mean"] = metrics.masked_mean(per_row, ~per_row.isnan())
        return extend(Scored, scored, baselines=per_row), report


@attrs.frozen(kw_only=True)
class Annotate:
    """Add old log-probs, reference log-probs if the run has a reference, and values if it has a critic.

    `old_log_probs` is the source of the old log-probs. "pass": a pass of the policy before its update. "engine": the
    engine. "update": the update's own pass; until then the engine's stand in their place. "auto": the engine, if a pass
    over a few rows finds that they are the policy's own, else a pass (`gap.of_engine`). The metric
    training/old_log_probs/SOURCE is 1.

    With `replay` a pass reports the experts that the policy chooses. With "all" the reference chooses the same, so its
    pass comes after. With "rollout" the rows have the experts that the engine chose, and the policy's passes choose
    them again; a pass over all rows reports the experts that it would have chosen (`experts.rerouted`). Passes that do
    not need each other's results run `together`. `sum_squared` adds the sums of squared probabilities.
    """

    passes: Passes
    old_log_probs: OldLogProbs = "pass"
    sum_squared: bool = False
    replay: RouterReplay = "none"
    together: Together = in_turn

    def __call__(self, scored: Scored, run: RunState) -> tuple[Annotated, Metrics]:
        """Add the outputs of the run's models to the rows."""
        passes, replay = self.passes, self.replay
        work: dict[str, Callable[[], tuple[Any, Metrics]]] = {
            "old_log_prob": partial(timed("old_log_prob", self._old), scored, run)
        }
        ref = timed("ref", _ref)
        if run.ref is not None and replay != "all":
            work["ref"] = partial(ref, scored, run.ref, passes.reference)
        if run.critic is not None and passes.values is not None:
            work["values"] = partial(timed("values", _values), scored, run.critic.params, passes.values)
        done = self.together(work)
        (source, old, found), _ = done["old_log_prob"]
        routed = scored.routed if replay == "rollout" else found.routed
        annotated = extend(Annotated, scored, old_log_probs=old, routed=routed)
        if run.ref is not None and replay == "all":
            done = {**done, "ref": ref(annotated, run.ref, passes.reference)}
        values, apart, signs = done["values"][0] if "values" in done else None, None, None
        times = {f"timing_s/{name}": metrics.spent() for name in _PASSES}
        report = metrics.merge(times, *(x for _, x in done.values()))
        if run.critic is not None and passes.read:
            values, apart, signs = read_values(passes, run.critic.params, old, found, scored)
        if apart is not None:
            report["critic/ensemble/std"] = metrics.masked_mean(apart, scored.response_mask)
        report |= {f"training/old_log_probs/{source}": metrics.mean(1.0)} | passes.balance(sorted_rows(scored))
        if replay == "rollout" and routed is not None and found.routed is not None:
            report |= rerouted(routed, found.routed, scored.attention_mask)
        columns = {"values": values, "disagreement": apart, "sum_squared_probs": found.sum_squared_probs}
        columns |= {"entropy": found.entropy, "hidden": found.hidden, "truth_signs": signs}
        ref_log_probs = done["ref"][0] if "ref" in done else None
        return extend(Annotated, annotated, ref_log_probs=ref_log_probs, **columns), report

    def _outputs(self) -> list[str]:
        """Names of the outputs that the policy's pass is to compute, log-probs first."""
        besides = {"sum_squared_probs": self.sum_squared, **dict.fromkeys(self.passes.read, True)}
        whole = self.old_log_probs == "pass" or any(besides.values())  # there is a pass over all rows anyway
        besides["routed"] = whole if self.replay == "rollout" else self.replay != "none"
        return ["log_probs", *(name for name, wanted in besides.items() if wanted)]

    def _old(self, scored: Scored, run: RunState) -> tuple[tuple[OldLogProbs, Tensor, TokenOutputs], Metrics]:
        """Return the source of the old log-probs ("pass", "engine" or "update"), the old log-probs [B, T], and the
        outputs of the policy's pass, all None if the engine or `gap.of_engine` gave all that is needed; and metrics."""
        outputs, policy, source, old = self._outputs(), self.passes.policy, self.old_log_probs, scored.rollout_log_probs
        alone = outputs == ["log_probs"]

        def again(rows: Scored) -> Tensor:
            return required(policy(run.actor.params, rows, outputs=outputs).log_probs)

        if source == "auto" and alone:
            source, old, report = of_engine(scored, run, again)
            return (source, old, TokenOutputs()), report
        if source in ("engine", "update") and alone:
            return (source, old, TokenOutputs()), {}
        out = policy(run.actor.params, scored, outputs=outputs)
        log_probs = required(out.log_probs)
        source = "pass" if source == "auto" else source
        report = rollout_gap(log_probs, scored.rollout_log_probs, scored.response_mask)
        return (source, log_probs if source == "pass" else old, out), report


def _ref(scored: Scored, params: Params, reference: PolicyFn) -> tuple[Tensor, Metrics]:
    return required(reference(params, scored, outputs=("log_probs",)).log_probs), {}


def _values(scored: Scored, params: Params, values: ValueFn) -> tuple[Tensor, Metrics]:
    return values(params, scored), {}


@attrs.frozen
class LeaveAgreed:
    """Estimate by another stage, with advantages of 0 at the `share` of tokens on which an ensemble of critics agrees
    most (`advantages.decisive`); critic/ensemble/left is the fraction of such tokens. The critics learn from all
    tokens."""

    stage: EstimateStage
    share: float = attrs.field(kw_only=True)

    def __call__(self, annotated: Annotated, kl: KLState) -> tuple[Experience, KLState, Metrics]:
        """Take and return what `Estimate` does. Raises ValueError for a batch without an ensemble's disagreement."""
        experience, kl, report = self.stage(annotated, kl)
        mask = experience.response_mask
        kept = advantages.decisive(_apart(experience, "LeaveAgreed"), mask, share=self.share)
        left = {"critic/ensemble/left": metrics.masked_mean(~kept, mask)}
        return replace(experience, advantages=experience.advantages.where(kept, 0.0)), kl, report | left


@attrs.frozen
class LeaveDisputed:
    """Estimate by another stage, without an entropy bonus for the `share` of tokens on which an ensemble of critics
    disagrees most (`advantages.undisputed`); critic/ensemble/disputed is the fraction of such tokens."""

    stage: EstimateStage
    share: float = attrs.field(kw_only=True)

    def __call__(self, annotated: Annotated, kl: KLState) -> tuple[Experience, KLState, Metrics]:
        """Take and return what `Estimate` does. Raises ValueError for a batch without an ensemble's disagreement."""
        experience, kl, report = self.stage(annotated, kl)
        mask = experience.response_mask
        kept = advantages.undisputed(_apart(experience, "LeaveDisputed"), mask, share=self.share)
        gone = {"critic/ensemble/disputed": metrics.masked_mean(~kept, mask)}
        return replace(experience, entropy_mask=kept), kl, report | gone


def _apart(experience: Experience, reader: str) -> Tensor:
    if experience.disagreement is None:
        raise ValueError(f"{reader} needs disagreement in the batch: give the run an ensemble of critics")
    return experience.disagreement


@attrs.frozen(kw_only=True)
class Estimate:
    """Add token rewards, advantages and returns, and the off-policy correction; and advance the KL controller.

    `advantage_fn` is an estimator like those of `fppo.advantages`: its parameters are columns (`OfRows`). First, rows
    without a score (or, with baselines, without a baseline) leave the mask and their group. Then advantages are
    estimated on all response tokens of the others. Last, rows for which a function of `drop` is True (bool [B]), and
    tokens that the correction rejects, leave the mask, the whitening and all denominators; so a rejected last token
    does not take its row's reward with it. The controller sees the divergence of all rows.
    """

    advantage_fn: Estimator
    max_tokens: int
    kl_in_reward: bool = False
    kl_kind: str = "k1"
    update_kl: Callable[[KLState, Tensor, Tensor], KLState] | None = None
    correct: Callable[[Tensor, Tensor, Tensor], Correction] | None = None
    drop: Sequence[Callable[[Annotated], Tensor]] = ()
    whiten: bool = False

    def __call__(self, annotated: Annotated, kl: KLState) -> tuple[Experience, KLState, Metrics]:
        """The experience, the KL controller's next state, and metrics.

        Raises ValueError for an estimator whose results are not [B, T], and for a KL in the rewards without reference
        log-probs or of another kind than "k1": only that has an expected gradient of 0 itself, so that the penalty in
        the rewards is all of it. Raises RunFailed, a ValueError, if no row of the first policy has a score.
        """
        if self.kl_in_reward:
            _check_penalty(annotated, kl, self.kl_kind)
        _check_scores(annotated)
        experience, kl, report = estimate(
            annotated,
            kl,
            advantage_fn=self.advantage_fn,
            kl_in_reward=self.kl_in_reward,
            kl_kind=self.kl_kind,
            update_kl=self.update_kl,
            correct=self.correct,
            drop=self.drop,
            whiten=self.whiten,
        )
        whole = batch_metrics(joined(experience), max_tokens=self.max_tokens)
        return experience, kl, report | whole | token_metrics(experience)


def _check_scores(annotated: Annotated) -> None:
    """Raise RunFailed if the policy has had no update, and no row has a score."""
    there = annotated.has_score
    if not there.any() and not annotated.versions.any():
        lacking = [name for name, x in annotated.named_scores.items() if x.isnan().any()]
        raise RunFailed(
            f"none of the first {len(there)} responses has a score, so there is nothing to learn from: {lacking} gave "
            "none, as the counts of what failed say; mend that, or name the score of a failure (reward.failure_score)"
        )


def _check_penalty(annotated: Annotated, kl: KLState, kind: str) -> None:
    """Raise ValueError for a KL in the rewards without a reference, or of a kind whose gradient is not the
    divergence's."""
    if kl.coef > 0 and annotated.ref_log_probs is None:
        text = "needs ref_log_probs in the batch: give the run a reference policy (RunState.ref)"
        raise ValueError(f"kl_in_reward=True with the coefficient {float(kl.coef):g} {text}")
    if kind not in losses.REWARD_KINDS:
        text = "is a loss and no reward: penalties of its value do not add up to the divergence's gradient; give 'k1'"
        raise ValueError(f"kl_in_reward=True with kl_kind={kind!r}: it {text}")


def turn_metrics(rollout: Rollout) -> Metrics:
    """Metrics of turns: their number in a response (observations separate them), the tokens of observations, and failed
    calls of tools; for an environment the numbers of its info and failed episodes instead. If episodes have several
    rows, also their number."""
    several = rollout.episodes is not None
    rows = {"rollout/rows/mean": metrics.mean(len(rollout.row_ids), num_episodes(rollout))} if several else {}
    rollout = joined(rollout)
    chosen = rollout.response_mask
    seen = rollout.attention_mask[:, -chosen.shape[1] :]
    turns = (chosen & ~F.pad(chosen, (1, -1))).sum(1)
    of_environment = rollout.turn_rewards is not None
    if of_environment and rollout.turn_ids is not None:
        turns = rollout.turn_ids.amax(1) + 1
    every = torch.ones_like(turns, dtype=torch.bool)
    failures = metrics.total(sum(extra.get(FAILURES, 0) for extra in rollout.extras))
    return {
        "rollout/turns/mean": metrics.masked_mean(turns, every),
        "rollout/turns/max": metrics.masked_max(turns, every),
        "rollout/observation_tokens/mean": metrics.masked_mean((seen & ~chosen).sum(1), every),
        **({"environment/failures": failures} if of_environment else {"rollout/tool_failures": failures}),
        **environment_metrics(rollout),
        **rows,
    }


def environment_metrics(rollout: Rollout) -> Metrics:
    """The means of the numbers of an environment's info, over the episodes that have them. Raises ValueError for more
    than `NUMBERS` names, since each is a metric of the run."""
    found: dict[str, list[float]] = {}
    for extra in joined(rollout).extras:
        for name, number in extra.get(INFO, {}).items() if isinstance(extra.get(INFO), dict) else ():
            found.setdefault(f"{INFO}/{name}", []).append(number)
    if len(found) > NUMBERS:
        text = f"the environment's info has {len(found):,} names in one batch, {listed(found, 100)}"
        raise ValueError(f"{text}: at most {NUMBERS} become metrics; name a number alike in all episodes and turns")
    return {name: metrics.mean(sum(numbers), len(numbers)) for name, numbers in sorted(found.items())}
