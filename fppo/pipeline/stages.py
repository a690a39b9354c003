"""The stages of a step as plain functions: each takes a record and returns the next stage's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Literal, NamedTuple, TypeVar

import attrs
import torch
from torch import Tensor

from fppo import advantages, losses, metrics
from fppo import batch as batches
from fppo.batch import Annotated, Experience, Prompts, Rollout, Scored, extend
from fppo.key import Key
from fppo.losses import Correction, KLState
from fppo.metrics import Metrics
from fppo.models.model import Model
from fppo.pipeline.estimators import Estimator, of_rows
from fppo.pipeline.gap import of_engine
from fppo.pipeline.measure import batch_metrics
from fppo.pipeline.program import RunState
from fppo.pipeline.timing import now
from fppo.rollout.engine import Ask, Engine, OnFinished, Sampling
from fppo.runtime.mesh import DATA_AXES, Mesh, place_on
from fppo.runtime.offload import OnHost
from fppo.steps.actor import OldLogProbs, rollout_gap
from fppo.steps.forward import (
    Forward,
    Rows,
    TokenOutputs,
    compute_log_probs,
    compute_outputs,
    compute_values,
    row_lengths,
)
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.ranks import collect, imbalance, shares
from fppo.steps.train_state import Params

R = TypeVar("R", bound=Rows)
ScoreFn = Callable[[Rollout], tuple[Scored, Metrics]]
ConfidenceFn = Callable[[Params, Tensor, Tensor, Tensor], Tensor]  # `steps.confidence_values`
Role = Literal["actor", "ref", "critic"]
RouterReplay = Literal["none", "old_log_probs", "all"]


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
) -> tuple[Rollout, Metrics]:
    """Responses to the prompts from the engine, how far its two kinds of log-probs lie apart, and what `measure` says
    of them. `make_on_finished(prompts, n)` gives the function that the engine calls for each row as it finishes."""
    on_finished = make_on_finished(prompts, sampling.n)
    rollout = engine.generate(params, Ask(prompts, sampling, key, version=version, on_finished=on_finished))
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

    Raises ValueError without prompts.
    """
    if prompts is None:
        raise ValueError("remax samples a greedy response to each prompt: a rollout from a file has no prompts")
    scored, report = score(rollout)
    greedy = engine.generate(params, Ask(prompts, sampling, Key(0), version=int(rollout.versions[0])))
    baselines, _ = score(greedy)
    per_row = baselines.scores.repeat_interleave(len(rollout.tokens) // len(prompts.tokens))
    report["critic/baseline/mean"] = metrics.masked_mean(per_row, torch.ones_like(per_row, dtype=torch.bool))
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
    """Old log-probs, reference log-probs if the run has a reference, values by `critic` if it has a critic, a model or
    one of the policy's confidence.

    All ranks hold all rows; each computes a share of equal work, and all get all results. `fetch` is how the passes get
    at a role's parameters. The old log-probs come from a "pass" of the policy before its update; or they are the
    "engine"'s; or the "update" takes them from its own pass, and what stands in their field until then is the engine's;
    or "auto": the engine's where a pass over few rows finds them to be the policy's own, else those of a pass
    (`gap.of_engine`). The metric training/old_log_probs/SOURCE is 1. With `replay` a pass tells what experts the policy
    chooses; with "all" the reference chooses them, too.
    """
    share, times = share_of(scored, forward), [now()]
    source, old, told, report = old_log_probs, scored.rollout_log_probs, TokenOutputs(), {}
    entropy = not isinstance(critic, Forward | None)
    besides = {"sum_squared_probs": sum_squared, "entropy": entropy, "routed": replay != "none"}
    outputs = ["log_probs", *(name for name, asked in besides.items() if asked)]
    ask = partial(compute_outputs, micro_batching=micro_batching, outputs=outputs, temperature=temperature)

    def trainers(rows: Scored) -> TokenOutputs:
        part = share if rows is scored else share_of(rows, forward)
        out = ask(fetch("actor", run.actor.params), part.own, forward=forward)
        columns = {name: part.collected(x) for name, x in out._asdict().items() if x is not None}
        return TokenOutputs()._replace(**columns)

    if source == "auto" and len(outputs) == 1:
        source, old, report = of_engine(scored, run, lambda rows: there(trainers(rows).log_probs))
    elif source in ("pass", "auto") or len(outputs) > 1:
        source, told = "pass" if source == "auto" else source, trainers(scored)
        report = rollout_gap(there(told.log_probs), scored.rollout_log_probs, scored.response_mask)
        old = there(told.log_probs) if source == "pass" else old
    times.append(now())
    annotated, ref = extend(Annotated, scored, old_log_probs=old, routed=told.routed), None
    if run.ref is not None:
        again = partial(compute_log_probs, micro_batching=micro_batching, temperature=temperature)
        choosing, own = attrs.evolve(forward, replay=replay == "all"), share_of(annotated, forward).own
        ref = share.collected(again(fetch("ref", run.ref), own, forward=choosing))
    times.append(now())
    values = None
    if run.critic is not None and isinstance(critic, Forward):
        params = fetch("critic", run.critic.params)
        values = share.collected(compute_values(params, share.own, forward=critic, micro_batching=micro_batching))
    elif run.critic is not None and not isinstance(critic, Forward | None):
        values = critic(run.critic.params, old, there(told.entropy), scored.response_mask)
    times.append(now())
    report |= _annotating(times, share, forward.model, row_lengths(scored), source)
    columns = {"values": values, "sum_squared_probs": told.sum_squared_probs, "entropy": told.entropy}
    return extend(Annotated, annotated, ref_log_probs=ref, **columns), report


def _annotating(
    times: Sequence[float], share: Share, model: Model, lengths: Sequence[int], source: OldLogProbs
) -> Metrics:
    """Where the old log-probs are from, the seconds of each pass, and how unequal the ranks' work is where there are
    several."""
    report: Metrics = {f"training/old_log_probs/{source}": metrics.mean(1.0)}
    if len(share.places) > 1:
        report["perf/imbalance"] = metrics.mean(imbalance(model, lengths, share.places))
    for name, start, end in zip(("old_log_prob", "ref", "values"), times, times[1:], strict=False):
        report[f"timing_s/{name}"] = metrics.total(end - start)
    return report


class Share(NamedTuple, Generic[R]):
    """This rank's share of rows that all ranks hold, and the numbers of every data rank's."""

    own: R
    places: list[list[int]]
    mesh: Mesh

    def collected(self, x: Tensor) -> Tensor:
        """What each rank computed of its rows, on all ranks and in order."""
        return collect(x, self.places, self.mesh)


def share_of(rows: R, forward: Forward) -> Share[R]:
    """This rank's share of the rows, of equal work for the model."""
    mesh = forward.mesh
    places = shares(forward.model, row_lengths(rows), mesh)
    own = rows if len(places) == 1 else batches.rows(rows, places[place_on(mesh, DATA_AXES)])
    return Share(own, places, mesh)


def there(x: Tensor | None) -> Tensor:
    """What a pass was asked for, and gave."""
    assert x is not None
    return x


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

    `advantage_fn` is one that `estimator` makes, `fn(rows, token_rewards)`, or one of groups, as
    `laws.check_advantages` takes it: `fn(scores, mask, groups)`.
    Advantages are estimated on all response tokens; then the rows that a function of `drop` names (bool [B]) and what
    the correction rejects leave the mask, the whitening and all denominators, so a rejected last token does not take
    its row's reward with it. Raises ValueError for an estimator whose results are not [B, T], and for a KL in the
    rewards without reference log-probs.
    """
    if kl_in_reward and kl.coef > 0 and annotated.ref_log_probs is None:
        text = "needs ref_log_probs in the batch: give the run a reference policy (RunState.ref)"
        raise ValueError(f"kl_in_reward=True with the coefficient {float(kl.coef):g} {text}")
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
    rewards = advantages.token_rewards(annotated.scores, mask, kl=penalty, kl_coef=coef)
    result = of_rows(advantage_fn)(annotated, rewards)
    for name, x in (("advantages", result.advantages), ("returns", result.returns)):
        if x.shape != mask.shape:
            raise ValueError(f"the estimator gave {name} {list(x.shape)}, expected [B, T] = {list(mask.shape)}")
    for fn in drop:
        mask = mask & ~fn(annotated)[:, None]
    if drop:
        report["rollout/dropped"] = metrics.masked_mean(~mask, annotated.response_mask)
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
