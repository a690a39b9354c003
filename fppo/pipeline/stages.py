"""The stages of a step as plain functions: each takes a record and returns the next stage's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fppo import advantages, losses, metrics
from fppo._errors import RunFailed
from fppo.advantages import Advantages
from fppo.batch import Annotated, Experience, Prompts, Rollout, Scored, extend
from fppo.key import Key
from fppo.losses import Correction, KLState
from fppo.metrics import Metrics
from fppo.pipeline.estimators import Estimator, of_rows
from fppo.pipeline.gap import of_engine
from fppo.pipeline.measure import batch_metrics
from fppo.pipeline.passes import (
    ConfidenceFn,
    Passes,
    PolicyPass,
    Role,
    ValuePass,
    balance_of,
    policy_pass,
    read_values,
    required,
    value_pass,
)
from fppo.pipeline.program import EstimateStage, RunState, Together, in_turn
from fppo.pipeline.timing import timed
from fppo.rollout.engine import Ask, Engine, Newer, OnFinished, Sampling
from fppo.runtime.offload import OnHost
from fppo.steps.actor import OldLogProbs, rollout_gap
from fppo.steps.experts import rerouted
from fppo.steps.forward import Forward, TokenOutputs
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.packed import masks_and_tokens
from fppo.steps.train_state import Params
from fppo.tree import replace

ScoreFn = Callable[[Rollout], tuple[Scored, Metrics]]
RouterReplay = Literal["none", "rollout", "old_log_probs", "all"]
_PASSES = ("old_log_prob", "ref", "values")


def rollout_stage(
    prompts: Prompts,
    params: Params,
    *,
    key: Key,
    version: int,
    engine: Engine,
    sampling: Sampling,
    measure: Sequence[Callable[[Rollout], Metrics]] = (),
    make_on_finished: Callable[[Prompts, int], OnFinished | None] = lambda prompts, n: None,
    newer: Newer | None = None,
) -> tuple[Rollout, Metrics]:
    """Responses to the prompts from the engine, how far its two kinds of log-probs lie apart, and what `measure` says
    of them. `make_on_finished(prompts, n)` gives the function that the engine calls for each row as it finishes;
    `newer` is an `Ask`'s."""
    on_finished = make_on_finished(prompts, sampling.n)
    ask = Ask(prompts, sampling, key, version=version, on_finished=on_finished, newer=newer)
    rollout = engine.generate(params, ask)
    kept = (rollout.rollout_log_probs - rollout.sampling_log_probs).exp()
    reports = [fn(rollout) for fn in measure]
    return rollout, metrics.merge({"rollout/kept_mass": metrics.masked_mean(kept, rollout.response_mask)}, *reports)


def score_stage(rollout: Rollout, *, params: Params, prompts: Prompts | None, score: ScoreFn) -> tuple[Scored, Metrics]:
    """The rollout with its scores."""
    del params, prompts
    return score(rollout)


def score_with_greedy(
    rollout: Rollout, *, params: Params, prompts: Prompts | None, score: ScoreFn, engine: Engine, sampling: Sampling
) -> tuple[Scored, Metrics]:
    """`score_stage`, with the score of each prompt's greedy response as the baseline (ReMax, arXiv:2310.10505).

    Rows lie as engines make them, all responses to a prompt together. Raises ValueError without prompts.
    """
    if prompts is None:
        raise ValueError("remax samples a greedy response to each prompt: a rollout from a file has no prompts")
    scored, report = score(rollout)
    greedy = engine.generate(params, Ask(prompts, sampling, Key(0), version=int(rollout.versions[0])))
    baselines, _ = score(greedy)
    per_row = baselines.scores.repeat_interleave(len(rollout.tokens) // len(prompts.tokens))
    report["critic/baseline/mean"] = metrics.masked_mean(per_row, ~per_row.isnan())
    return extend(Scored, scored, baselines=per_row), report


def annotate(
    scored: Scored,
    run: RunState,
    *,
    forward: Forward,
    critic: Forward | ConfidenceFn | None,
    micro_batching: MicroBatching,
    temperature: float = 1.0,
    old_log_probs: OldLogProbs = "pass",
    sum_squared: bool = False,
    replay: RouterReplay = "none",
    fetch: Callable[[Role, Params], Params | OnHost] = lambda role, params: params,
) -> tuple[Annotated, Metrics]:
    """`annotate_by` the passes of these models, where this process is: `forward` of the policy and its reference,
    `critic` a model or one of the policy's confidence. `fetch` is how the passes get at a role's parameters."""
    sampling, choosing = (attrs.evolve(forward, replay=replay == name) for name in ("rollout", "all"))
    model = isinstance(critic, Forward)
    policy = partial(policy_pass, micro_batching=micro_batching, temperature=temperature)
    of_critic = partial(fetch, "critic")
    passes = Passes(
        policy=partial(policy, forward=sampling, fetch=partial(fetch, "actor")),
        reference=partial(policy, forward=choosing, fetch=partial(fetch, "ref")),
        values=partial(value_pass, forward=critic, micro_batching=micro_batching, fetch=of_critic) if model else None,
        confidence=None if model else critic,
        balance=partial(balance_of, forward=forward),
    )
    return annotate_by(scored, run, passes=passes, old_log_probs=old_log_probs, sum_squared=sum_squared, replay=replay)


def annotate_by(
    scored: Scored,
    run: RunState,
    *,
    passes: Passes,
    old_log_probs: OldLogProbs = "pass",
    sum_squared: bool = False,
    replay: RouterReplay = "none",
    together: Together = in_turn,
) -> tuple[Annotated, Metrics]:
    """Old log-probs, reference log-probs if the run has a reference, and values if it has a critic.

    The old log-probs come from a "pass" of the policy before its update; or they are the "engine"'s; or the "update"
    takes them from its own pass, and what stands in their field until then is the engine's; or "auto": the engine's
    where a pass over few rows finds them to be the policy's own, else those of a pass (`gap.of_engine`). The metric
    training/old_log_probs/SOURCE is 1. With `replay` a pass tells what experts the policy chooses; with "all" the
    reference chooses them, too, and its pass comes after. With "rollout" the rows have those that the engine chose, and
    the policy's passes choose them again; one over all rows tells which it would have chosen (`experts.rerouted`). The
    others run `together`, as none needs another's result.
    """
    besides = {"sum_squared_probs": sum_squared, **dict.fromkeys(passes.read, True)}
    whole = old_log_probs == "pass" or any(besides.values())  # there is a pass over all rows anyway
    besides["routed"] = whole if replay == "rollout" else replay != "none"
    asked = ["log_probs", *(name for name, wanted in besides.items() if wanted)]
    work: dict[str, Callable[[], tuple[Any, Metrics]]] = {
        "old_log_prob": partial(timed("old_log_prob", _old), scored, run, passes.policy, old_log_probs, asked)
    }
    ref = timed("ref", _ref)
    if run.ref is not None and replay != "all":
        work["ref"] = partial(ref, scored, run.ref, passes.reference)
    if run.critic is not None and passes.values is not None:
        work["values"] = partial(timed("values", _values), scored, run.critic.params, passes.values)
    done = together(work)
    (source, old, found), _ = done["old_log_prob"]
    routed = scored.routed if replay == "rollout" else found.routed
    annotated = extend(Annotated, scored, old_log_probs=old, routed=routed)
    if run.ref is not None and replay == "all":
        done = {**done, "ref": ref(annotated, run.ref, passes.reference)}
    values, apart, signs = done["values"][0] if "values" in done else None, None, None
    report = metrics.merge({f"timing_s/{name}": metrics.spent() for name in _PASSES}, *(x for _, x in done.values()))
    if run.critic is not None and passes.read:
        values, apart, signs = read_values(passes, run.critic.params, old, found, scored)
    if apart is not None:
        report["critic/ensemble/std"] = metrics.masked_mean(apart, scored.response_mask)
    report |= {f"training/old_log_probs/{source}": metrics.mean(1.0)} | passes.balance(masks_and_tokens(scored))
    if replay == "rollout" and routed is not None and found.routed is not None:
        report |= rerouted(routed, found.routed, scored.attention_mask)
    columns = {"values": values, "disagreement": apart, "sum_squared_probs": found.sum_squared_probs}
    columns |= {"entropy": found.entropy, "hidden": found.hidden, "truth_signs": signs}
    ref_log_probs = done["ref"][0] if "ref" in done else None
    return extend(Annotated, annotated, ref_log_probs=ref_log_probs, **columns), report


def _old(
    scored: Scored, run: RunState, policy: PolicyPass, source: OldLogProbs, asked: Sequence[str]
) -> tuple[tuple[OldLogProbs, Tensor, TokenOutputs], Metrics]:
    """The old log-probs and where they come from, and whatever else was `asked` of the policy's pass."""
    alone, old = list(asked) == ["log_probs"], scored.rollout_log_probs

    def again(rows: Scored) -> Tensor:
        return required(policy(run.actor.params, rows, outputs=asked).log_probs)

    if source == "auto" and alone:
        source, old, report = of_engine(scored, run, again)
        return (source, old, TokenOutputs()), report
    if source in ("engine", "update") and alone:
        return (source, old, TokenOutputs()), {}
    out = policy(run.actor.params, scored, outputs=asked)
    log_probs = required(out.log_probs)
    source = "pass" if source == "auto" else source
    report = rollout_gap(log_probs, scored.rollout_log_probs, scored.response_mask)
    return (source, log_probs if source == "pass" else old, out), report


def _ref(scored: Scored, params: Params, reference: PolicyPass) -> tuple[Tensor, Metrics]:
    return required(reference(params, scored, outputs=("log_probs",)).log_probs), {}


def _values(scored: Scored, params: Params, values: ValuePass) -> tuple[Tensor, Metrics]:
    return values(params, scored), {}


def leave_agreed(estimate: EstimateStage, *, share: float) -> EstimateStage:
    """The stage, with advantages of 0 at the `share` of its tokens in which an ensemble of critics agrees most
    (`advantages.decisive`); critic/ensemble/left is the share of these. The critics learn from all tokens.

    It raises ValueError for a batch without an ensemble's disagreement.
    """

    @wraps(estimate)
    def stage(annotated: Annotated, kl: KLState) -> tuple[Experience, KLState, Metrics]:
        experience, kl, report = estimate(annotated, kl)
        mask = experience.response_mask
        kept = advantages.decisive(_apart(experience, "leave_agreed"), mask, share=share)
        left = {"critic/ensemble/left": metrics.masked_mean(~kept, mask)}
        return replace(experience, advantages=experience.advantages.where(kept, 0.0)), kl, report | left

    return stage


def leave_disputed(estimate: EstimateStage, *, share: float) -> EstimateStage:
    """The stage, without an entropy bonus for the `share` of its tokens in which an ensemble of critics disagrees most
    (`advantages.undisputed`); critic/ensemble/disputed is the share of these. All else is as it was.

    It raises ValueError for a batch without an ensemble's disagreement.
    """

    @wraps(estimate)
    def stage(annotated: Annotated, kl: KLState) -> tuple[Experience, KLState, Metrics]:
        experience, kl, report = estimate(annotated, kl)
        kept = advantages.undisputed(_apart(experience, "leave_disputed"), experience.response_mask, share=share)
        gone = {"critic/ensemble/disputed": metrics.masked_mean(~kept, experience.response_mask)}
        return replace(experience, entropy_mask=kept), kl, report | gone

    return stage


def _apart(experience: Experience, reader: str) -> Tensor:
    if experience.disagreement is None:
        raise ValueError(f"{reader} needs disagreement in the batch: give the run an ensemble of critics")
    return experience.disagreement


def estimate(
    annotated: Annotated,
    kl: KLState,
    *,
    advantage_fn: Estimator,
    max_tokens: int,
    kl_in_reward: bool = False,
    kl_kind: str = "k1",
    update_kl: Callable[[KLState, Tensor, Tensor], KLState] | None = None,
    correct: Callable[[Tensor, Tensor, Tensor], Correction] | None = None,
    drop: Sequence[Callable[[Annotated], Tensor]] = (),
    whiten: bool = False,
) -> tuple[Experience, KLState, Metrics]:
    """Token rewards, advantages and returns; the KL controller's next state; the off-policy correction.

    `advantage_fn` is an estimator as those of `fppo.advantages`: its parameters are columns (`OfRows`).
    Rows without a score (or, with baselines, without one of these) leave the mask first, and with it their group.
    Advantages are estimated on all response tokens of the others; then the rows that a function of `drop` names
    (bool [B]) and what the correction rejects leave the mask, the whitening and all denominators, so a rejected last
    token does not take its row's reward with it. The divergence that the controller sees is that of all rows.

    Raises ValueError for an estimator whose results are not [B, T], and for a KL in the rewards without reference
    log-probs or of another kind than "k1", the only one whose own expected gradient is 0, so that the penalty in the
    rewards is all of it; RunFailed, which is one too, where no row of the first policy has a score.
    """
    if kl_in_reward:
        _check_penalty(annotated, kl, kl_kind)
    mask, report = annotated.response_mask, {}
    penalty, coef = None, 0.0
    if annotated.ref_log_probs is not None:
        penalty = losses.kl_estimate(annotated.old_log_probs, annotated.ref_log_probs, kl_kind, mask=mask)
        current = losses.sequence_kl(penalty, mask)
        report |= {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": metrics.mean(kl.coef)}
        if kl_in_reward:
            coef = kl.coef
        if update_kl is not None:
            kl = update_kl(kl, current.total / current.count.clamp(min=1), current.count)
    mask = mask & _scored(annotated)[:, None]
    rewards = advantages.token_rewards(annotated.scores, mask, kl=penalty, kl_coef=coef)
    result = of_rows(advantage_fn)(replace(annotated, response_mask=mask), rewards)
    _check_shapes(result, mask)
    if drop:
        gone = torch.stack([fn(annotated) for fn in drop]).any(0)[:, None].expand(mask.shape)
        report["rollout/dropped"], mask = metrics.masked_mean(gone, mask), mask & ~gone
    weights = None
    if correct is not None:
        correction = correct(annotated.old_log_probs, annotated.rollout_log_probs, mask)
        mask, weights = correction.mask, correction.weights
        report |= correction.metrics
    estimated = result.advantages.where(mask, 0.0)
    experience = extend(
        Experience,
        annotated,
        response_mask=mask,
        token_rewards=rewards,
        advantages=advantages.whiten(estimated, mask) if whiten else estimated,
        returns=result.returns.where(mask, 0.0),
        correction_weights=weights,
    )
    return experience, kl, report | batch_metrics(experience, max_tokens=max_tokens)


def _check_shapes(result: Advantages, mask: Tensor) -> None:
    for name, x in (("advantages", result.advantages), ("returns", result.returns)):
        if x.shape != mask.shape:
            raise ValueError(f"the estimator gave {name} {list(x.shape)}, expected [B, T] = {list(mask.shape)}")


def _scored(annotated: Annotated) -> Tensor:
    """The rows with a score. Raises RunFailed where the first policy, which has had no update, has none."""
    there = annotated.has_score
    if not there.any() and not annotated.versions.any():
        lacking = [name for name, x in annotated.named_scores.items() if x.isnan().any()]
        raise RunFailed(
            f"none of the first {len(there)} responses has a score, so there is nothing to learn from: {lacking} gave "
            "none, as the counts of what failed say; mend that, or name the score of a failure (reward.failure_score)"
        )
    return there


def _check_penalty(annotated: Annotated, kl: KLState, kind: str) -> None:
    """Raises ValueError for a KL in the rewards that has no reference, or another gradient than the divergence's."""
    if kl.coef > 0 and annotated.ref_log_probs is None:
        text = "needs ref_log_probs in the batch: give the run a reference policy (RunState.ref)"
        raise ValueError(f"kl_in_reward=True with the coefficient {float(kl.coef):g} {text}")
    if kind not in losses.REWARD_KINDS:
        text = "is a loss and no reward: penalties of its value do not add up to the divergence's gradient; give 'k1'"
        raise ValueError(f"kl_in_reward=True with kl_kind={kind!r}: it {text}")
